"""Conversations answered anew by a server that runs the target: many at once, patiently, and nothing lost."""

import json
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import ForedraftError
from ..progress import Progress
from ..serving import Gone, Refused, Server
from .collate import seed_of
from .conversations import Conversations
from .forms import Conversation
from .regenerate import Dialogue, append, resume
from .skipped import logger

FAILED = ".failed.jsonl"
"""What could not be answered, beside the output: a line of `index` and `error` each, of the latest call."""


@dataclass(frozen=True)
class Asking:
    """How a server is asked."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 512
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, index: int, turn: int) -> dict[str, Any]:
        """Of one request: what is drawn follows from the seed, the conversation and the turn, where the server keeps to seeds."""
        own = {"max_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p}
        if self.temperature:
            own["seed"] = seed_of(self.seed, index, turn) >> 32
        more = {"chat_template_kwargs": dict(self.template_kwargs)} if self.template_kwargs else {}
        return {**own, **({"extra_body": more} if more else {})}


def ask(
    server: Server,
    conversations: Conversations,
    out: str | Path,
    asking: Asking,
    *,
    concurrency: int = 32,
    show_progress: bool = True,
) -> int:
    """As `regenerate`, by a server: reasoning and tool calls of its answers are kept, and a call of a tool ends a conversation.

    Lines come as they are ready, in any order. A conversation of which a request fails, after retries, is listed in `out`.failed.jsonl, and
    asked again by the next call, as it is not in `out`. Raises `ForedraftError` that counts them at the end; where the server is gone, at
    once; what was answered stays in either case.
    """
    out = Path(out)
    done = resume(out, conversations)
    todo = (i for i in range(len(conversations)) if i not in done)
    failed = out.with_name(out.name + FAILED)
    failed.unlink(missing_ok=True)
    written, unasked, failures = 0, 0, 0
    name = server.model  # it is there, and has the model

    def one(index: int) -> dict[str, Any] | None:
        return _answer(server, conversations[index], index, asking)

    with Progress(f"asking {name}", len(conversations), len(done), show_progress) as advance, ThreadPoolExecutor(concurrency) as pool:
        running = {pool.submit(one, index): index for index in islice(todo, concurrency)}
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    index = running.pop(future)
                    try:
                        row = future.result()
                    except Refused as error:
                        failures += 1
                        append(failed, json.dumps({"index": index, "error": str(error)}, ensure_ascii=False) + "\n")
                    else:
                        unasked += row is None
                        if row is not None:
                            append(out, json.dumps(row, ensure_ascii=False) + "\n")
                            written += 1
                    advance(1)
                    running |= {pool.submit(one, more): more for more in islice(todo, 1)}
        except Gone as error:
            kept = f"{len(done) + written} of {len(conversations)} conversations are answered in '{out}'"
            raise ForedraftError(f"{error}\n  {kept}: start the server, and run again to continue") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if unasked:
        logger.warning(f"{unasked} of {len(conversations)} conversations of '{conversations.source}' have no user turn to answer: skipped")
    if failures:
        raise ForedraftError(
            f"{failures} of {len(conversations)} conversations could not be answered: '{failed}' says why of each\n"
            f"  {written} were, into '{out}'; run again to ask for the others"
        )
    return written


def _answer(server: Server, conversation: Conversation, index: int, asking: Asking) -> dict[str, Any] | None:
    dialogue = Dialogue(index, conversation)
    while dialogue.ask():
        settings = asking.settings(index, len(dialogue.finish))
        message, finish = server.chat(dialogue.said, conversation.tools, **settings)
        if not (message["content"].strip() or message.get("tool_calls")):
            raise Refused(f"answer {len(dialogue.finish)} is empty (finish: {finish})")
        dialogue.said.append(message)
        dialogue.finish.append(finish)
        if message.get("tool_calls"):
            break  # nobody runs the tool
    return dialogue.row() if dialogue.finish else None
