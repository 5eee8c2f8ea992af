"""What a training step costs, counted on one that is run on fake tensors: no weights, no values, the very ops of a real step."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from ..data import DraftCollator
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..target.loading import untrained
from ..target.target import Target
from .meter import Meter, Watched, visible_pairs

FEW = 4096
"""Tokens of a batch that are run one by one, at least."""


@dataclass(frozen=True)
class Shape:
    """A batch: how much text, and how it is laid out."""

    rows: int = 1
    length: int = 2048
    supervised: float = 1.0
    """Share of the tokens that are an assistant's: the end of every document."""
    document: int | None = None
    """Tokens per document; None: a row is one."""

    def packed(self) -> list[dict[str, Any]]:
        """Rows as `pack` makes them."""
        size = min(self.document or self.length, self.length)
        asked = round(size * (1 - self.supervised))
        at = range(self.length)
        documents = [i // size for i in at]
        spans = [i // size if i % size >= asked else -1 for i in at]
        return [{"input_ids": [1] * self.length, "documents": documents, "spans": spans, "row": row} for row in range(self.rows)]


@dataclass(frozen=True)
class Cost:
    """Of one step over `tokens` positions. FLOPs are those needed, forward and backward: no padding, no recomputation, no masked half."""

    draft: dict[str, Any]
    """What the draft's config says of how it was made: algorithm, adapter, ..."""
    tokens: int
    trained: int
    """Parameters that are trained."""
    frozen: int
    """Parameters of the draft that are not."""
    flops: dict[str, float]
    """By part: draft layers, attention, draft head, teacher, target."""
    ops: int
    """Calls of the draft's part that make or change a tensor and are no views: on a GPU about as many launches."""
    draft_bytes: int
    """The draft's weights and AdamW's two moments."""
    target_bytes: int
    """The target's weights."""
    step_bytes: int
    """The most that a step keeps beside the weights: states of the target, activations, gradients. The target's own forward, which keeps
    no activations, is taken to need less."""
    gradient_bytes: int
    """What of it is gradients of the weights."""
    state_bytes: int
    """The target's states that the draft reads."""
    rows: dict[int, int]
    """Rows of the largest tensor as wide as the draft's vocabulary, and as the target's."""

    @property
    def bytes_per_token(self) -> float:
        """What every further token takes, about: all of a step but the gradients."""
        return (self.step_bytes - self.gradient_bytes) / self.tokens

    @property
    def peak_bytes(self) -> int:
        """All that must fit on a device which holds target and draft."""
        return self.draft_bytes + self.target_bytes + self.step_bytes

    def extended(self, tokens: int, half: "Cost") -> "Cost":
        """The cost of more such rows: each further token costs what those did that `half` of them had not."""
        times, further = tokens / self.tokens, (self.step_bytes - half.step_bytes) / (self.tokens - half.tokens)
        return replace(
            self,
            tokens=tokens,
            flops={part: times * n for part, n in self.flops.items()},
            step_bytes=round(self.step_bytes + further * (tokens - self.tokens)),
            state_bytes=round(times * self.state_bytes),
        )

    def per_token(self, stored: bool = False) -> float:
        """Needed FLOPs per token; `stored`: the target's states are read, not computed."""
        return sum(n for part, n in self.flops.items() if not (stored and part == "target")) / self.tokens


def count_step(
    make: Callable[[], BaseDraft],
    target: PretrainedConfig,
    shape: Shape = Shape(),
    *,
    dtype: torch.dtype = torch.bfloat16,
    target_dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
    accumulated: bool = False,
    run_target: bool = True,
) -> Cost:
    """The cost of one training step of `make()`'s draft (fresh, not yet cast) on a batch of this shape, computed in `dtype`.

    `checkpointing`: layers are recomputed in the backward pass. `accumulated`: the gradients of a micro-batch are there already. Without
    `run_target`, its layers are not run (their states are read), and its FLOPs are 0. Of a batch of many rows some are run, and as many
    again: the others cost what these did. Raises `ForedraftError` for what fake tensors cannot run: a step whose shapes, or whose course,
    depend on values.
    """

    def count(rows: int, checkpointing: bool) -> Cost:
        return _count(make, target, replace(shape, rows=rows), dtype, target_dtype, checkpointing, accumulated, run_target)

    some = max(1, FEW // shape.length)
    try:
        cost = count(min(shape.rows, 2 * some), checkpointing)
        if checkpointing:  # what is recomputed is not needed
            cost = replace(cost, flops=count(min(shape.rows, 2 * some), False).flops)
        return cost if shape.rows <= 2 * some else cost.extended(shape.rows * shape.length, count(some, checkpointing))
    except Exception as error:
        if type(error).__module__.startswith(("torch._subclasses", "torch.fx.experimental")):
            raise ForedraftError(f"this step cannot be counted without running it, its course depends on values: {error}") from error
        raise


def _count(
    make: Callable[[], BaseDraft],
    config: PretrainedConfig,
    shape: Shape,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    checkpointing: bool,
    accumulated: bool,
    run_target: bool,
) -> Cost:
    text, packed = config.get_text_config(), shape.packed()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        draft = make().train()
        if checkpointing:
            draft.gradient_checkpointing_enable()
        model = untrained(config, target_dtype)
        target = _Unchecked(model, draft.config.aux_layers, draft.algorithm.needs)
    batch = DraftCollator(draft.algorithm)(packed)
    weights = [t for m in (draft, model) for t in chain(m.parameters(), m.buffers())]
    meter, watched = Meter(weights, (draft.config.draft_vocab_size, text.vocab_size)), Watched()
    with fake, meter, watched.patterns(draft), _phased(target.decoder, meter), nullcontext() if run_target else _skipped(target):
        peak = 0
        for _ in range(1 + accumulated):
            signal = target.capture(batch)
            meter.peak, before = max(peak, meter.live), meter.ops
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = draft(batch, signal)["loss"]
            loss.backward()
            peak = meter.peak
            ops, states = meter.ops - before, signal.aux_BSA.nbytes + signal.hidden_BST.nbytes
            del loss, signal
    trained = [p for p in draft.parameters() if p.requires_grad]
    head_WD, tokens = draft.lm_head.weight, shape.rows * shape.length
    flops = {
        "draft head": (6 if head_WD.requires_grad else 4) * int(batch["counts"].sum()) * head_WD.numel(),
        "teacher": 2 * len(batch["teacher_rows"]) * text.vocab_size * text.hidden_size,
    }
    flops["draft layers"] = meter.flops[""] // (1 + accumulated) - sum(flops.values())
    flops["attention"] = _attention(draft, packed, watched.widths)
    flops["target"] = meter.flops["target"] // (1 + accumulated) + _causal(text, packed) if run_target else 0
    moments = 2 * sum(p.nbytes for p in trained)
    return Cost(
        draft=draft.config.foredraft,
        tokens=tokens,
        trained=sum(p.numel() for p in trained),
        frozen=sum(p.numel() for p in draft.parameters() if not p.requires_grad),
        flops={part: float(n) for part, n in flops.items()},
        ops=ops,
        draft_bytes=sum(p.nbytes for p in draft.parameters()) + moments,
        target_bytes=sum(p.nbytes for p in model.parameters()),
        step_bytes=meter.peak,
        gradient_bytes=sum(p.grad.nbytes for p in trained if p.grad is not None),
        state_bytes=states,
        rows=meter.rows,
    )


def _attention(draft: BaseDraft, packed: list[dict[str, Any]], widths: list[int]) -> float:
    """Two products forward and, as flash kernels do it, five backward, of every pair; what is called again later is not needed."""
    pairs = visible_pairs(draft, packed) if widths else []
    return sum(7 * n * width for n, width in zip(pairs, widths, strict=False))


def _causal(text: PretrainedConfig, packed: list[dict[str, Any]]) -> float:
    """The target's attention, forward: of all layers, whatever window they look through, over the causal half of every document."""
    lengths = [n for row in packed for n in Counter(row["documents"]).values()]
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys, values = getattr(text, "qk_head_dim", None) or width, getattr(text, "v_head_dim", None) or width
    return text.num_hidden_layers * text.num_attention_heads * (keys + values) * sum(n * (n + 1) for n in lengths)


class _Unchecked(Target):
    """On fake tensors nothing can be compared."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._packs = True

    def _check_head(self) -> None:
        pass

    def _states_of_twins(self, by_documents: bool = False) -> None:
        return None


@contextmanager
def _phased(module: nn.Module, meter: Meter) -> Iterator[None]:
    """While open, products inside `module` belong to the phase "target"."""

    def set_phase(phase: str) -> Callable[..., None]:
        return lambda *_: setattr(meter, "phase", phase)

    hooks = [module.register_forward_pre_hook(set_phase("target")), module.register_forward_hook(set_phase(""))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _skipped(target: Target) -> Iterator[None]:
    """While open, the target's layers hand on what they read: its states come at no cost."""
    for layer in target.layers:
        layer.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        for layer in target.layers:
            del layer.forward
