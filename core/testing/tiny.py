"""Tiny random targets, documents and batches, all built on the CPU in milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from ..contracts.signal import Signal
from ..data import DraftCollator
from ..target.loading import untrained
from ..target.target import Target


def tiny_config(layers: int = 8, vocab: int = 50, hidden: int = 32, **config: Any) -> LlamaConfig:
    """A Llama config with 4 query and 2 key/value heads. `initializer_range` is large, so that the logits differ visibly."""
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**{**fields, **config})


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random target of this config, in evaluation mode and float32."""
    torch.manual_seed(seed)
    return untrained(config, torch.float32).eval()


@dataclass(frozen=True)
class Document:
    """Token ids, and a letter for each: `u` is not supervised, each run of another letter is an assistant span."""

    ids: list[int]
    letters: str


def tiny_document(letters: str, seed: int = 0, low: int = 1, high: int = 50) -> Document:
    """Random tokens from [low, high) under `letters`: `tiny_document("uuaaauubbb")` has two assistant spans."""
    ids = torch.randint(low, high, (len(letters),), generator=torch.Generator().manual_seed(seed))
    return Document(ids.tolist(), letters)


def tiny_rows(packed: Sequence[Sequence[Document | str]], length: int | None = None, high: int = 50) -> list[dict[str, Any]]:
    """Packed rows as `foredraft.pack` makes them, from the documents of each row; strings become documents seeded by their place.

    Rows are padded to `length`, by default to the longest of them; tokens of strings are below `high`.
    """
    filled = [
        [d if isinstance(d, Document) else tiny_document(d, seed=100 * r + i, high=high) for i, d in enumerate(row)]
        for r, row in enumerate(packed)
    ]
    length = length or max(sum(len(d.ids) for d in row) for row in filled)
    return [_row(documents, length, r) for r, documents in enumerate(filled)]


def tiny_batch(algorithm: Any, rows: Sequence[dict[str, Any]], seed: int = 0) -> dict[str, Any]:
    """`rows` through `DraftCollator`: tensors and the algorithm's plan."""
    return DraftCollator(algorithm, seed)(rows)


def tiny_signal(model: PreTrainedModel, draft: Any, batch: dict[str, Any]) -> Signal:
    """What the target says of a batch."""
    return Target(model, draft.config.aux_layers).capture(batch)


def gradients(draft: Any) -> dict[str, Tensor]:
    """A copy of the gradient of every trainable parameter; the parameters' own are cleared."""
    found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()
    return found


def _row(documents: Sequence[Document], length: int, row: int) -> dict[str, Any]:
    ids: list[int] = []
    numbers: list[int] = []
    spans: list[int] = []
    for i, document in enumerate(documents):
        previous = "u"
        for letter in document.letters:
            starts = letter != "u" and letter != previous
            spans.append(-1 if letter == "u" else max(spans, default=-1) + starts)
            previous = letter
        ids += document.ids
        numbers += [i] * len(document.ids)
    padding = length - len(ids)
    assert padding >= 0, f"row {row} has {len(ids)} tokens, more than {length}"
    return {"input_ids": ids + [0] * padding, "documents": numbers + [-1] * padding, "spans": spans + [-1] * padding, "row": row}
