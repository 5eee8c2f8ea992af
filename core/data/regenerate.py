"""Replace assistant turns by the target's own answers: the largest single lever on acceptance."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import ForedraftError
from .conversations import Conversations, Message

logger = logging.get_logger("foredraft")

# Conversations sorted by length inside a window of this many batches: little padding, and the output stays close to the input's order.
WINDOW = 16


@torch.no_grad()
def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Conversations,
    out: str | Path,
    *,
    batch_size: int = 32,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 4096,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    show_progress: bool = True,
) -> int:
    """Answer every conversation anew, turn after turn, into the JSONL file `out`; returns how many were written by this call.

    A conversation's user turns (and system prompt) are kept, its assistant turns are replaced; one that ends with a
    user turn gets an answer. `temperature` 0 is greedy. Each line holds `messages`, `index` (of the source
    conversation) and `finish` per answer: `stop` or `length`. A file that is already there is continued: what it
    holds is not answered again, and a half-written last line is dropped. Prompts beyond `max_prompt_tokens` are skipped, and
    a warning counts them. Raises `ForedraftError` if the file belongs to other data or cannot be written.
    """
    out = Path(out)
    done = _resume(out, conversations)
    todo = [i for i in range(len(conversations)) if i not in done]
    torch.manual_seed(seed + len(done))
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {"do_sample": False}
    )
    written = 0
    with _Progress(len(conversations), len(done), show_progress) as progress:
        for batch in _batches(todo, conversations, batch_size):
            chosen = {i: conversations[i] for i in batch}
            answered = list(_answer(target, tokenizer, chosen, max_new_tokens, max_prompt_tokens, sampling))
            rows = [{"messages": messages, "index": index, "finish": finish} for index, messages, finish in answered]
            _append(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            written += len(rows)
            progress(len(batch))
    if written < len(todo):
        logger.warning(f"{len(todo) - written} conversations without a question, or beyond {max_prompt_tokens} prompt tokens, were skipped")
    return written


def _append(out: Path, text: str) -> None:
    try:
        with out.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ForedraftError(f"could not write '{out}': {error}\n  what it holds is kept: make room, then run again to continue") from error


def _resume(out: Path, conversations: Conversations) -> set[int]:
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return set()
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    done = set()
    # Not splitlines: JSON strings may hold U+2028.
    for number, line in enumerate(whole.decode("utf-8").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            index = row["index"]
            asked = _asked(row["messages"])
            same = asked == _asked(conversations[index])[: len(asked)]  # the rest may have been beyond max_prompt_tokens
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ForedraftError(
                f"{out}, line {number} was not written by `foredraft regenerate` for this data: {error!r}; name another file"
            ) from error
        if not same:
            raise ForedraftError(
                f"{out}, line {number} answers other questions than record {index} of {conversations.source}; name another file"
            )
        done.add(index)
    if len(whole) < len(data):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return done


def _asked(messages: list[Message]) -> list[Any]:
    return [m["content"] for m in messages if m["role"] != "assistant"]


def _batches(todo: list[int], conversations: Conversations, size: int) -> Iterator[list[int]]:
    for start in range(0, len(todo), size * WINDOW):
        window = sorted(todo[start : start + size * WINDOW], key=lambda i: sum(len(str(m["content"])) for m in conversations[i]))
        yield from (window[s : s + size] for s in range(0, len(window), size))


def _answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: dict[int, list[Message]],
    max_new_tokens: int,
    max_prompt_tokens: int,
    sampling: dict[str, Any],
) -> Iterator[tuple[int, list[Message], list[str]]]:
    """Answer a batch turn by turn; conversations with fewer turns leave it earlier."""
    history: dict[int, list[Message]] = {i: [] for i in batch}
    rest = {i: [m for m in messages if m["role"] != "assistant"] for i, messages in batch.items()}
    finish: dict[int, list[str]] = {i: [] for i in batch}
    while rest:
        for i in list(rest):  # up to and with the next user turn
            while rest[i] and (not history[i] or history[i][-1]["role"] != "user"):
                history[i].append(rest[i].pop(0))
            if not history[i] or history[i][-1]["role"] != "user":
                del rest[i]
        if not rest:
            break
        asked = list(rest)
        prompts = {i: tokenizer.apply_chat_template(history[i], add_generation_prompt=True, return_dict=True)["input_ids"] for i in asked}
        for i in [i for i in asked if len(prompts[i]) > max_prompt_tokens]:
            history[i].pop()
            asked.remove(i)
            del rest[i]
        if not asked:
            continue
        width = max(len(prompts[i]) for i in asked)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in asked], device=target.device)
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in asked], device=target.device)
        new = target.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)[:, width:]
        ends = target.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        for i, row in zip(asked, new.tolist(), strict=True):
            stop = next((n for n, token in enumerate(row) if token in ends), None)
            text = tokenizer.decode(row[:stop], skip_special_tokens=True)
            history[i].append({"role": "assistant", "content": text})
            finish[i].append("length" if stop is None else "stop")
    for i, messages in history.items():
        if finish[i]:
            yield i, messages, finish[i]


class _Progress:
    """A rich progress bar, or nothing."""

    def __init__(self, total: int, done: int, show: bool):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), disable=not show
        )
        self.task = self.bar.add_task("answering", total=total, completed=done)

    def __enter__(self) -> Any:
        self.bar.start()
        return lambda n: self.bar.advance(self.task, n)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
