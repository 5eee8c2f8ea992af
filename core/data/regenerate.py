"""Replace assistant turns by the target's own answers: the largest single lever on acceptance."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from ..errors import ForedraftError
from ..progress import Progress
from .conversations import Conversations
from .forms import Conversation, Message, conversation_of
from .images import text_of, told_apart, written
from .sampling import SeededChoice
from .skipped import Skipped, Unusable, logger
from .template import Reader, prompt_inputs, tokenizer_of

# Conversations sorted by length inside a window of this many batches: little padding, and the output stays close to the input's order.
WINDOW = 16


def regenerate(
    target: PreTrainedModel,
    tokenizer: Reader,
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
    user turn gets an answer. It ends before a tool's result, which answered a call of another model. `temperature` 0 is greedy;
    what is sampled follows from `seed` and the conversation's place in the source. Each line holds `messages`, `index` (of the source
    conversation), `tools` if there are any, and `finish` per answer: `stop`, or `length` for one that `max_new_tokens` cut, of which
    training learns no end. A file that is already there is continued: what it holds is not answered again, and a half-written
    last line is dropped. What cannot be asked (prompts beyond `max_prompt_tokens`, empty answers) ends a conversation, or is skipped
    if it comes first; warnings count it. Raises `ForedraftError` if the file belongs to other data or cannot be written.
    """
    out = Path(out)
    done = resume(out, conversations)
    todo = [i for i in range(len(conversations)) if i not in done]
    settings = {"temperature": temperature, "top_p": top_p, "seed": seed}
    settings |= {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens}
    answering = _Answering(target, tokenizer, conversations.source, settings)
    written = 0
    with Progress("answering", len(conversations), len(done), show_progress) as advance:
        for batch in _batches(todo, conversations, batch_size):
            rows = answering.batch({i: conversations[i] for i in batch})
            append(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            written += len(rows)
            advance(len(batch))
    answering.skipped.warn()
    if answering.cut:
        logger.warning(
            f"{answering.cut} of {answering.answers} answers were cut at {max_new_tokens} tokens: training learns no end of them"
        )
    return written


def gather(out: Path, conversations: Conversations, answered: Callable[[list[int]], Iterable[Any]]) -> int:
    """As `regenerate`, by workers: `answered` gives the rows of what is still to be done, as they are ready."""
    done, written = resume(out, conversations), 0
    todo = [i for i in range(len(conversations)) if i not in done]
    with Progress("answering", len(conversations), len(done)) as advance:
        for row in answered(todo) if todo else ():
            append(out, json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
            advance(1)
    if missing := len(todo) - written:
        logger.warning(f"{missing} of {len(conversations)} conversations of '{conversations.source}' could not be asked, and are left out")
    return written


def answering(
    target: PreTrainedModel,
    tokenizer: Reader,
    conversations: Conversations,
    batch_size: int = 32,
    max_prompt_tokens: int = 4096,
    **settings: Any,
) -> Callable[[list[int]], list[dict[str, Any]]]:
    """What answers the conversations of some numbers anew, with the settings of `regenerate`."""
    work = _Answering(target, tokenizer, conversations.source, {"max_prompt_tokens": max_prompt_tokens, **settings})

    def answer(numbers: list[int]) -> list[dict[str, Any]]:
        batches = _batches(numbers, conversations, batch_size)
        return [row for batch in batches for row in work.batch({i: conversations[i] for i in batch})]

    return answer


def append(out: Path, text: str) -> None:
    """Write at the end of a file. Raises `ForedraftError` where that fails."""
    try:
        with out.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ForedraftError(f"could not write '{out}': {error}\n  what it holds is kept: make room, then run again to continue") from error


def resume(out: Path, conversations: Conversations) -> set[int]:
    """Which conversations a file holds answers to; half of a last line is cut off. Raises `ForedraftError` for a file of other data."""
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
            asked = _asked(conversation_of(row))
            same = asked == _asked(conversations[index])[: len(asked)]  # the rest may have been beyond max_prompt_tokens
        except (ValueError, KeyError, IndexError, TypeError, Unusable) as error:
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
    return [told_apart(m["content"]) for m in messages if m["role"] != "assistant"]


def _batches(todo: list[int], conversations: Conversations, size: int) -> Iterator[list[int]]:
    for start in range(0, len(todo), size * WINDOW):
        window = sorted(todo[start : start + size * WINDOW], key=lambda i: sum(len(text_of(m["content"])) for m in conversations[i]))
        yield from (window[s : s + size] for s in range(0, len(window), size))


class Dialogue:
    """A conversation on its way: what was said, what is still to be asked."""

    def __init__(self, index: int, conversation: Conversation):
        self.index, self.finish = index, list[str]()
        self.said = Conversation(tools=conversation.tools)
        before_results = takewhile(lambda m: m["role"] in ("system", "developer", "user", "assistant"), conversation)
        self.rest = [m for m in before_results if m["role"] != "assistant"]

    def ask(self) -> bool:
        """Go on up to and with the next user turn; False if there is none."""
        while self.rest:
            self.said.append(self.rest.pop(0))
            if self.said[-1]["role"] == "user":
                return True
        return False

    def row(self) -> dict[str, Any]:
        """What is written: up to the last answer."""
        last = max(i for i, m in enumerate(self.said) if m["role"] == "assistant")
        return {
            "messages": [{**m, "content": written(m["content"])} for m in self.said[: last + 1]],
            "index": self.index,
            "finish": self.finish,
            **({"tools": self.said.tools} if self.said.tools else {}),
        }


class _Answering:
    """Answers batches turn by turn; conversations with fewer turns leave their batch earlier."""

    def __init__(self, target: PreTrainedModel, reader: Reader, source: str, settings: dict[str, Any]):
        self.target, self.reader, self.source, self.settings = target, reader, source, settings
        self.tokenizer = tokenizer_of(reader)
        self.skipped, self.answers, self.cut = Skipped(), 0, 0

    def batch(self, conversations: dict[int, Conversation]) -> list[dict[str, Any]]:
        """A row for each conversation that got an answer."""
        dialogues = [Dialogue(i, c) for i, c in conversations.items()]
        speaking = dialogues
        while speaking:
            prompts = {d: inputs for d in speaking if (inputs := self._prompt(d)) is not None}
            plain = {d: inputs for d, inputs in prompts.items() if len(inputs) == 1}
            seeing = [{d: inputs} for d, inputs in prompts.items() if len(inputs) > 1]  # what is read beside ids has no padding: one by one
            answers = {d: answer for some in ([plain] if plain else []) + seeing for d, answer in self._generate(some).items()}
            speaking = [d for d in prompts if self._take(d, *answers[d])]
        return [d.row() for d in dialogues if d.finish]

    def _prompt(self, dialogue: Dialogue) -> dict[str, Tensor] | None:
        most = self.settings["max_prompt_tokens"]
        try:
            if not dialogue.ask():
                if not dialogue.finish:
                    raise Unusable("no user turn to answer")
                return None
            inputs = prompt_inputs(self.reader, dialogue.said)
            if (count := inputs["input_ids"].shape[1]) > most:
                raise Unusable(f"a prompt beyond {most} tokens", f"{count} tokens")
        except Unusable as reason:
            self._skip(dialogue, reason)
            return None
        return inputs

    def _take(self, dialogue: Dialogue, text: str, finish: str) -> bool:
        if not text.strip():
            self._skip(dialogue, Unusable("an empty answer"))
            return False
        dialogue.said.append({"role": "assistant", "content": text})
        dialogue.finish.append(finish)
        self.answers, self.cut = self.answers + 1, self.cut + (finish == "length")
        return True

    def _skip(self, dialogue: Dialogue, reason: Unusable) -> None:
        self.skipped.add(f"{self.source}, conversation {dialogue.index}, answer {len(dialogue.finish)}", reason)

    @torch.no_grad()
    def _generate(self, prompts: dict[Dialogue, dict[str, Tensor]]) -> dict[Dialogue, tuple[str, str]]:
        """An answer's text and why it ended, `stop` or `length`, for each prompt; a prompt with images comes alone."""
        target, settings = self.target, self.settings
        texts = [inputs["input_ids"][0].tolist() for inputs in prompts.values()]
        images = {name: t.to(target.device) for inputs in prompts.values() for name, t in inputs.items() if name != "input_ids"}
        width = max(map(len, texts))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in texts], device=target.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in texts], device=target.device)
        choice = LogitsProcessorList()
        if settings["temperature"]:
            keys = [f"{settings['seed']}/{dialogue.index}/{len(dialogue.finish)}" for dialogue in prompts]
            choice.append(SeededChoice(keys, width, settings["temperature"], settings["top_p"]))
        out = target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=settings["max_new_tokens"],
            pad_token_id=pad,
            do_sample=False,
            logits_processor=choice,
            **images,
        )
        ends = target.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        answers = {}
        for dialogue, row in zip(prompts, out[:, width:].tolist(), strict=True):
            stop = next((n for n, token in enumerate(row) if token in ends), None)
            text = self.tokenizer.decode(row[:stop], skip_special_tokens=True)
            # A cut may leave the first bytes of a character, which decode to this sign.
            answers[dialogue] = (text, "stop") if stop is not None else (text.rstrip("\ufffd"), "length")
        return answers
