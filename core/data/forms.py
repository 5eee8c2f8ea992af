"""The forms a conversation may have in a record: OpenAI's, ShareGPT's, TRL's, a lone prompt, or a bare list of messages."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .images import KEYS, PLACE, image_of
from .skipped import Unusable

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **{role: role for role in ("system", "developer", "tool", "function", "observation", "ipython", "environment")},
}
_EXPECTED = "a list under 'messages' or 'conversations', 'prompt' alone or with 'completion' or 'chosen', or texts under 'turns'"


class Conversation(list[Message]):
    """Messages in order, and what else their record says of them."""

    def __init__(self, messages: Iterable[Message] = (), tools: list[Any] | None = None, cut: Iterable[int] = ()):
        super().__init__(messages)
        self.tools = tools
        """What the assistant may call, for the chat template."""
        self.cut = frozenset(cut)
        """The assistant turns, by number, that were cut short: they have no end to learn."""


def conversation_of(record: Any, folder: Path | None = None) -> Conversation:
    """The conversation that a record holds; `folder` is where images with relative paths may lie. Raises `Unusable`."""
    if isinstance(record, Unusable):
        raise record
    if isinstance(record, str):
        raise Unusable("a bare text, which has no turns", f"{record!r:.100}")
    if not isinstance(record, Mapping | list):
        raise Unusable("a record that is no object", f"{record!r:.100}")
    fields: Mapping[str, Any] = record if isinstance(record, Mapping) else {"messages": record}
    turns = _turns(fields)
    if not isinstance(turns, list):
        raise Unusable("no list of turns", f"found {turns!r:.100}")
    messages = [_message(turn, i) for i, turn in enumerate(turns)]
    _place_images(messages, fields.get("images") or fields.get("image"), folder)
    finish, answers = fields.get("finish"), sum(m["role"] == "assistant" for m in messages)
    told = finish if isinstance(finish, list) and len(finish) == answers else ()  # as `foredraft regenerate` writes it
    return Conversation(messages, _tools(fields.get("tools")), (i for i, why in enumerate(told) if why == "length"))


def _turns(fields: Mapping[str, Any]) -> Any:
    for name in ("messages", "conversations", "conversation"):
        if fields.get(name):
            return fields[name]
    asked, answered = _said(fields.get("prompt"), "user"), _said(fields.get("completion") or fields.get("chosen"), "assistant")
    if asked or answered:
        return answered if answered[: len(asked)] == asked or _opens(answered) else [*asked, *answered]
    texts = fields.get("turns")
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return _said(texts, "user")
    raise Unusable("no turns", f"expected {_EXPECTED}, found " + (f"the fields {sorted(map(str, fields))}" if fields else "nothing"))


def _said(value: Any, role: str) -> list[Any]:
    """A text, or each of several, as a turn of `role`; turns as they are."""
    turns = value if isinstance(value, list) else [value] if value else []
    return [{"role": role, "content": turn} if isinstance(turn, str) else turn for turn in turns]


def _opens(turns: list[Any]) -> bool:
    """Whether these turns are a whole conversation, as in preference data that repeats the prompt in each answer."""
    return bool(turns) and isinstance(turns[0], Mapping) and turns[0].get("role") in ("system", "user")


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise Unusable("a turn that is no object", f"turn {number} is {turn!r:.100}")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str):
        raise Unusable("a turn without 'role' (or 'from')", f"turn {number} has {sorted(map(str, turn))}")
    if (known := _ROLES.get(role.strip().lower())) is None:
        raise Unusable("an unknown role", f"'{role:.50}' in turn {number}; known: {', '.join(_ROLES)}")
    extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    if calls := extra.get("tool_calls"):
        extra["tool_calls"] = [_call(call, number) for call in (calls if isinstance(calls, list) else [calls])]
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if content is None and not calls:
        raise Unusable("a turn without 'content' (or 'value')", f"turn {number} has {sorted(map(str, turn))}")
    return {"role": known, "content": _text("" if content is None else content, number), **extra}


def _text(content: Any, number: int) -> Any:
    """Content as text; of OpenAI's list of parts, the texts joined, or the list where there are images among them."""
    if isinstance(content, list):
        parts = [_part(part, number) for part in content]
        content = parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)
    if not isinstance(content, str | list):
        raise Unusable(f"content of type {type(content).__name__}, which is no text", f"{content!r:.100} in turn {number}")
    for text in [content] if isinstance(content, str) else [part.get("text", "") for part in content]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unusable("text that is no Unicode", f"{error} in turn {number}") from error
    return content


def _part(part: Any, number: int) -> dict[str, Any]:
    """`{"type": "text", "text"}`, or `{"type": "image", "image"}`: what it was given, None where the record's `images` are meant."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("image", "image_url"):
        return {"type": "image", "image": next((part[key] for key in KEYS if part.get(key) is not None), None)}
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise Unusable(f"a content part of type '{kind or type(part).__name__}', which is no text and no image", f"in turn {number}")
    return {"type": "text", "text": text}


def _place_images(messages: list[Message], given: Any, folder: Path | None) -> None:
    """Put a record's own images (TRL's `images`, LLaVA's `image`) where its turns have a place for them, and look all of them up.

    Places are parts without an image, else the word `<image>` in a text; without either, images open the first user turn.
    """
    rest = list(given) if isinstance(given, list | tuple) else [given] if given is not None else []
    places = [p for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image" and p["image"] is None]
    if rest and not places:
        for message in (m for m in messages if isinstance(m["content"], str) and PLACE in m["content"]):
            first, *others = message["content"].split(PLACE)
            parts = [first, *(part for text in others for part in (None, text))]
            message["content"] = [{"type": "image", "image": None} if p is None else {"type": "text", "text": p} for p in parts if p != ""]
            places += [p for p in message["content"] if p["type"] == "image"]
    if rest and not places and (user := next((m for m in messages if m["role"] == "user"), None)) is not None:
        told = user["content"] if isinstance(user["content"], list) else [{"type": "text", "text": user["content"]}]
        places = [{"type": "image", "image": None} for _ in rest]
        user["content"] = [*places, *told]
    if len(rest) != len(places):
        raise Unusable("images that do not match their places", f"{len(rest)} images, {len(places)} places in the turns")
    for place, image in zip(places, rest, strict=True):
        place["image"] = image
    for number, message in enumerate(messages):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image" and message["role"] == "assistant":
                raise Unusable("an image in an assistant turn, which no target writes", f"in turn {number}")
            if part["type"] == "image":
                part["image"] = image_of(part["image"], folder, f"turn {number}")


def _call(call: Any, number: int) -> Any:
    """A tool call with its arguments as an object, as chat templates want them; OpenAI's are JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unusable("a tool call without 'function'", f"{call!r:.100} in turn {number}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise Unusable("a tool call whose arguments are no JSON", f"{arguments!r:.100} in turn {number}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    """A record's tools: a list, or the same as JSON text, as where columns have types."""
    try:
        found = json.loads(tools) if isinstance(tools, str) and tools else tools or None
    except (ValueError, RecursionError):
        found = tools
    if found is not None and not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise Unusable("'tools' that are no list of objects", f"{tools!r:.100}")
    return found
