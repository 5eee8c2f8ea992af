"""The fused loss against the plain one it stands for: loss, gradients, metrics, in chunks of every size."""

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from foredraft import ForedraftError
from foredraft.contracts.algorithm import Step, pairs_by_teacher
from foredraft.contracts.objective import RowObjective, Spelt
from foredraft.loss import Labels, Taught, Teacher, chunked, chunks, in_turn, objective, reference, rows, teachers
from foredraft.loss.readable import METRICS
from foredraft.loss.rows import Against, Found
from foredraft.registry import default_registry

MODEL = tiny_target()
INTERPRETED = "TRITON_INTERPRET" in os.environ
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
SIZES = (7, 0, 5, 1, 0)  # rows per step; empty steps in the middle and at the end
TEACHERS = 9


class TopTeacher(Teacher):
    """HASS's: three of its tokens, not normalised anew."""

    def at(self, rows: Tensor | slice, draft_ids_W: Tensor) -> Taught:
        taught = super().at(rows, draft_ids_W)
        assert taught.p_RW is not None
        return replace(taught, p_RW=taught.p_RW * (taught.p_RW >= taught.p_RW.topk(3).values[:, -1:]))


def make_draft(norm_output: bool, draft_vocab_size: int | None = 20, carried: int = 0) -> Any:
    """A draft that names 20 of 50 tokens, or all; its final norm is not the identity; with `carried`, logits have a bias of that rank."""
    draft = tiny_draft(MODEL, draft_vocab_size=draft_vocab_size, norm_output=norm_output)
    torch.manual_seed(1)
    torch.nn.init.normal_(draft.norm.weight)
    if carried:
        draft.biased = torch.nn.Linear(carried, draft.config.draft_vocab_size, bias=False)
        draft.algorithm.__class__ = type("Riding", (type(draft.algorithm),), {"rider": lambda _, draft: draft.biased})
    return draft


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of `test_the_kernels_too`, kernels in place of plain torch."""
    if INTERPRETED:
        from foredraft.loss.kernels import differentiate

        of_rows = RowObjective.by_rows
        monkeypatch.setattr("foredraft.loss.chunks.method", lambda _, o: differentiate if of_rows(o) else rows.differentiate)


@pytest.fixture(params=[False, True], ids=["norm before head", "norm_output"])
def draft(request: pytest.FixtureRequest) -> Any:
    return make_draft(request.param)


def problem(
    draft: Any,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
    teacher: type[Teacher] = Teacher,
    loss: Any = "ce",
    carried: int = 0,
) -> dict[str, Any]:
    """States, teacher and weights; a teacher row serves several steps; a reduced vocabulary lacks some top tokens."""
    torch.manual_seed(2)
    logits_RV = torch.randn(TEACHERS, 50) * 3
    top_R = logits_RV.argmax(-1)
    named = torch.isin(top_R, draft.draft_ids)
    assert named.any()
    assert named.all() == (not draft.config.has_reduced_vocabulary)
    return {
        "states": [torch.randn(n, 32 + carried).to(dtype).requires_grad_() for n in sizes],
        "teacher": teacher(logits_RV, torch.clone, torch.arange(TEACHERS) * 5),
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


@pytest.mark.parametrize("loss", [*default_registry().objectives(), {"text": 0.1, "tv": 0.9}], ids=str)
@pytest.mark.parametrize("teacher", [Teacher, TopTeacher])
@pytest.mark.parametrize("draft_vocab_size", [20, None], ids=["reduced", "whole"])
@pytest.mark.parametrize(("chunk", "norm_output", "carried"), [(1, False, 0), (7, True, 3), (256, False, 3)])
def test_equals_the_plain_loss(
    norm_output: bool,
    chunk: int,
    carried: int,
    draft_vocab_size: int | None,
    teacher: type[Teacher],
    loss: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every objective, alone and in a sum; a teacher that does not sum to one included, and states that carry something for a rider."""
    monkeypatch.setattr("foredraft.loss.chunks.CHUNK", chunk)
    draft = make_draft(norm_output, draft_vocab_size, carried)
    p = problem(draft, teacher=teacher, loss=loss, carried=carried)
    ours, theirs = fused(draft, p), plain(draft, p)
    assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert tuple(ours.metrics) == tuple(theirs.metrics) == METRICS
    for name in METRICS:
        assert_close(ours.metrics[name], theirs.metrics[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert_close(list(ours.acceptance), list(theirs.acceptance), rtol=1e-5, atol=1e-5)
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


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bfloat16_draft(draft: Any, device: str) -> None:
    expected = fused(draft, problem(draft))
    half = make_draft(draft.algorithm.options.norm_output).to(torch.bfloat16)
    p = problem(half, dtype=torch.bfloat16)
    half.to(device)
    p = {
        **p,
        **{
            name: [t.detach().to(device).requires_grad_(name == "states") for t in p[name]]
            for name in ("states", "teacher_rows", "weights")
        },
    }
    p["teacher"] = replace(p["teacher"], hidden_RT=p["teacher"].hidden_RT.to(device), text_R=p["teacher"].text_R.to(device))
    step = fused(half, p)
    assert step.loss.dtype == torch.float32
    assert {g.dtype for g in all_gradients(half, p, step.loss)} == {torch.bfloat16}
    assert_close(step.loss.cpu(), expected.loss, rtol=3e-2, atol=3e-2)


def test_small_gradients_in_float16(draft: Any) -> None:
    """A `GradScaler` multiplies the loss, when gradients of rows that weigh 1 / 65,536 have been formed."""
    half = make_draft(draft.algorithm.options.norm_output).to(torch.float16)
    p = problem(half, dtype=torch.float16)
    p["weights"] = [w / 2**16 for w in p["weights"]]
    exact, q = deepcopy(half).float(), {**p, "states": [x.detach().float().requires_grad_() for x in p["states"]]}
    ours, theirs = (all_gradients(*given, loss(*given).loss * 2**16) for given, loss in (((half, p), fused), ((exact, q), plain)))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert (mine.float() - wanted).norm() <= 5e-3 * wanted.norm()


class Capped:
    """A head that is more than a norm and a matrix."""

    def compute_logits(self, hidden_BQD: Tensor) -> Tensor:
        logits: Tensor = super().compute_logits(hidden_BQD)  # type: ignore[misc]
        return 3 * torch.tanh(logits / 3)


class Adapted(torch.nn.Linear):
    """A head that somebody replaced."""

    def forward(self, hidden_BQD: Tensor) -> Tensor:
        return super().forward(hidden_BQD).sin()


def test_a_sum_that_is_told_of_no_text() -> None:
    class Mine(objective("ce").__class__):  # type: ignore[misc]
        def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
            return log_q_NW.sum(-1)

    from foredraft.registry import Registry

    registry = default_registry()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "objective", lambda _, name: Mine if name == "any" else registry.objectives()[name])
        with pytest.raises(ForedraftError, match="'text' reads the text, which no sum"):
            objective({"any": 1.0, "text": 0.5})


@pytest.mark.parametrize("kind", ["capped", "with a bias", "with adapters"])
def test_heads_of_other_kinds(draft: Any, kind: str) -> None:
    """By autograd where a head is not known; its gradient is formed once."""
    torch.manual_seed(3)
    if kind == "capped":
        draft.__class__ = type("CappedDraft", (Capped, type(draft)), {})
    else:
        draft.lm_head.bias = torch.nn.Parameter(torch.randn(20))
        if kind == "with adapters":
            draft.lm_head.__class__ = Adapted
    assert (draft.head_parts() is not None) == (kind == "with a bias")
    p = problem(draft)
    ours, theirs = fused(draft, p), plain(draft, p)
    assert_close(all_gradients(draft, p, ours.loss), all_gradients(draft, p, theirs.loss), rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="has been taken"):
        ours.loss.backward()


def test_many_chunks_lose_nothing_in_bfloat16(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's gradient is summed in float32: in bfloat16, late chunks would be lost (a relative error of 1e-2)."""
    draft.to(torch.bfloat16)
    found = []
    for chunk in (8, 2048):
        monkeypatch.setattr("foredraft.loss.chunks.CHUNK", chunk)
        loss = fused(draft, problem(draft, (2048,), dtype=torch.bfloat16)).loss
        found.append(torch.autograd.grad(loss, [draft.lm_head.weight])[0].float())
    assert (found[0] - found[1]).norm() < 3e-3 * found[1].norm()


class Sizes(TorchDispatchMode):
    """Notes the shape of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [(func, tuple(t.shape)) for t in tree_leaves(out) if isinstance(t, Tensor)]
        return out


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_nothing_is_as_long_as_all_rows_and_as_wide_as_a_vocabulary(
    draft: Any, planned: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of teacher rows, whose states and teachers come in any order; a frozen head is cast once."""
    monkeypatch.setattr("foredraft.loss.chunks.CHUNK", 64)
    monkeypatch.setattr("foredraft.loss.chunks.TEACHERS", 1)
    draft.lm_head.requires_grad_(not frozen)
    torch.manual_seed(4)
    rows, sizes = [torch.randint(600, (n,)) for n in (900, 0, 400)], (900, 0, 400)
    p = {**problem(draft, sizes), "teacher": Teacher(torch.randn(600, 50), torch.clone), "teacher_rows": rows}
    arguments = p["states"], p["teacher"], rows, p["weights"], p["objective"]
    step = chunked(draft, *arguments, pairs_by_teacher(rows) if planned else None)
    assert_close(step.loss, plain(draft, p).loss, rtol=1e-5, atol=1e-6)
    with Sizes() as sizes_of, torch.autocast("cpu", torch.bfloat16):
        chunked(draft, *arguments, pairs_by_teacher(rows) if planned else None).loss.backward()
    assert max(shape[0] for _, shape in sizes_of.made if len(shape) == 2 and shape[-1] in (20, 50)) <= 128
    casts = [func for func, shape in sizes_of.made if shape == (20, 32) and func is torch.ops.aten._to_copy.default]
    assert len(casts) == 1


def test_other_ways_to_run(draft: Any) -> None:
    """Operations are counted (a head's three products), and torch.compile leaves the loss as it is."""
    p = problem(draft)
    with FlopCounterMode(display=False) as counter:
        loss = fused(draft, p).loss
    assert counter.get_total_flops() == 3 * 2 * sum(SIZES) * 32 * 20
    compiled = torch.compile(lambda: fused(draft, p).loss * 2, backend="aot_eager")()
    assert_close(compiled, 2 * loss)
    assert_close(all_gradients(draft, p, compiled), all_gradients(draft, p, 2 * loss))


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


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("width", [1, 4097, 200_003])
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_vocabulary(width: int, hard: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows alone, against autograd in float64: a mix of all that an objective may read, at widths on both sides of a block."""
    if width == 4097:
        monkeypatch.setattr(teachers, "CACHED", width // 8)  # two rows at a time, looked at one by one
    torch.manual_seed(0)
    top_R = torch.tensor([width // 2, -1])
    p_RW = None if hard else (torch.randn(2, width) * 2).softmax(-1)
    taught = Taught(top_R, torch.tensor([1.0, 1.0] if hard else [0.9, 0.4]), p_RW, torch.tensor([-1, width - 1]))
    rows_N, weight_N = torch.tensor([1, 0, 0]), torch.rand(3)
    logits_NW = (torch.randn(3, width) * 3).to(dtype)
    exact_NW = logits_NW.double().requires_grad_()
    log_q_NW, spelt_NW, mass_N = exact_NW.log_softmax(-1), taught.probabilities(rows_N, width).double(), taught.mass_R[rows_N].double()
    mixed: Any = objective({"ce": 0.5, "kl": 0.25, "lk": 1.0, "tv": 2.0, "text": 0.7})
    expected_N = mixed.of(Spelt(log_q_NW, spelt_NW, mass_N, taught.text_R[rows_N])).loss_N  # type: ignore[index]
    (gradient_NW,) = torch.autograd.grad((weight_N * expected_N).sum(), exact_NW)
    taught = Taught(*(None if t is None else t.to(device) for t in (top_R, taught.mass_R, p_RW, taught.text_R)))  # type: ignore[arg-type]
    against, logits_NW = Against(taught, rows_N.to(device), weight_N.to(device), mixed), logits_NW.to(device)
    by = chunks.method(logits_NW, mixed)
    found = Found(*(t.cpu() for t in by(logits_NW, against, True)))
    assert_close(found.loss_N.double(), expected_N, rtol=1e-5, atol=1e-5)
    accepted_N = torch.minimum(spelt_NW * mass_N[:, None], log_q_NW.exp()).sum(-1)
    assert_close(found.accepted_N.double(), accepted_N, rtol=1e-4, atol=1e-6)
    assert_close(logits_NW.cpu().double(), gradient_NW, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("width", [5, 255, 256, 1000, 1024])
def test_the_teachers_top_token(width: int) -> None:
    """It is looked for in blocks: the first of equals, wherever the blocks meet, and what is not a number, as torch has it."""
    logits_NV = torch.randint(4, (64, width), generator=torch.Generator().manual_seed(width)).float()
    logits_NV[0, :], logits_NV[1, -1], logits_NV[2, width // 2], logits_NV[3, :] = 7, 9, float("nan"), -float("inf")
    top_N, _, _ = teachers._said(logits_NV, torch.arange(width))
    assert top_N.equal(logits_NV.argmax(-1))


@pytest.mark.skipif(INTERPRETED or not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("widths", ["not 200003", pytest.param("any", marks=pytest.mark.slow)])
def test_the_kernels_too(widths: str) -> None:
    """The tests of this file once more with the Triton kernels, interpreted, which takes long where a vocabulary is wide."""
    which = f"(any_vocabulary and {widths}) or (equals_the_plain_loss and 7-True-reduced-TopTeacher) or labels or bfloat16_draft or no_rows"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", which]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_kernels_compile(capability: int) -> None:
    """For devices that are not here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from foredraft.loss import kernels

    types = {
        "x_ptr": "*bf16",
        "rows_ptr": "*i64",
        "top_ptr": "*i64",
        "text_ptr": "*i64",
        "number": "i32",
        "width": "i32",
        "x_stride": "i32",
        "p_stride": "i32",
    }
    for kernel in (kernels.sum_rows, kernels.differentiate_rows):
        for hard in (False, True):
            constants = {"HARD": hard, "TEXT": hard, "BLOCK": kernels.BLOCK}
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            names = {name: types.get(name, "*fp32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
            source = ASTSource(fn=kernel, signature=names, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels.WARPS})
            assert len(made.asm["cubin"]) > 0


def test_states_of_the_steps_in_turn() -> None:
    """Rows as asked for, steps without any included; their gradients come back to the rows they were taken of."""
    states_ND = torch.randn(5, 3, requires_grad=True)
    queries = [torch.tensor([4, 0]), torch.tensor([], dtype=torch.long), torch.tensor([4])]
    taken = list(in_turn(states_ND, queries))
    assert all(torch.equal(part, states_ND[query]) for part, query in zip(taken, queries, strict=True))
    torch.cat(taken).sum().backward()
    assert states_ND.grad is not None
    assert states_ND.grad[:, 0].tolist() == [1, 0, 0, 0, 2]


def test_a_chunk_outweighs_the_gradient_it_adds_to() -> None:
    """Off the CPU, however wide the vocabulary."""
    with FakeTensorMode():
        states_ND = torch.empty(1, 1)
        assert [chunks.rows_at_once(width, states_ND) for width in (1000, 128_256, 262_144)] == [8192, 2048, 2048]
