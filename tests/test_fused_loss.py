"""The fused loss against the plain one it stands for: loss, gradients, metrics, in chunks of every size."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft.contracts.algorithm import Step
from foredraft.loss import Labels, Taught, Teacher, chunked, objective, reference
from foredraft.loss.readable import METRICS
from foredraft.registry import default_registry

MODEL = tiny_target()
SIZES = (7, 0, 5, 1, 0)  # rows per step; empty steps in the middle and at the end
TEACHERS = 9


class TopTeacher(Teacher):
    """HASS's: three of its tokens, not normalised anew."""

    def at(self, rows: Tensor | slice, draft_ids_W: Tensor) -> Taught:
        taught = super().at(rows, draft_ids_W)
        assert taught.p_RW is not None
        return replace(taught, p_RW=taught.p_RW * (taught.p_RW >= taught.p_RW.topk(3).values[:, -1:]))


def make_draft(norm_output: bool, draft_vocab_size: int | None = 20) -> Any:
    """A draft that names 20 of 50 tokens, or all; its final norm is not the identity."""
    draft = tiny_draft(MODEL, draft_vocab_size=draft_vocab_size, norm_output=norm_output)
    torch.manual_seed(1)
    torch.nn.init.normal_(draft.norm.weight)
    return draft


@pytest.fixture(params=[False, True], ids=["norm before head", "norm_output"])
def draft(request: pytest.FixtureRequest) -> Any:
    return make_draft(request.param)


def problem(
    draft: Any, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32, teacher: type[Teacher] = Teacher, loss: Any = "ce"
) -> dict[str, Any]:
    """States, teacher and weights; a teacher row serves several steps; a reduced vocabulary lacks some top tokens."""
    torch.manual_seed(2)
    logits_RV = torch.randn(TEACHERS, 50) * 3
    top_R = logits_RV.argmax(-1)
    named = torch.isin(top_R, draft.draft_ids)
    assert named.any()
    assert named.all() == (not draft.config.has_reduced_vocabulary)
    return {
        "states": [torch.randn(n, 32, dtype=dtype, requires_grad=True) for n in sizes],
        "teacher": teacher(logits_RV, torch.clone),
        "teacher_rows": [torch.randint(TEACHERS, (n,)) for n in sizes],
        "weights": [torch.rand(n) for n in sizes],
        "objective": objective(loss),
    }


def plain(draft: Any, p: dict[str, Any]) -> Step:
    return reference(draft, p["states"], p["teacher"], p["teacher_rows"], p["weights"], p["objective"])


def fused(draft: Any, p: dict[str, Any]) -> Step:
    return chunked(draft, p["states"], p["teacher"], p["teacher_rows"], p["weights"], p["objective"])


def all_gradients(draft: Any, p: dict[str, Any], loss: Tensor) -> list[Tensor]:
    """Of the states and of every parameter of the head; steps without rows have a gradient too, an empty one."""
    return list(torch.autograd.grad(loss, [*p["states"], *draft.head_parameters()], allow_unused=False))


