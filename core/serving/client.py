"""A server that speaks OpenAI's protocol, asked with patience."""

import json
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
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            more["extra_headers"] = {"Connection": "close"}  # llama.cpp may end one that is used again without an answer
            start = time.perf_counter()
            with self._client.chat.completions.with_streaming_response.create(
                model=self.model, messages=list(messages), **more, **settings
            ) as reply:
                lines = [(time.perf_counter(), line) for line in reply.iter_lines()]  # read later: a server on this machine is at work
            events = [(at, json.loads(line[5:])) for at, line in lines if line.startswith("data:") and line[5:].strip() != "[DONE]"]
            if told := next((event["error"] for _, event in events if event.get("error")), None):
                raise Refused(f"the server ended its answer with an error: {told!s:.300}")
            chunks = [(at, event["choices"][0]) for at, event in events if event.get("choices")]
            tokens = next((usage["completion_tokens"] for _, event in reversed(events) if (usage := event.get("usage"))), 0)
            if not chunks or not tokens:
                raise Refused("the server streamed no token, or does not count them (stream_options.include_usage)")
            text = "".join(chunk["delta"].get("content") or "" for _, chunk in chunks)
            return Streamed(tokens, chunks[0][0] - start, lines[-1][0] - start, text)

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
        except (errors.APIError, ValueError, AttributeError, TypeError, LookupError) as error:
            raise Refused(f"the server's answer is not understood: {type(error).__name__}: {error!s:.200}") from error
