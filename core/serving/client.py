"""A server that speaks OpenAI's protocol, asked with patience."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ForedraftError

RETRIES = 5
"""After the first try, with pauses that double; of what a server may answer another time: connection, timeout, 408, 409, 429, 5xx."""


class Refused(ForedraftError):
    """One request that was not answered; others may be."""


class Gone(ForedraftError):
    """The server cannot be reached any more."""


@dataclass(frozen=True)
class Streamed:
    """One streamed answer."""

    tokens: int
    """As the server counts them."""
    first: float
    """Seconds to the first token."""
    seconds: float
    text: str


class Server:
    """Asks one model of a server. Threads may share it.

    Raises `ForedraftError` where the `openai` package is missing; of its methods each raises `Gone`, and `Refused` with the reason.
    """

    def __init__(self, base_url: str, model: str | None = None, timeout: float = 600.0, retries: int = RETRIES):
        try:
            import openai
        except ImportError as error:
            raise ForedraftError("to ask a server takes the package `openai`: pip install foredraft[serving]") from error
        self._errors = openai
        self.root = base_url.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.OpenAI(base_url=f"{self.root}/v1", api_key=key, timeout=timeout, max_retries=retries)
        self._asked = model

    @cached_property
    def model(self) -> str:
        """The model asked for, else the one that the server has."""
        names = [m.id for m in self._guarded(lambda: list(self._client.models.list()))]
        if self._asked is None and len(names) == 1:
            return str(names[0])
        if self._asked not in names:
            raise ForedraftError(f"'{self.root}' serves {', '.join(names) or 'nothing'}; asked for was {self._asked or 'its only model'}")
        return str(self._asked)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None, **settings: Any) -> tuple[dict[str, Any], str]:
        """(the answer as a message, why it ended). Its content, reasoning and tool calls are the server's."""
        more = {"tools": tools} if tools else {}
        reply = self._guarded(lambda: self._client.chat.completions.create(model=self.model, messages=list(messages), **more, **settings))
        choices: Any = getattr(reply, "choices", None)
        first: Any = choices[0] if isinstance(choices, list) and choices else None
        message = getattr(first, "message", None)
        if message is None or not (message.content is None or isinstance(message.content, str)):
            raise Refused(f"the server answers with something that is no chat completion: {reply!r:.200}")
        said = message.to_dict()
        found: dict[str, Any] = {"role": "assistant", "content": said.get("content") or ""}
        if thought := said.get("reasoning_content") or said.get("reasoning"):
            found["reasoning_content"] = thought
        if calls := said.get("tool_calls"):
            found["tool_calls"] = calls
        return found, str(first.finish_reason)

    def complete(self, prompt: Sequence[int], **settings: Any) -> dict[str, Any]:
        """A completion of token ids, as plain values."""
        reply = self._guarded(lambda: self._client.completions.create(model=self.model, prompt=list(prompt), **settings))
        if not hasattr(reply, "to_dict"):
            raise Refused(f"the server answers with something that is no completion: {reply!r:.200}")
        return dict(reply.to_dict())

    def stream(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Streamed:
        """A streamed answer, timed."""

        def ask() -> Streamed:
            start, first, tokens, text = time.perf_counter(), None, 0, ""
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            for chunk in self._client.chat.completions.create(model=self.model, messages=list(messages), **more, **settings):
                if chunk.choices:
                    first = first or time.perf_counter()
                    text += chunk.choices[0].delta.content or ""
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            end = time.perf_counter()
            if first is None or not tokens:
                raise Refused("the server streamed no token, or does not count them (stream_options.include_usage)")
            return Streamed(tokens, first - start, end - start, text)

        return self._guarded(ask)

    def _guarded(self, ask: Any) -> Any:
        errors = self._errors
        try:
            return ask()
        except errors.APITimeoutError as error:
            raise Refused(f"no answer within the time allowed, {RETRIES + 1} times") from error
        except errors.APIConnectionError as error:
            raise Gone(f"the server at '{self.root}' cannot be reached: {error.__cause__ or error}") from error
        except errors.APIStatusError as error:
            raise Refused(f"the server answers {error.status_code}: {error.message!s:.300}") from error
        except (errors.APIError, ValueError, AttributeError, TypeError) as error:
            raise Refused(f"the server's answer is not understood: {type(error).__name__}: {error!s:.200}") from error
