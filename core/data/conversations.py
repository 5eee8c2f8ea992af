"""Conversations from JSONL, parquet or any `datasets` source, in one shape: a list of `{"role", "content"}` messages."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ForedraftError

Message = dict[str, Any]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_BUILDERS = {".jsonl": "json", ".json": "json", ".gz": "json", ".parquet": "parquet"}


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of one record: OpenAI-style `messages`, ShareGPT's `conversations` (`from` / `value`), or a lone `prompt`.

    `where` names the record in errors. Raises `ForedraftError` if neither form is there.
    """
    turns = record.get("messages") or record.get("conversations")
    if turns is None and isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    if not isinstance(turns, list):
        raise ForedraftError(
            f"{where}: expected a list under 'messages' or 'conversations', or a text under 'prompt', found the fields {sorted(record)}"
        )
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise ForedraftError(
                f"{where}, turn {i}: expected an object with 'role' and 'content' (or 'from' and 'value'), found {turn!r:.200}"
            )
        role = turn.get("role") or turn.get("from")
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        if not isinstance(role, str) or content is None:
            raise ForedraftError(f"{where}, turn {i}: expected 'role' and 'content' (or 'from' and 'value'), found {sorted(turn)}")
        extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
        messages.append({"role": _SHAREGPT_ROLES.get(role, role), "content": content, **extra})
    return messages


class Conversations(list[list[Message]]):
    """Conversations in memory, with the name of their source for error messages."""

    def __init__(self, conversations: Iterable[list[Message]], source: str = "conversations"):
        super().__init__(conversations)
        self.source = source

    @classmethod
    def load(cls, source: str | Path, split: str = "train") -> "Conversations":
        """Read a local `.jsonl` / `.json` / `.jsonl.gz` / `.parquet` file, a folder of them, or a `datasets` hub id.

        Raises `ForedraftError` naming the file, and the record, that cannot be read.
        """
        import datasets

        path = Path(source)
        if not path.exists() and (path.suffix in _BUILDERS or str(source).startswith(("/", "./", "../", "~"))):
            raise ForedraftError(f"data '{source}': no such file")
        datasets.disable_progress_bars()
        try:
            if path.is_file():
                if path.suffix not in _BUILDERS:
                    raise ForedraftError(f"data '{source}': unknown file type '{path.suffix}'; known: {', '.join(_BUILDERS)}")
                if not path.stat().st_size:
                    raise ForedraftError(f"data '{source}' is empty")
                rows = datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train")
            else:
                rows = datasets.load_dataset(str(source), split=split)
        except ForedraftError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            raise ForedraftError(f"data '{source}' could not be read: {type(cause).__name__}: {str(cause)[:500]}") from error
        return cls((messages_of(row, f"{source}, record {i}") for i, row in enumerate(rows)), str(source))

    def holding_out(self, count: int, seed: int = 0) -> tuple["Conversations", "Conversations"]:
        """(train, held out): `count` conversations drawn with `seed`, removed from the rest; order kept."""
        import random

        if not 0 <= count < len(self):
            raise ForedraftError(f"cannot hold out {count} of the {len(self)} conversations of '{self.source}'")
        order = list(range(len(self)))
        random.Random(seed).shuffle(order)
        held = set(order[:count])
        return (
            Conversations((c for i, c in enumerate(self) if i not in held), self.source),
            Conversations((c for i, c in enumerate(self) if i in held), f"{self.source} (held out)"),
        )
