"""From a conversation to token ids and the spans that the assistant wrote, by the target tokenizer's own chat template."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import transformers
from torch import Tensor

from ..errors import ForedraftError
from .conversations import Conversations
from .encoding import Encoding
from .forms import Conversation, Message, conversation_of
from .images import images_in
from .pieces import Pieces
from .skipped import Skipped, Unusable
from .template import TEXTUAL, Reader, Template

Array = np.ndarray[Any, Any]

# Of a long text so many characters behind the last token that is wanted are read too, and again as many to see that they do not matter.
MARGIN = 4096


@dataclass(frozen=True)
class Rendered:
    """A conversation as the target sees it."""

    ids: list[int]
    spans: list[int]
    """Per token the number of the assistant turn it belongs to (its end-of-turn token included), -1 elsewhere."""
    pixels: dict[str, Tensor] | None = None
    """Where there are images, what the target reads beside `ids`, by its arguments' names."""


class Renderer:
    """Renders conversations with the chat template of a tokenizer or, where they hold images, of a processor.

    The assistant's spans come from the template's `{% generation %}` tags where it has them; else from rendering prefixes of the
    conversation: what a turn adds to the prompt that asks for it is that turn's span. Tokens across a border are not supervised, nor
    are empty turns, nor the end of turns that were cut short.
    """

    def __init__(self, reader: Reader):
        self.template = Template(reader)
        self.pieces = Pieces(self.template)
        tokenizer = self.tokenizer = self.template.tokenizer
        self.encoding = Encoding(tokenizer)
        # all_special_ids holds the named ones (eos, pad ...) only; an end-of-turn token need not be among them.
        self.special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
        if not tokenizer.is_fast:
            raise ForedraftError(
                f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer is needed to find the assistant's tokens"
            )

    @cached_property
    def fingerprint(self) -> str:
        """The same for what renders the same."""
        tokenizer, processor = self.tokenizer, self.template.processor
        told = [str(tokenizer.chat_template), tokenizer.special_tokens_map, tokenizer.backend_tokenizer.to_str()]
        told += [str(processor), transformers.__version__] if processor is not None else []
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def render(self, messages: Sequence[Message], length: int | None = None) -> Rendered:
        """Ids and spans of all or the first `length` tokens. Raises `Unusable`, showing the conversation, if it has no consistent spans."""
        conversation = messages if isinstance(messages, Conversation) else conversation_of(list(messages))
        try:
            pieces = None if self.template.tagged else self.pieces.of(conversation, conversation.tools)
            text, ends = pieces or (self.template.text(conversation, conversation.tools), None)
            tokens = self._seen(text, conversation, length) if images_in(conversation) else self._encode(text, length)
            found = self._by_tags(conversation, tokens) if self.template.tagged else self._by_prefixes(conversation, tokens, ends)
            spans = np.full(len(tokens.ids), -1)
            for turn, inside in found:
                spans[inside] = turn
        except Unusable as reason:
            raise Unusable(reason.kind, f"{reason.detail}\n{_show(conversation)}") from reason
        return Rendered(tokens.ids, spans.tolist(), tokens.pixels)

    def render_all(self, conversations: Conversations, length: int | None = None, *, strict: bool = False) -> tuple[list[Rendered], int]:
        """All that have something to supervise within `length` tokens, and the number of those that have not.

        Conversations that the template does not render are warned of, or an error if `strict` or if no other is there.
        """
        rendered, skipped = [], Skipped(strict)
        for i, conversation in enumerate(conversations):
            try:
                rendered.append(self.render(conversation, length))
            except Unusable as reason:
                skipped.add(f"{conversations.source}, conversation {i}", reason)
        if skipped and not rendered:
            raise ForedraftError(f"no conversation of '{conversations.source}' can be rendered:\n  {skipped}")
        skipped.warn()
        kept = [r for r in rendered if any(s >= 0 for s in r.spans)]
        return kept, len(conversations) - len(kept)

    def _by_tags(self, conversation: Conversation, tokens: "_Tokens") -> Iterator[tuple[int, Array]]:
        spans = self.template.tags(conversation, conversation.tools)
        answers = [i for i, m in enumerate(conversation) if m["role"] == "assistant"]
        if not spans and any(conversation[i]["content"].strip() for i in answers):
            raise Unusable("the template's generation tags marked nothing of the assistant turns")
        for turn, (start, end) in enumerate(spans):
            if len(spans) == len(answers):
                end = _learnt(conversation, turn, answers[turn], tokens.text, start, end)
            yield turn, tokens.inside(start, end)

    def _by_prefixes(self, conversation: Conversation, tokens: "_Tokens", ends: list[int] | None) -> Iterator[tuple[int, Array]]:
        """Turn by turn, as far as tokens are wanted; what a prefix renders is known where it is known where messages end."""
        text, tools = tokens.text, conversation.tools
        for turn, i in enumerate(i for i, m in enumerate(conversation) if m["role"] == "assistant"):
            if i == 0:
                continue  # nobody asked: a greeting that the model is not prompted for
            asked = text[: ends[i - 1]] + str(self.pieces.opening) if ends else self.template.text(conversation[:i], tools, prompt=True)
            if len(asked) >= tokens.reach:
                return
            answered = text[: ends[i]] if ends else self.template.text(conversation[: i + 1], tools).removesuffix(self.template.closing)
            if not (answered.startswith(asked) and text.startswith(answered)):
                raise Unusable(
                    "no consistent assistant mask",
                    f"its chat template renders the text up to assistant turn {turn} differently once more turns follow (thinking blocks "
                    "stripped, perhaps).\n  Use a template with {% generation %} tags, or single-turn data",
                )
            end = _learnt(conversation, turn, i, text, len(asked), len(answered))
            inside = tokens.inside(len(asked), end)
            yield turn, self._to_end_of_turn(tokens, inside, end) if end == len(answered) else inside

    def _to_end_of_turn(self, tokens: "_Tokens", inside: Array, end: int) -> Array:
        """Cut what the template puts after the end-of-turn token: the model never writes it."""
        unread = tokens.text[tokens.reach : end]
        if unread and any(token in unread for token in self._special_texts):
            return inside  # the turn goes on behind what was wanted
        last = next((place for place in range(len(inside) - 1, -1, -1) if tokens.ids[inside[place]] in self.special), None)
        return inside if last is None else inside[: last + 1]

    @cached_property
    def _special_texts(self) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(sorted(self.special))

    def _encode(self, text: str, length: int | None) -> "_Tokens":
        """The tokens of the text, or the first `length` of them: then no more of a long text is read than they need.

        Where a text is cut, its last tokens may differ; so many are left out, and two cuts must agree on the others.
        """
        room = len(text) if length is None else 8 * length + MARGIN
        while length is not None and 2 * (room + MARGIN) < len(text):
            ids, starts, ends = self.encoding(text[:room])
            if len(ids) > length and ends[length] + MARGIN <= room:
                longer, _, _ = self.encoding(text[: room + MARGIN])
                if longer[:length] == ids[:length]:
                    return _Tokens(text, ids[:length], starts[:length], ends[:length])
            room *= 4
        ids, starts, ends = self.encoding(text)
        return _Tokens(text, ids[:length], starts[:length], ends[:length])

    def _seen(self, text: str, conversation: Conversation, length: int | None) -> "_Tokens":
        """The tokens of a text with images. Those of an image are as wide as nothing, where its place in the text ends.

        Raises `Unusable` where an image is not whole within `length`.
        """
        made = self.template.inputs(text, conversation)
        (ids,), (offsets,) = made.pop("input_ids").tolist(), made.pop("offset_mapping").tolist()
        (filled,) = made.pop("text_replacement_offsets")
        at, shift, back = 0, 0, []
        for start, end in offsets:
            while at < len(filled) and start >= filled[at]["new_span"][1]:
                shift, at = filled[at]["new_span"][1] - filled[at]["span"][1], at + 1
            inside = at < len(filled) and end > filled[at]["new_span"][0]
            back.append((filled[at]["span"][1],) * 2 if inside else (start - shift, end - shift))
        pixels = {name: value for name, value in made.items() if isinstance(value, Tensor) and name not in TEXTUAL}
        length = len(ids) if length is None else length
        if any(start == end for start, end in back[length:]):
            raise Unusable(
                f"an image that ends beyond {length} tokens", f"the conversation has {len(ids)}: raise max_length, or shrink images"
            )
        row = {name: value[:, :length] if value.shape == (1, len(ids)) else value for name, value in pixels.items()}
        starts, ends = np.array(back[:length], np.int64).reshape(-1, 2).T
        return _Tokens(text, ids[:length], starts, ends, row)


