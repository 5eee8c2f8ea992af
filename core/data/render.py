"""From a conversation to token ids and the spans that the assistant wrote, by the target tokenizer's own chat template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from ..errors import ForedraftError
from .conversations import Conversations, Message


@dataclass(frozen=True)
class Rendered:
    """A conversation as the target sees it."""

    ids: list[int]
    spans: list[int]
    """Per token the number of the assistant turn it belongs to (its end-of-turn token included), -1 elsewhere."""


class Renderer:
    """Renders conversations with a tokenizer's chat template.

    The assistant's spans come from the template's `{% generation %}` tags where it has them; else from rendering prefixes of the
    conversation: what a turn adds to the prompt that asks for it is that turn's span. Tokens across a border are not supervised.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ForedraftError(
                "the target's tokenizer has no chat template: set tokenizer.chat_template, or use the instruct model's tokenizer"
            )
        # all_special_ids holds the named ones (eos, pad ...) only; an end-of-turn token need not be among them.
        self.special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)) is not None
        if not tokenizer.is_fast:
            raise ForedraftError(
                f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer is needed to find the assistant's tokens"
            )

    def render(self, messages: Sequence[Message], where: str = "conversation") -> Rendered:
        """Ids and spans. Raises `ForedraftError`, showing the conversation, if no consistent spans can be derived."""
        return self._by_tags(messages, where) if self.tagged else self._by_prefixes(messages, where)

    def render_all(self, conversations: Conversations) -> tuple[list[Rendered], int]:
        """All that have something to supervise, and the number of those that have not.

        Raises `ForedraftError` at the first conversation whose spans cannot be derived.
        """
        rendered = [self.render(c, f"{conversations.source}, conversation {i}") for i, c in enumerate(conversations)]
        kept = [r for r in rendered if any(s >= 0 for s in r.spans)]
        return kept, len(rendered) - len(kept)

    def _text(self, messages: Sequence[Message], where: str, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            raise ForedraftError(f"{where}: the chat template refuses it: {error}\n{_show(messages)}") from error

    def _by_tags(self, messages: Sequence[Message], where: str) -> Rendered:
        self._text(messages, where)
        out = self.tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(out["input_ids"]), list(out["assistant_masks"])
        if not any(mask) and any(m["role"] == "assistant" for m in messages):
            raise ForedraftError(f"{where}: the template's generation tags marked nothing of its assistant turns\n{_show(messages)}")
        spans, span = [], -1
        for i, marked in enumerate(mask):
            span += bool(marked and (i == 0 or not mask[i - 1]))
            spans.append(span if marked else -1)
        return Rendered(ids, spans)

    def _by_prefixes(self, messages: Sequence[Message], where: str) -> Rendered:
        text = self._text(messages, where)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        spans = [-1] * len(ids)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        for turn, i in enumerate(turns):
            if i == 0:
                continue  # nobody asked: a greeting that the model is not prompted for
            asked = self._text(messages[:i], where, prompt=True)
            answered = self._text(messages[: i + 1], where).removesuffix(self._closing)
            if not (answered.startswith(asked) and text.startswith(answered)):
                raise ForedraftError(
                    f"{where}: no consistent assistant mask: its chat template renders the text up to assistant turn {turn} differently "
                    "once more turns follow (thinking blocks stripped, perhaps).\n"
                    "  Use a template with {% generation %} tags, or single-turn data\n" + _show(messages)
                )
            inside = [n for n, (start, end) in enumerate(offsets) if start >= len(asked) and end <= len(answered) and end > start]
            for n in self._to_end_of_turn(ids, inside):
                spans[n] = turn
        return Rendered(ids, spans)

    @cached_property
    def _closing(self) -> str:
        """The end-of-text token where the template puts it behind the conversation, whoever spoke last (Phi-3): nobody writes it."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        eos = str(self.tokenizer.eos_token or "")
        one, two = (self._text(turns[:n], "the chat template") for n in (1, 2))
        return eos if one.endswith(eos) and not two.startswith(one) and two.startswith(one.removesuffix(eos)) else ""

    def _to_end_of_turn(self, ids: list[int], inside: list[int]) -> list[int]:
        """Cut what the template puts after the end-of-turn token: the model never writes it."""
        ends = [n for n in inside if ids[n] in self.special]
        return [n for n in inside if n <= ends[-1]] if ends else inside


def _show(messages: Sequence[Message]) -> str:
    return "\n".join(f"    {m['role']}: {str(m['content'])[:200]!r}" for m in messages)