@pytest.mark.parametrize("loss", [*default_registry().objectives(), {"ce": 0.1, "tv": 0.9}], ids=str)
@pytest.mark.parametrize("teacher", [Teacher, TopTeacher])
@pytest.mark.parametrize("draft_vocab_size", [20, None], ids=["reduced", "whole"])
@pytest.mark.parametrize(("chunk", "norm_output"), [(1, False), (7, True), (256, False)])
def test_equals_the_plain_loss(
    norm_output: bool, chunk: int, draft_vocab_size: int | None, teacher: type[Teacher], loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every objective, alone and in a sum; a teacher that does not sum to one included."""
    monkeypatch.setattr("foredraft.loss.chunks.CHUNK", chunk)
    draft = make_draft(norm_output, draft_vocab_size)
    p = problem(draft, teacher=teacher, loss=loss)
    ours, theirs = fused(draft, p), plain(draft, p)
    assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert tuple(ours.metrics) == tuple(theirs.metrics) == METRICS
    for name in METRICS:
        assert_close(ours.metrics[name], theirs.metrics[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert_close(all_gradients(draft, p, ours.loss * 1.7), all_gradients(draft, p, theirs.loss * 1.7), rtol=1e-4, atol=1e-6)


def test_the_heads_parameters_are_all_there(draft: Any) -> None:
    """The fused loss is told which parameters `compute_logits` reads: one forgotten would silently get no gradient."""
    p = problem(draft)
    plain(draft, p).loss.backward()
    reached = {name for name, parameter in draft.named_parameters() if parameter.grad is not None}
    told = {name for name, parameter in draft.named_parameters() if any(parameter is h for h in draft.head_parameters())}
    assert reached == told == ({"lm_head.weight"} if draft.algorithm.options.norm_output else {"lm_head.weight", "norm.weight"})


def test_a_frozen_head(draft: Any) -> None:
    draft.lm_head.requires_grad_(False)
    draft.norm.requires_grad_(False)
    p = problem(draft)
    assert draft.head_parameters() == []
    assert_close(all_gradients(draft, p, fused(draft, p).loss), all_gradients(draft, p, plain(draft, p).loss), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(draft: Any, mode: Any) -> None:
    p = problem(draft)
    expected = plain(draft, p)
    with mode():
        step = fused(draft, p)
    assert not step.loss.requires_grad
    assert_close(step.loss, expected.loss.detach(), rtol=1e-5, atol=1e-6)
    assert_close(step.metrics, expected.metrics, rtol=1e-5, atol=1e-5)


def test_metrics_carry_no_gradient(draft: Any) -> None:
    assert not any(m.requires_grad for m in fused(draft, problem(draft)).metrics.values())


def test_no_rows_at_all(draft: Any) -> None:
    p = problem(draft, (0, 0))
    step = fused(draft, p)
    assert step.loss == 0
    assert all(m.tolist() == [0, 0] for m in step.metrics.values())
    assert all(g.eq(0).all() for g in all_gradients(draft, p, step.loss))


def test_bfloat16_autocast(draft: Any) -> None:
    p = problem(draft)
    exact = plain(draft, p)
    with torch.autocast("cpu", torch.bfloat16):
        step, expected = fused(draft, p), plain(draft, p)
    assert step.loss.dtype == torch.float32
    assert_close(step.loss, expected.loss, rtol=1e-4, atol=1e-4)  # the same bfloat16 logits
    assert_close(step.loss, exact.loss, rtol=2e-2, atol=2e-2)
    ours, theirs, best = (all_gradients(draft, p, s.loss) for s in (step, expected, exact))
    assert [g.dtype for g in ours] == [g.dtype for g in theirs]
    assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    assert_close(ours, best, rtol=5e-2, atol=5e-2)


def test_bfloat16_draft(draft: Any) -> None:
    expected = fused(draft, problem(draft))
    half = make_draft(draft.algorithm.options.norm_output).to(torch.bfloat16)
    p = problem(half, dtype=torch.bfloat16)
    step = fused(half, p)
    assert step.loss.dtype == torch.float32
    assert {g.dtype for g in all_gradients(half, p, step.loss)} == {torch.bfloat16}
    assert_close(step.loss, expected.loss, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("chunk", [3, 256])
def test_a_whole_training_step(draft: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3 with the fused loss and with the plain one in its place: the same gradient for every parameter of the draft."""
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaa", "uuaaauaa"], ["uuuaaaaaaaa"]]))
    signal = tiny_signal(MODEL, draft, batch)

    def run() -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        out = draft(batch, signal)
        out["loss"].backward()
        return out["loss"].detach(), out["metrics"], gradients(draft)

    monkeypatch.setattr("foredraft.loss.chunks.CHUNK", chunk)
    ours = run()
    monkeypatch.setattr("foredraft.plugins.eagle3.chunked", reference)
    theirs = run()
    assert ours[0] > 0
    assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_labels_as_the_teacher() -> None:
    """Hard labels: the loss is torch's cross-entropy where the draft can name the token, and nothing elsewhere."""
    torch.manual_seed(0)
    draft_ids, labels = torch.tensor([1, 3, 4, 8]), torch.tensor([3, 8, 2, 1])
    rows, weights = torch.tensor([0, 1, 2, 3, 1]), torch.rand(5)
    results = []
    for loss in ("readable", "fused"):
        torch.manual_seed(1)
        head, states = torch.nn.Linear(6, 4), torch.randn(5, 6, requires_grad=True)
        teacher = Labels(labels)
        draft: Any = SimpleNamespace(
            compute_logits=head, draft_ids=draft_ids, head_parameters=lambda head=head: list(head.parameters()), head_parts=lambda: None
        )
        step = (chunked if loss == "fused" else reference)(draft, [states], teacher, [rows], [weights])
        step.loss.backward()
        results.append([step.loss, states.grad, head.weight.grad, *step.metrics.values()])
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs)
    named = torch.tensor([0, 1, 3, 4])  # label 2 is none of the draft's
    expected = F.cross_entropy(head(states[named]), torch.tensor([1, 3, 0, 3]), reduction="none") @ weights[named]
    assert_close(step.loss, expected)
    q = head(states[named]).softmax(-1)[range(4), [1, 3, 0, 3]]
    assert_close(step.metrics["accepted"][0], q.sum())