class _Tokens:
    """Ids of a text, or of its beginning, and where each starts and ends in it."""

    def __init__(self, text: str, ids: Sequence[int], starts: Array, ends: Array, pixels: dict[str, Any] | None = None):
        self.text, self.ids, self.starts, self.ends, self.pixels = text, list(ids), starts, ends, pixels
        self.reach = int(ends[-1]) if len(ends) else 0

    def inside(self, start: int, end: int) -> Array:
        """Those wholly between two characters, by number."""
        found = np.arange(np.searchsorted(self.starts, start), np.searchsorted(self.ends, end, "right"))
        return found[self.ends[found] > self.starts[found]]


def _learnt(conversation: Conversation, turn: int, i: int, text: str, start: int, end: int) -> int:
    """Where what is to be learnt of a turn ends: nowhere in an empty one, and before its end if that was not the model's."""
    content = conversation[i]["content"].strip()
    if not content and not any(conversation[i].get(key) for key in ("tool_calls", "reasoning_content", "thinking")):
        return start
    if turn not in conversation.cut:
        return end
    found = text.rfind(content, start, end)
    return start if found < 0 else found + len(content)


def _show(messages: Sequence[Message]) -> str:
    shown = [f"    {m['role']}: {str(m['content'])[:200]!r}" for m in messages[:6]]
    return "\n".join([*shown, "    ..."] if len(messages) > len(shown) else shown)
