"""What a round of drafting costs on this machine: passes of the target by the tokens they hold, drafts by their length, at a batch size."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from ..contracts.draft import Layout
from ..draft.model import BaseDraft
from ..target.capture import AuxCapture
from .loop import Chooser
from .states import CACHES, TextCache
from .tree import TreeShape, grouped_attention


@dataclass(frozen=True)
class Costs:
    """Medians, in milliseconds."""

    verify: Mapping[int, float]
    """A pass of the target, by how many tokens of each sequence it holds."""
    draft: Mapping[int | TreeShape, float]
    """A round of drafting, by the length of a chain, or the shape of a tree."""


@torch.no_grad()
def measure_costs(
    target: PreTrainedModel,
    draft: BaseDraft,
    shapes: Sequence[int | TreeShape],
    batch_size: int = 1,
    context: int = 256,
    rounds: int = 20,
) -> Costs:
    """Time passes over 1 token and over all that each of the `shapes` drafts, and the drafting, behind a `context` of tokens.

    All in turn, so that they meet the same machine. The tokens are random: none of it depends on what they say. A tree's pass is timed
    as one over as many tokens in a row. A batch is sequences of one length, as in a server under load; what drafts choose in turn
    (Markov heads, a GRU) runs for the first of them alone.
    """
    vocabulary = target.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(vocabulary, (1, context + 2 * (rounds + 3)), generator=generator).to(target.device)
    widths = sorted({1, *(1 + (shape if isinstance(shape, int) else shape.num_nodes) for shape in shapes)})
    with grouped_attention(target), AuxCapture(target, draft.config.aux_layers) as captured:
        target(input_ids=ids_1L, use_cache=False, **_last_logits(target, 1))
        aux_1LA = captured.aux_BSA.to(draft.device, draft.dtype)
        passes = _passes(target, ids_1L[:, :context].expand(batch_size, -1))
        with as_batch(draft, batch_size):
            actions: dict[Any, Callable[[], Any]] = {("pass", width): partial(passes, width) for width in widths}
            actions |= {shape: _drafting(draft, shape, ids_1L[0].to(draft.device), aux_1LA, context, vocabulary) for shape in shapes}
            taken = interleaved(actions, rounds)
    return Costs({width: taken[("pass", width)] for width in widths}, {shape: taken[shape] for shape in shapes})


def interleaved(actions: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Median milliseconds of each action, after three rounds that do not count; on one thread of a CPU its own time, not that of others."""
    device = torch.accelerator.is_available()
    clock = time.process_time if not device and torch.get_num_threads() == 1 else time.perf_counter
    times: dict[Any, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 3):
        for name, action in actions.items():
            start = clock()
            action()
            if device:
                torch.accelerator.synchronize()
            if number >= 3:
                times[name].append(1000 * (clock() - start))
    return {name: median(taken) for name, taken in times.items()}


@contextmanager
def as_batch(draft: BaseDraft, size: int) -> Iterator[None]:
    """While open, a drafter of one sequence makes its draft work for `size` of them that are alike: its layers and its head do."""
    if size == 1:
        yield
        return
    backbone, logits = draft.backbone, draft.compute_logits

    def wide(embeds: Tensor, context: Tensor, layout: Layout, *rest: Any) -> Tensor:
        rows = layout.rows.expand(size, -1) if isinstance(layout.rows, Tensor) else layout.rows
        return backbone(embeds.expand(size, -1, -1), context.expand(size, -1, -1), replace(layout, rows=rows), *rest)

    def all_logits(states: Tensor) -> Tensor:
        if states.ndim == 3 and len(states) == size:
            return logits(states)
        found = logits(states.expand(size, *states.shape[-2:]))
        return found[0] if states.ndim == 2 else found[:1]

    patched: dict[str, Any] = draft.__dict__
    patched |= {"backbone": wide, "compute_logits": all_logits}
    try:
        yield
    finally:
        del patched["backbone"], patched["compute_logits"]


def _passes(target: PreTrainedModel, ids_BL: Tensor) -> Callable[[int], None]:
    """A pass over so many tokens of each sequence, behind `ids_BL`, and the way back to there."""
    kwargs: dict[str, Any] = {"use_cache": True}
    if target._supports_default_dynamic_cache():
        kwargs["past_key_values"] = DynamicCache(config=target.config.get_text_config(decoder=True))
    cache = TextCache(target, kwargs)
    out = target(input_ids=ids_BL, **kwargs, **_last_logits(target, 1))
    named = {name: out[name] for name in CACHES if out.get(name) is not None}
    cache.held = next(iter(named.values()))

    def run(width: int) -> None:
        cache.before()
        with cache.reading():
            out = target(input_ids=ids_BL[:, :width], use_cache=True, **named)
        cache.keep(out, [], 0, width - 1)

    return run


def _drafting(
    draft: BaseDraft, shape: int | TreeShape, ids_L: Tensor, aux_1LA: Tensor, context: int, vocabulary: int
) -> Callable[[], None]:
    """A round of drafting that first reads two tokens more, as many as a round accepts where drafting just pays."""
    drafter: Any = draft.algorithm.drafter(draft)
    chooser = Chooser(ids_L[None], LogitsProcessorList(), False, draft.draft_ids, vocabulary)
    read = [0, context]

    def run() -> None:
        ids, aux_1NA = ids_L[: read[1] + 1], aux_1LA[:, read[0] : read[1]]
        if isinstance(shape, int):
            drafter.propose(ids, aux_1NA, shape, chooser.choose)
        else:
            drafter.propose_tree(ids, aux_1NA, shape, chooser.rank)
        read[:] = read[1], min(read[1] + 2, len(ids_L) - 1)

    return run


def _last_logits(target: PreTrainedModel, count: int) -> dict[str, int]:
    return {"logits_to_keep": count} if "logits_to_keep" in signature(target.forward).parameters else {}
