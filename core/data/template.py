"""A tokenizer's chat template: the text it renders, what it takes, and what a run sets of it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import ForedraftError
from .forms import Conversation, Message
from .images import images_in, opened, text_of
from .skipped import Unusable

Reader: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
"""What turns conversations into a target's inputs: its tokenizer or, where there are images, its processor."""


TEXTUAL = ("attention_mask", "offset_mapping")
"""What a processor says beside a target's inputs; prompts are not padded."""


class Template:
    """The chat template of a tokenizer or processor. Raises `ForedraftError` if there is none."""

    def __init__(self, reader: Reader):
        self.processor: Any = reader if isinstance(reader, ProcessorMixin) else None
        tokenizer: Any = tokenizer_of(reader)
        if not tokenizer.chat_template:
            raise ForedraftError(
                "the target's tokenizer has no chat template: give one (chat_template: a file or its text), "
                "or use the instruct model's tokenizer"
            )
        self.tokenizer = tokenizer
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)) is not None
        """Whether it marks what the assistant writes."""

    def text(self, messages: Sequence[Message], tools: list[Any] | None = None, prompt: bool = False, **other: Any) -> str:
        """The conversation; with `prompt`, up to where the assistant's next turn begins. Raises `Unusable` where the template does."""
        return _apply(self.tokenizer, self._shown(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **other)

    def tags(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[tuple[int, int]]:
        """From which character to which the template marks the text as the assistant's."""
        _, [tagged] = render_jinja_template(
            [self._shown(messages)],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        spans: list[tuple[int, int]] = []
        for start, end in tagged:  # a turn may be tagged in pieces
            if spans and start == spans[-1][1]:
                spans[-1] = spans[-1][0], end
            elif start < end:
                spans.append((start, end))
        return spans

    @cached_property
    def closing(self) -> str:
        """The end-of-text token where the template puts it behind the conversation, whoever spoke last (Phi-3): nobody writes it."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        eos = str(self.tokenizer.eos_token or "")
        one, two = (self.text(turns[:n]) for n in (1, 2))
        return eos if one.endswith(eos) and not two.startswith(one) and two.startswith(one.removesuffix(eos)) else ""

    def inputs(self, text: str, messages: Sequence[Message]) -> dict[str, Any]:
        """What the processor makes of a rendered conversation with images: tensors of one row, places of images filled.

        Beside them `offset_mapping`, in the filled text, and `text_replacement_offsets`. Raises `Unusable` where it refuses.
        """
        if self.processor is None:
            raise Unusable("images, which a tokenizer does not read", "load the target's processor: AutoProcessor.from_pretrained(target)")
        asked = {"add_special_tokens": False, "return_offsets_mapping": True, "return_text_replacement_offsets": True}
        try:
            return dict(self.processor(text=[text], images=[[*map(opened, images_in(messages))]], return_tensors="pt", **asked))
        except Unusable:
            raise
        except Exception as error:  # whatever a processor raises
            raise Unusable("the target's processor refuses it", f"{type(error).__name__}: {error}") from error

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form that the template takes."""
        return [{**m, "content": self._content(m["content"])} for m in self._with_calls(messages)]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._of_parts else content
        return [{"type": "image"} if part["type"] == "image" else part for part in content]

    @cached_property
    def _of_parts(self) -> bool:
        """Whether the template shows content as a list of parts alone, as many of those that know images do."""
        for content in ("some words", [{"type": "text", "text": "some words"}]):
            try:
                if "some words" in _apply(self.tokenizer, [{"role": "user", "content": content}], tokenize=False):
                    return not isinstance(content, str)
            except Unusable:
                continue
        return False

    def _with_calls(self, messages: Sequence[Message]) -> list[Message]:
        """Tool calls in the form that the template takes."""
        if not any(m.get("tool_calls") for m in messages):
            return list(messages)
        if self._arguments is None:
            raise Unusable("tool calls that the chat template does not render")
        return [{**m, "tool_calls": [_call(c, self._arguments) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]

    @cached_property
    def _arguments(self) -> type | None:
        """What the template takes a call's arguments as: an object (transformers' way), or JSON text; None if it shows no calls."""
        call = {"type": "function", "id": "call00001", "function": {"name": "some_function", "arguments": {"a": "b"}}}
        for form in (dict, str):
            answer = {"role": "assistant", "content": "", "tool_calls": [_call(call, form)]}
            try:
                if "some_function" in _apply(self.tokenizer, [{"role": "user", "content": "a"}, answer], tokenize=False):
                    return form
            except Unusable:
                continue
        return None


def tokenizer_of(reader: Reader) -> Any:
    """The tokenizer; that of a processor renders by the processor's chat template."""
    if not isinstance(reader, ProcessorMixin):
        return reader
    tokenizer: Any = reader.tokenizer
    tokenizer.chat_template = reader.chat_template or tokenizer.chat_template
    return tokenizer


def prompt_inputs(reader: Reader, messages: Sequence[Message]) -> dict[str, Tensor]:
    """What asks a target for the next assistant turn: `input_ids` [1, L], and of images what its processor makes of them.

    Without a chat template the plain text. Raises `Unusable` if template or processor refuse the messages.
    """
    tokenizer = tokenizer_of(reader)
    if not tokenizer.chat_template:
        ids = tokenizer("\n".join(text_of(m["content"]) for m in messages))["input_ids"]
        return {"input_ids": torch.tensor([ids])}
    template = Template(reader)
    text = template.text(messages, messages.tools if isinstance(messages, Conversation) else None, prompt=True)
    if not images_in(messages):
        return {"input_ids": torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])}
    made = template.inputs(text, messages)
    return {name: value for name, value in made.items() if isinstance(value, Tensor) and name not in TEXTUAL}


def with_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Give a tokenizer another chat template (a file or its text), and set variables of it, such as `enable_thinking`, for good.

    Raises `ForedraftError` where the file is missing or a variable cannot be set.
    """
    if chat_template:
        is_text = "{" in chat_template
        try:
            tokenizer.chat_template = chat_template if is_text else Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ForedraftError(f"chat_template '{chat_template:.200}' is no template, and no file that can be read: {error}") from error
    if template_kwargs:
        if not tokenizer.chat_template:
            raise ForedraftError("template_kwargs: the tokenizer has no chat template to set them in; give one (`chat_template`)")
        if wrong := [k for k, v in template_kwargs.items() if not k.isidentifier() or not _is_plain(v)]:
            raise ForedraftError(f"template_kwargs {wrong}: expected names, and values of text, numbers, true, false, lists or objects")
        # Jinja reads Python's literals. The empty expression keeps the template's own first line break.
        head = "".join(f"{{% set {key} = {value!r} %}}" for key, value in template_kwargs.items()) + "{{ '' }}"
        given = tokenizer.chat_template
        tokenizer.chat_template = {k: head + v for k, v in given.items()} if isinstance(given, dict) else head + given
    return tokenizer


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **arguments: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **arguments)
    except Exception as error:  # whatever a template raises
        raise Unusable("the chat template refuses it", str(error)) from error


def _call(call: Any, form: type) -> Any:
    arguments = call["function"].get("arguments")
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False) if form is str else arguments}}
