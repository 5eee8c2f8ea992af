"""The draft vocabulary: the tokens a draft may propose, chosen by how often the supervised text uses them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ForedraftError


class DraftVocabulary(nn.Module):
    """The part of a draft that knows which of the target's tokens its head names."""

    config: Any
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor

    def set_draft_vocabulary(self, ids_W: Tensor) -> None:
        """Let draft id j stand for target id `ids_W[j]`. Raises `ForedraftError` unless they are W distinct, ascending target ids."""
        config: Any = self.config
        ids_W = ids_W.to(self.lm_head.weight.device)
        if not config.has_reduced_vocabulary:
            return
        in_range = len(ids_W) == config.draft_vocab_size and bool((ids_W[1:] > ids_W[:-1]).all())
        if not in_range or int(ids_W[0]) < 0 or int(ids_W[-1]) >= self.config.vocab_size:
            raise ForedraftError(
                f"a draft vocabulary of {config.draft_vocab_size} distinct ascending ids below {self.config.vocab_size} is needed, "
                f"found {len(ids_W)} ids"
            )
        self.d2t.copy_(ids_W - torch.arange(len(ids_W), device=ids_W.device))
        self.t2d.zero_()
        self.t2d[ids_W] = True

    def resize_vocabulary(self, vocab_size: int, draft_vocab_size: int) -> None:
        """Make room for other numbers of tokens; fresh weights, and the lowest ids, where a number changes."""
        config, device = self.config, self.lm_head.weight.device
        if vocab_size != config.vocab_size:
            self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size, device=device).requires_grad_(False)
        if draft_vocab_size != config.draft_vocab_size:
            head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False, device=device)
            self.lm_head = head.requires_grad_(not config.spec.target_head)
        config.update({"vocab_size": vocab_size, "draft_vocab_size": draft_vocab_size})
        self.map_vocabulary()

    def map_vocabulary(self) -> None:
        """d2t and t2d where the vocabulary is reduced: the lowest ids, until `set_draft_vocabulary` says which."""
        for name in ("d2t", "t2d"):
            self._buffers.pop(name, None)
        if self.config.has_reduced_vocabulary:
            size, device = self.config.draft_vocab_size, self.lm_head.weight.device
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long, device=device))
            self.register_buffer("t2d", torch.arange(self.config.vocab_size, device=device) < size)


def count_tokens(rows: Iterable[dict[str, Any]], vocab_size: int) -> Tensor:
    """How often each token id is supervised in packed rows (`input_ids`, `spans`); int64 [V]. Raises as `check_ids`."""
    return _count(rows, "spans", vocab_size)


def count_all(rows: Iterable[dict[str, Any]], vocab_size: int) -> Tensor:
    """How often each token id stands in packed rows (`input_ids`, `documents`), supervised or not; int64 [V]. Raises as `check_ids`."""
    return _count(rows, "documents", vocab_size)  # where documents are padded, id 0 stands for nothing


def check_ids(highest: int, vocab_size: int, what: str) -> None:
    """Raises `ForedraftError` unless the target knows the highest token id that `what` holds."""
    if highest >= vocab_size:
        raise ForedraftError(
            f"{what} holds token {highest}, the target's embedding has {vocab_size} rows: the tokenizer is another model's, or tokens were "
            "added to it and not to the target (resize_token_embeddings)"
        )


def coverage(counts_V: Tensor, ids_W: Tensor) -> float:
    """Which share of the counted tokens the ids are; 1 if none was counted."""
    return float(counts_V[ids_W.cpu()].sum() / counts_V.sum()) if int(counts_V.sum()) else 1.0


def choose_vocabulary(counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent ids, ties and the unused ones by lower id; ascending, [W].

    Raises `ForedraftError` if `size` exceeds the target's vocabulary.
    """
    if not 1 <= size <= len(counts_V):
        raise ForedraftError(
            f"draft_vocab_size={size} does not fit the target's vocabulary of {len(counts_V)}: choose 1 to {len(counts_V)}"
        )
    return torch.sort(torch.argsort(counts_V, descending=True, stable=True)[:size]).values


def choose_mask_token(rows: Iterable[dict[str, Any]], embedding_VT: Tensor, asked: int | None = None) -> int:
    """A token that the rows never use: `asked`, or the highest such id with an embedding to speak of (padded ones may be zero).

    Raises `ForedraftError` if they use `asked`, or every token there is.
    """
    vocab_size = len(embedding_VT)
    counts = count_all(rows, vocab_size)
    unused = (counts == 0).nonzero()[:, 0]
    if asked is not None and int(counts[asked]):
        raise ForedraftError(
            f"mask_token_id={asked} occurs {int(counts[asked])} times in the training data: leave it out to have one chosen"
        )
    if not len(unused):
        raise ForedraftError(
            f"the training data uses all {vocab_size} tokens of the target: none is left to stand for the unknown (mask_token_id)"
        )
    size = embedding_VT[unused].float().norm(dim=-1).cpu()
    spoken = unused[size > 0.1 * size.max()]
    return asked if asked is not None else int((spoken if len(spoken) else unused)[-1])


def _count(rows: Iterable[dict[str, Any]], column: str, vocab_size: int) -> Tensor:
    """How often each id stands where `column` is no padding; of a data set many rows at a time, which takes a tenth of the time."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    parts: Any = rows.with_format("numpy").iter(64) if hasattr(rows, "with_format") else rows
    for part in parts:
        ids, marks = torch.as_tensor(part["input_ids"]), torch.as_tensor(part[column])
        check_ids(int(ids.max()) if ids.numel() else 0, vocab_size, "a row")
        counts += torch.bincount(ids[marks >= 0], minlength=vocab_size)
    return counts
