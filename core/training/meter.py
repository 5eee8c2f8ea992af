"""What a piece of work costs, seen op by op: products, bytes alive, launches; of real tensors, or of fake ones, which hold no values.

And attention's needed work: how many keys its queries see, told by the patterns themselves.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig

from ..auto import auto_draft
from ..contracts.draft import Layout
from ..data import DraftCollator
from ..draft.model import BaseDraft

aten: Any = torch.ops.aten
LINEAR = ("aten.mm", "aten.addmm", "aten._scaled_mm")
"""Products of linear layers; attention's are batched, or inside kernels, and are counted by who sees whom."""
GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Products of experts: every row with the matrix of its own."""


class Meter(TorchDispatchMode):
    """While open, counts what is dispatched. Storages that were there before count for nothing; those of `known` tensors are never new.

    `flops` are 2·m·k·n of every product of a linear layer, by the phase it ran in; `ops` are calls that make or change a tensor and are no
    views; `peak` is the most bytes that were alive at once, to the byte (an allocator rounds up), and `live` those alive now. `rows[w]` is
    how many rows the largest tensor of width w had, for each of the `widths`.
    """

    def __init__(self, known: Iterable[Tensor] = (), widths: Iterable[int] = ()):
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.phase, self.ops, self.live, self.peak = "", 0, 0, 0
        self.rows = dict.fromkeys(widths, 0)
        self._known = {t.untyped_storage()._cdata for t in known}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (name := str(func._overloadpacket)) in LINEAR:
            self.flops[self.phase] += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        elif name in GROUPED:
            self.flops[self.phase] += 2 * out.numel() * args[0].shape[-1]
        leaves = tree_leaves(out)
        # What fake tensors are asked of themselves (their device, a dtype) no device is asked.
        self.ops += not func.is_view and any(isinstance(leaf, Tensor) for leaf in leaves)
        for tensor in leaves:
            if isinstance(tensor, Tensor):
                self._note(tensor)
                if tensor.ndim and tensor.shape[-1] in self.rows and not func.is_view:
                    width = tensor.shape[-1]
                    self.rows[width] = max(self.rows[width], tensor.numel() // width)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


LONGEST = 1024
"""Tokens per row up to which pairs are counted one by one; beyond, as they grow from half of it to it."""
HIDDEN = 8


class _Enough(Exception):
    """All calls of the backbone have been made."""


@dataclass
class Watched:
    """The calls of attention in a step."""

    widths: list[int] = field(default_factory=list)
    """Per call, heads × (width of queries + width of values): what a pair costs, in multiplications."""

    @contextmanager
    def patterns(self, draft: BaseDraft) -> Iterator[None]:
        """While open, patterns that cannot run on fake tensors are stood in for by a kernel that keeps its output and normaliser."""
        with _replaced(draft, lambda pattern: _Fused(pattern, self.widths)):
            yield


@dataclass
class _Fused:
    pattern: Any
    widths: list[int]

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *rest: Any, **more: Any) -> Tensor:
        self.widths.append(q_BHQd.shape[1] * (q_BHQd.shape[-1] + values[0].shape[-1]))
        try:
            return self.pattern.attend(q_BHQd, keys, values, *rest, **more)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return F.scaled_dot_product_attention(q_BHQd, keys[0], values[0], enable_gqa=True)


@dataclass
class _Counted:
    pattern: Any
    pairs: list[int]
    known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def attend(
        self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None, **_: Any
    ) -> Tensor:
        queries, entries = q_BHQd.shape[2], [k.shape[2] for k in keys]
        call = (queries, *entries, rows is None)  # the layers of a draft see the same
        if call not in self.known:
            self.known[call] = int(self.pattern.visible(len(q_BHQd), queries, entries, rows).sum())
        self.pairs.append(self.known[call])
        return q_BHQd.new_zeros(*q_BHQd.shape[:-1], values[0].shape[-1])


class _AuxAlone:
    """A signal that says no more than aux states; whatever else is asked of it comes after the backbone."""

    def __init__(self, aux_BSA: Tensor):
        self.aux_BSA = aux_BSA

    def __getattr__(self, name: str) -> Any:
        raise _Enough


def visible_pairs(draft: BaseDraft, packed: Sequence[Any]) -> list[float]:
    """Per call of attention in a training step of `draft`'s algorithm on packed rows, how many (query, key) pairs see each other."""
    length = len(packed[0]["input_ids"])
    whole = _pairs(draft, _cut(packed, min(length, LONGEST)))
    if length <= LONGEST:
        return [float(n) for n in whole]
    half = _pairs(draft, _cut(packed, LONGEST // 2))
    return [n * (length / LONGEST) ** log2(n / m) for n, m in zip(whole, half, strict=True)]


def _cut(packed: Sequence[Any], length: int) -> list[dict[str, Any]]:
    """The first tokens of every row: of one document, its supervised end is kept in proportion."""
    return [{name: value[:length] if isinstance(value, list) else value for name, value in row.items()} for row in packed]


@torch.no_grad()
def _pairs(draft: BaseDraft, packed: Sequence[Any]) -> list[int]:
    """By the step of a draft of as many layers, narrow, on a vocabulary as large, whose attention is not computed."""
    config, pairs = draft.config, list[int]()
    small = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=max(config.foredraft["target"]["num_hidden_layers"], 1),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN,
    )
    options = draft.algorithm.options.model_dump(exclude={"layers_of"})  # whatever its layers are, as many pairs are attended
    narrow = auto_draft(small, draft.algorithm.name, aux_layers=tuple(config.aux_layers), **options)
    batch = DraftCollator(narrow.algorithm)(packed)
    aux_BSA = torch.zeros(*batch["input_ids"].shape, len(config.aux_layers) * HIDDEN)

    def enough(*_: Any) -> Any:
        raise _Enough

    narrow.compute_logits = enough  # type: ignore[method-assign, assignment]
    with _replaced(narrow, lambda pattern: _Counted(pattern, pairs)), suppress(_Enough):
        narrow.algorithm.loss(narrow, batch, _AuxAlone(aux_BSA))
    return pairs


@contextmanager
def _replaced(draft: BaseDraft, other: Any) -> Iterator[None]:
    """While open, `draft.backbone` runs with `other(pattern)` in place of every pattern."""

    def backbone(embeds: Tensor, context: Tensor, layout: Layout, *rest: Any) -> Tensor:
        made = patterns.setdefault(id(layout.pattern), (other(layout.pattern), layout.pattern))[0]
        return own(embeds, context, replace(layout, pattern=made), *rest)

    patterns: dict[int, Any] = {}
    own: Any = draft.backbone
    draft.backbone = backbone  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del draft.backbone
