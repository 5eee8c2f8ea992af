"""FlexAttention as training calls it: compiled, forward and back, by the CPU and without its kernels."""

import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from test_recompute import living
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import _disable_current_modes

from foredraft import DraftCollator
from foredraft.draft.attention import flex as ours
from foredraft.draft.attention import kernels
from foredraft.draft.attention.masked import in_ranges, masked_dense
from foredraft.training.cost import Shape

ROWS = ([["u" * 20 + "a" * 130, "u" * 7 + "a" * 40], ["u" + "b" * 99]], [["u" * 9 + "a" * 330]])
STEPS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3, "num_layers": 2},
    "peagle": {"num_depths": 3, "num_layers": 2},
    "dflash": {"block_size": 4, "num_layers": 2},
}
RUNS = {"eagle3": 6, "peagle": 2, "dflash": 2}
"""A layer and a step each."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Compiled as on CUDA, into what no mode sees the inside of, as it does not of kernels. Counts what is compiled, and what runs."""
    counts = {"compiled": 0, "forward": 0, "backward": 0}

    def counted(way: str) -> Callable[..., Any]:
        def compiled(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                counts[way] += 1
                with _disable_current_modes():
                    return graph(*args)

            counts["compiled"] += way == "forward"
            return make_boxed_func(run)

        return compiled

    backend = aot_autograd(fw_compiler=counted("forward"), bw_compiler=counted("backward"), inference_compiler=counted("forward"))
    made = cache(lambda _: torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=backend))
    monkeypatch.setattr(ours, "_flex", made)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # no way back on the CPU
    monkeypatch.setattr(kernels, "_missing", lambda *_: [])
    torch._dynamo.reset()
    yield counts
    torch._dynamo.reset()
    gc.collect()  # tests that count what lives do not wait for it


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("algorithm", STEPS)
def test_gradients_are_those_of_dense_scores_and_it_runs_once_a_layer(algorithm: str, checkpointed: bool, runs: dict[str, int]) -> None:
    model = tiny_target(hidden=64)
    draft = tiny_draft(model, algorithm, **STEPS[algorithm]).train()
    if checkpointed:
        draft.gradient_checkpointing_enable()
    for texts in ROWS:
        batch = tiny_batch(draft.algorithm, tiny_rows(texts))
        signal = tiny_signal(model, draft, batch)
        found = []
        for draft.kernel in ("eager", "flex"):
            runs |= {"forward": 0, "backward": 0}
            loss = draft(batch, signal)["loss"]
            loss.backward()
            found.append({"loss": loss.detach(), **gradients(draft)})
        assert runs["forward"] == runs["backward"] == RUNS[algorithm]
        for name, expected in found[0].items():
            torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that see one range or two, of each row its own, grouped heads; as it is and as one of two passes."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch.manual_seed(0)
    first, end = (torch.stack([torch.tensor([0, 40]), torch.tensor(x)]).repeat(150, 1, 1).transpose(0, 1) for x in ([90, 60], [99, 250]))
    end = torch.maximum(first + 1, end - torch.arange(150)[:, None])
    tensors = [torch.randn(2, heads, n, 8, dtype=torch.float64, requires_grad=True) for heads, n in ((4, 150), (2, 250), (2, 250))]
    sees, rows, table = in_ranges(first, end), torch.arange(150).expand(2, -1), ours.block_table(first, end, 250)
    grad = torch.randn(2, 4, 150, 8, dtype=torch.float64)
    expected = masked_dense(*tensors, sees, rows, 0.3)
    way = ours.Way(lambda *x: ours._attended(sees, rows, table, 0.3, False, *x), *tensors)
    exact = torch.autograd.grad(expected, tensors, grad)
    found = ours.masked_flex(*tensors, sees, rows, table, 0.3)
    for out, ways in ((found, torch.autograd.grad(found, tensors, grad)), (way.outs[0], way.back((grad,), *tensors))):
        torch.testing.assert_close((out, *ways), (expected, *exact), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle"])
def test_shapes_of_a_run_are_compiled_a_few_times(algorithm: str, runs: dict[str, int]) -> None:
    """Of two rows and of one, in training and in evaluation; no other length and no other count of queries is compiled anew."""
    model = tiny_target(hidden=64)
    draft = tiny_draft(model, algorithm, **STEPS[algorithm])
    draft.kernel = "flex"
    compiled = []
    for length in (300, 450, 600):
        for train in (True, False):
            for texts in ([["u" * 20 + "a" * length], ["u" + "b" * (length + 50)]], [["u" * 20 + "a" * length]]):
                draft.train(train)
                batch = tiny_batch(draft.algorithm, tiny_rows(texts))
                with torch.set_grad_enabled(train):
                    loss = draft(batch, tiny_signal(model, draft, batch))["loss"]
                loss.backward() if train else None
        compiled.append(runs["compiled"])
    assert compiled[2] == compiled[1] == compiled[0] <= 6


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_tables_visit_little_that_nobody_sees(share: float) -> None:
    """Of P-EAGLE's queries; a varlen kernel would run each depth over all slots."""
    draft, length = tiny_draft(tiny_target(), "peagle", num_depths=8), 4096
    seen = DraftCollator(draft.algorithm)(Shape(1, length, share).packed())["ranges"]
    needed = int((seen["end"] - seen["first"]).clamp(min=0).sum())
    visited = ours.BLOCK**2 * int(sum(seen["every"][part].sum() for part in ("partial", "full")))
    assert needed <= visited < 1.15 * needed
    assert 8 * length * (length + 1) / 2 > 2 * visited


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_step_without_way_back_is_forgotten(algorithm: str, runs: dict[str, int]) -> None:
    model = tiny_target(hidden=64)
    draft = tiny_draft(model, algorithm, **STEPS[algorithm]).train()
    draft.kernel = "flex"
    batch = tiny_batch(draft.algorithm, tiny_rows(ROWS[0]))
    signal = tiny_signal(model, draft, batch)
    counts = []
    for _ in range(4):
        draft(batch, signal)
        counts.append(living())
    assert counts[2] == counts[3]


def test_queries_keys_and_values_are_not_kept(runs: dict[str, int]) -> None:
    """They are given again on the way back."""
    q, k, v = (torch.randn(1, heads, 160, 16) for heads in (4, 2, 2))
    attended = partial(ours._flex(True), enable_gqa=True)
    attended(q, k, v)
    inputs = [x.clone() for x in (q, k, v)]
    way, held = ours.Way(lambda *x: (attended(*x),), *inputs), [StorageWeakRef(x.untyped_storage()) for x in inputs]
    del inputs
    gc.collect()
    assert all(ref.expired() for ref in held)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn_like(way.outs[0])
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*given, enable_gqa=True), given, grad)
    for found, exact in zip(way.back((grad,), q, k, v), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "width", "stages"),
    [
        (torch.bfloat16, 128, None),
        (torch.float32, 192, 1),
        (torch.bfloat16, 192, 2),
        (torch.float32, 256, None),
    ],
)
def test_what_a_gpu_is_not_left_to_choose(dtype: torch.dtype, width: int, stages: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to FlexAttention with every call."""
    given: dict[str, Any] = {}
    stub = lambda q, k, v, **options: given.update(options) or (q, None)  # noqa: E731
    monkeypatch.setattr(ours, "_flex", lambda _: stub)
    first, end = torch.zeros(1, 5, 1, dtype=torch.long), torch.full((1, 5, 1), 5)
    q, k, v = (torch.randn(1, heads, 5, width, dtype=dtype) for heads in (4, 1, 1))
    ours.masked_flex(q, k, v, in_ranges(first, end), torch.arange(5)[None], ours.block_table(first, end, 5), 0.3)
    expected = {"FORCE_USE_FLEX_ATTENTION": True}
    assert given["kernel_options"] == (expected if stages is None else {**expected, "fwd_num_stages": stages})
