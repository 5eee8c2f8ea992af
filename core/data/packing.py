"""Documents packed into rows of fixed length; each keeps its number, so that nothing is attended or supervised across them."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from safetensors.torch import save

from ..errors import ForedraftError
from .conversations import Conversations
from .render import Rendered, Renderer
from .template import Reader


def pack(conversations: Conversations | Sequence[Any] | Dataset, tokenizer: Reader, length: int, *, strict: bool = False) -> Dataset:
    """Conversations as packed rows: a `datasets.Dataset` with `input_ids`, `documents`, `spans` (each [length]) and `row`.

    `documents` numbers the documents of a row, -1 is padding. `spans` numbers the assistant turns of a row, -1 elsewhere. A
    conversation longer than `length` is cut at its end. Conversations without assistant tokens are dropped; the
    dataset's `info.description` counts them. A list of message lists or of records, or a `datasets.Dataset`, is read as
    `Conversations.of` does. What the chat template refuses is skipped with a warning, or an error if `strict`.

    A conversation with images, for which `tokenizer` must be the target's processor, is a row of its own, and has `pixels`: what the
    target reads beside the ids, as safetensors.

    Raises `ForedraftError` if nothing is left to train on.
    """
    conversations = Conversations.of(conversations, strict=strict)
    rendered, _ = Renderer(tokenizer).render_all(conversations, length + 1, strict=strict)
    rendered = [r for r in rendered if max(r.spans[:length]) >= 0]
    if not rendered:
        raise ForedraftError(
            f"nothing to train on: none of the {len(conversations)} conversations of '{conversations.source}' has an assistant turn "
            f"within its first {length} tokens.\n  See what is supervised with `foredraft preview`; `foredraft regenerate` answers prompts"
        )
    rows = _fill(rendered, length)
    if any(r.pixels for r in rendered):
        rows = [{"pixels": None, **row} for row in rows]
    dataset = Dataset.from_list([{**row, "row": i} for i, row in enumerate(rows)])
    dropped, cut = len(conversations) - len(rendered), sum(len(r.ids) > length for r in rendered)
    dataset.info.description = (
        f"{len(rendered)} conversations in {len(rows)} rows of {length} tokens; "
        f"{dropped} without assistant tokens dropped, {cut} cut at {length}"
    )
    return dataset


def _fill(rendered: Sequence[Rendered], length: int) -> list[dict[str, Any]]:
    """First fit in order, over the rows that still have room: keeps the order nearly, wastes little."""
    rows: list[dict[str, Any]] = []
    open_rows: list[dict[str, Any]] = []
    for r in rendered:
        ids, spans = r.ids[:length], r.spans[:length]
        row = None if r.pixels else next((o for o in open_rows if len(o["input_ids"]) + len(ids) <= length), None)
        if row is None:
            row = {"input_ids": [], "documents": [], "spans": []}
            rows.append(row)
            if r.pixels:
                row["pixels"] = save({name: value.contiguous() for name, value in r.pixels.items()})
            else:
                open_rows = [*open_rows[-31:], row]
        document = row["documents"][-1] + 1 if row["documents"] else 0
        first = max(row["spans"], default=-1) + 1
        row["input_ids"] += ids
        row["documents"] += [document] * len(ids)
        row["spans"] += [s + first if s >= 0 else -1 for s in spans]
    for row in rows:
        missing = length - len(row["input_ids"])
        row["input_ids"] += [0] * missing
        row["documents"] += [-1] * missing
        row["spans"] += [-1] * missing
    return rows
