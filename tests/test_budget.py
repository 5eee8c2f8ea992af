"""What a training step of an 8B target's draft may take, counted on fake tensors: bytes, calls, FLOPs, and no tensor of all rows × a
vocabulary. The shape is Llama-3.1-8B's, with a draft vocabulary of 32,000 and rows of 4,096 tokens, all supervised."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
from tiny import tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from foredraft import auto_draft
from foredraft.training.cost import Shape, _count, count_step

LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)
LENGTH, WIDTH = 4096, 32_000


@pytest.fixture(scope="module")
def once() -> Iterator[None]:
    """What is counted is kept: with checkpoints, the FLOPs are those without."""
    counts: dict[tuple[Any, ...], Any] = {}

    def count(make: Any, target: Any, *how: Any) -> Any:
        return counts[how] if how in counts else counts.setdefault(how, _count(make, target, *how))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foredraft.training.cost._count", count)
        yield


@pytest.mark.parametrize(
    ("checkpointing", "megabytes", "calls"), [(False, 0.95, 3_600), (True, 0.4, 4_400)], ids=["all kept", "checkpointed"]
)
def test_eagle3(once: None, checkpointing: bool, megabytes: float, calls: int) -> None:
    """Bounds are what is reached, and a little more; FLOPs are those of the shape, by hand."""
    options: dict[str, Any] = {"draft_vocab_size": WIDTH, "ttt_steps": 7}
    cost = count_step(
        lambda: auto_draft(LLAMA_8B, "eagle3", **options), LLAMA_8B, Shape(length=LENGTH), checkpointing=checkpointing, run_target=False
    )
    assert cost.bytes_per_token < megabytes * 1e6
    assert cost.ops < calls
    assert cost.rows[128_256] <= 1024
    assert cost.rows[WIDTH] <= 4096
    heads, hidden, inner = 32 * 128, 4096, 14_336
    layer = hidden * (heads + 2 * 8 * 128) + heads * hidden + 3 * hidden * inner  # the context's half of q, k, v; o; feed-forward
    embedded = hidden * (heads + 2 * 8 * 128)
    by_hand = {
        "draft head": 7 * 6 * hidden * WIDTH,
        "teacher": 2 * hidden * 128_256,
        "attention": 7 * 7 * 2 * heads * LENGTH / 2,
    }
    for part, flops in by_hand.items():
        assert cost.flops[part] / cost.tokens == pytest.approx(flops, rel=0.01), part
    needed = 7 * 6 * layer + 4 * 3 * hidden * hidden
    layers = cost.flops["draft layers"] / cost.tokens
    assert needed <= 1.01 * layers
    assert layers <= 1.01 * (needed + 6 * embedded)  # the embedding's half, once for all steps


@pytest.mark.parametrize(("checkpointing", "megabytes"), [(False, 0.12), (True, 0.16)], ids=["all kept", "checkpointed"])
def test_what_is_not_supervised_costs_little(checkpointing: bool, megabytes: float) -> None:
    """A row with three such tokens for each supervised one, beside a row of these alone: a further token's share. Its states are 0.033."""
    make = lambda: auto_draft(LLAMA_8B, "eagle3", draft_vocab_size=WIDTH, ttt_steps=7)  # noqa: E731
    rows = [Shape(length=LENGTH), Shape(length=4 * LENGTH, supervised=0.25)]
    costs = [count_step(make, LLAMA_8B, row, checkpointing=checkpointing, run_target=False) for row in rows]
    further = (costs[1].step_bytes - costs[0].step_bytes) / (costs[1].tokens - costs[0].tokens)
    assert 0.033e6 < further < megabytes * 1e6


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("eagle3", {"ttt_steps": 7, "draft_vocab_size": WIDTH}),
        ("peagle", {"num_depths": 8, "num_layers": 1, "draft_vocab_size": WIDTH}),
        ("dflash", {"block_size": 16, "num_layers": 1}),
    ],
)
def test_up_to_16384_tokens_each_takes_what_those_before_took(algorithm: str, options: dict[str, Any]) -> None:
    """From 8,192 tokens to twice as many a step grows by twice what it grew by from 4,096."""
    make = lambda: auto_draft(LLAMA_8B, algorithm, **options)  # noqa: E731
    first, second, third = (count_step(make, LLAMA_8B, Shape(length=n), run_target=False).step_bytes for n in (4096, 8192, 16_384))
    assert third - second <= 2.02 * (second - first)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("eagle3", {"ttt_steps": 3}),
        ("peagle", {"num_depths": 3}),
        ("dflash", {"block_size": 4, "anchors": 8}),
        ("medusa", {"num_heads": 3}),
    ],
)
def test_memory_is_linear_in_the_length(algorithm: str, options: dict[str, Any]) -> None:
    """Of a real step, all that the CPU's allocator gave."""
    model = tiny_target()
    draft, peaks = tiny_draft(model, algorithm, **options).train(), []
    for length in (1000, 2000):
        batch = tiny_batch(draft.algorithm, tiny_rows([["u" * (length // 8) + "a" * (length - length // 8)]]))
        signal = tiny_signal(model, draft, batch)
        peaks.append(peak(lambda batch=batch, signal=signal: draft(batch, signal)["loss"].backward()))  # type: ignore[misc]
    assert peaks[1] < 2.2 * peaks[0]


def peak(step: Callable[[], Any]) -> int:
    """Bytes at most, above those that were there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
