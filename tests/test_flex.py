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

from foredraft.draft.attention import masked

ROWS = ([["u" * 20 + "a" * 130, "u" * 7 + "a" * 40], ["u" + "b" * 99]], [["u" * 9 + "a" * 330]])
STEPS: dict[str, dict[str, Any]] = {"peagle": {"num_depths": 3, "num_layers": 2}, "dflash": {"block_size": 4, "num_layers": 2}}


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
    monkeypatch.setattr(masked, "_flex", made)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # no way back on the CPU
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
        assert (runs["forward"], runs["backward"]) == (2, 2)
        for name, expected in found[0].items():
            torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_shapes_of_a_run_are_compiled_a_few_times(runs: dict[str, int]) -> None:
    """Of two rows and of one, in training and in evaluation; no other length and no other count of queries is compiled anew."""
    model = tiny_target(hidden=64)
    draft = tiny_draft(model, "peagle", **STEPS["peagle"])
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
    assert compiled[0] <= 8
    assert compiled[2] == compiled[1] <= 9


def test_a_step_without_way_back_is_forgotten(runs: dict[str, int]) -> None:
    model = tiny_target(hidden=64)
    draft = tiny_draft(model, "dflash", **STEPS["dflash"]).train()
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
    attended = partial(masked._flex(True), enable_gqa=True)
    attended(q, k, v)
    inputs = [x.clone() for x in (q, k, v)]
    way, held = masked._Way(attended, *inputs), [StorageWeakRef(x.untyped_storage()) for x in inputs]
    del inputs
    gc.collect()
    assert all(ref.expired() for ref in held)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn_like(way.out)
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*given, enable_gqa=True), given, grad)
    for found, exact in zip(way.back(grad, q, k, v), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
