"""The loss op against a loop over its rows, the numbers derived from it, the draft vocabulary, and heads that are more than a matrix."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import CONFIG_MAPPING

from foredraft import ForedraftError, Target
from foredraft.decoding.families import tiny_model
from foredraft.draft.vocabulary import choose_vocabulary, count_tokens
from foredraft.loss import Teacher, estimated_tau, reference, step_weights

VOCAB, WIDTH = 12, 6
DRAFT_IDS = torch.tensor([0, 2, 3, 7, 8])


@pytest.fixture
def problem() -> dict[str, Any]:
    """Three steps of 5, 3 and 0 rows held against 6 teacher rows; some teachers' top token has no draft id (below, between, above)."""
    torch.manual_seed(0)
    logits_RV = torch.randn(6, VOCAB) * 2
    logits_RV[torch.arange(6), torch.tensor([2, 1, 8, 11, 0, 7])] += 10
    head = nn.Linear(WIDTH, len(DRAFT_IDS), bias=False)
    return {
        "logits_RV": logits_RV,
        "head": head,
        "states": [torch.randn(n, WIDTH, requires_grad=True) for n in (5, 3, 0)],
        "teacher_rows": [torch.tensor([0, 1, 2, 3, 5]), torch.tensor([5, 3, 4]), torch.tensor([], dtype=torch.long)],
        "weights": [torch.rand(5), torch.rand(3), torch.rand(0)],
    }


def head_of(compute_logits: Any) -> Any:
    """The part of a draft that the loss reads."""
    return SimpleNamespace(compute_logits=compute_logits, draft_ids=DRAFT_IDS)


def fused(problem: dict[str, Any]) -> Any:
    logits_RV = problem["logits_RV"]
    teacher = Teacher(logits_RV, torch.clone)
    return reference(head_of(problem["head"]), problem["states"], teacher, problem["teacher_rows"], problem["weights"])


def naive(problem: dict[str, Any]) -> tuple[Tensor, dict[str, list[float]]]:
    """The definition, row by row and token by token."""
    loss = torch.zeros(())
    metrics: dict[str, list[float]] = {"count": [], "correct": [], "accepted": [], "cross_entropy": []}
    for states, rows, weights in zip(problem["states"], problem["teacher_rows"], problem["weights"], strict=True):
        count = correct = accepted = cross_entropy = 0.0
        for state, row, weight in zip(states, rows.tolist(), weights, strict=True):
            q_W = problem["head"](state).softmax(-1)
            p_V = problem["logits_RV"][row].softmax(-1)
            count += 1
            top, draft_top = int(p_V.argmax()), int(DRAFT_IDS[q_W.argmax()])
            correct += top == draft_top
            q_V = torch.zeros(VOCAB).scatter(0, DRAFT_IDS, q_W)
            accepted += sum(min(p, q) for p, q in zip(p_V.tolist(), q_V.tolist(), strict=True))
            if top in DRAFT_IDS.tolist():
                inside = sum(float(p_V[t]) for t in DRAFT_IDS.tolist())
                row_loss = -sum(float(p_V[t]) / inside * q_W[j].log() for j, t in enumerate(DRAFT_IDS.tolist()))
                loss = loss + weight * row_loss
                cross_entropy += row_loss.item()
        for name, value in (("count", count), ("correct", correct), ("accepted", accepted), ("cross_entropy", cross_entropy)):
            metrics[name].append(value)
    return loss, metrics


class TestSoftCrossEntropy:
    def test_loss_gradients_and_metrics_equal_the_loop(self, problem: dict[str, Any]) -> None:
        step, (loss, metrics) = fused(problem), naive(problem)
        assert_close(step.loss, loss)
        inputs = [*problem["states"][:2], problem["head"].weight]
        assert_close(torch.autograd.grad(step.loss, inputs), torch.autograd.grad(loss, inputs))
        for name, values in metrics.items():
            assert_close(step.metrics[name], torch.tensor(values), msg=lambda m, name=name: f"{name}: {m}")

    def test_a_teacher_outside_the_draft_vocabulary_is_a_miss_without_loss(self, problem: dict[str, Any]) -> None:
        problem["teacher_rows"] = [torch.tensor([1, 3, 1, 3, 1]), torch.tensor([3, 3, 1]), torch.tensor([], dtype=torch.long)]
        step = fused(problem)
        assert step.loss == 0
        assert step.metrics["count"].tolist() == [5, 3, 0]
        assert step.metrics["correct"].tolist() == [0, 0, 0]
        assert step.metrics["accepted"][:2].gt(0).all()  # it may still accept by chance
        assert all(g.eq(0).all() for g in torch.autograd.grad(step.loss, [*problem["states"][:2], problem["head"].weight]))

    def test_a_perfect_draft_is_accepted_for_the_mass_it_can_name(self, problem: dict[str, Any]) -> None:
        """With the teacher's own restricted distribution every named token has q >= p, so Σ min(p, q) = Σ p."""
        logits_RV = problem["logits_RV"]
        rows = torch.arange(6)
        teacher = Teacher(logits_RV, torch.clone)
        step = reference(head_of(lambda x: x), [logits_RV[:, DRAFT_IDS]], teacher, [rows], [torch.ones(6)])
        assert_close(step.metrics["accepted"][0], logits_RV.softmax(-1)[:, DRAFT_IDS].sum())
        assert step.metrics["correct"].tolist() == [4]  # all but the two that cannot be named
        named = torch.isin(logits_RV.argmax(-1), DRAFT_IDS)
        p_NW = logits_RV[named][:, DRAFT_IDS].softmax(-1)
        assert_close(step.loss, -(p_NW * p_NW.log()).sum())  # the least a cross-entropy can be: the entropy

    def test_bfloat16_states_give_a_float32_loss(self, problem: dict[str, Any]) -> None:
        reference = fused(problem).loss
        problem["states"] = [s.bfloat16() for s in problem["states"]]
        problem["head"] = problem["head"].bfloat16()
        loss = fused(problem).loss
        assert loss.dtype == torch.float32
        assert_close(loss, reference, rtol=2e-2, atol=2e-2)


def test_eagle3_loss_equals_the_definition() -> None:
    """Σ 0.8^k L_k / Σ 0.8^k, L_k the mean over supervised slots, with the slots found one by one."""
    model = tiny_target()
    draft = tiny_draft(model, draft_vocab_size=20, ttt_steps=3)
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaa", "uuaaauaa"], ["uuuaaaaaaaa"]]))
    signal = tiny_signal(model, draft, batch)
    step = draft(batch, signal)
    states = draft.algorithm.unroll(draft, batch, signal.aux_BSA)
    logits_BSV = Target(model, draft.config.aux_layers).head(signal.hidden_BST)
    spans, ids_W = batch["spans"], draft.draft_ids
    total, shares = torch.zeros(()), [1.0, 0.8, 0.64]
    for k in range(3):
        losses: list[Tensor] = []
        for b in range(2):
            for t in range(spans.shape[1] - 2 - k):
                inside = {int(s) for s in spans[b, t + 1 : t + 3 + k]}
                if len(inside) > 1 or min(inside) < 0:
                    continue
                teacher_V = logits_BSV[b, t + 1 + k]
                q = batch["slots"][b].tolist().index(t)
                log_q_W = draft.compute_logits(states[k][b, q]).log_softmax(-1)
                nameable = int(teacher_V.argmax()) in ids_W.tolist()
                losses.append(-(teacher_V[ids_W].softmax(-1) * log_q_W).sum() * nameable)
        assert len(losses) == int(batch["counts"][k])
        total = total + shares[k] * torch.stack(losses).mean()
    assert_close(step["loss"], total / sum(shares))


def test_step_weights() -> None:
    assert step_weights(1, 0.8) == [1.0]
    assert step_weights(3, 1.0) == pytest.approx([1 / 3] * 3)
    assert step_weights(3, 0.8) == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])


def test_estimated_tau() -> None:
    assert estimated_tau([]) == 1.0
    assert estimated_tau([1.0, 1.0, 1.0]) == 4.0
    assert estimated_tau([0.0, 1.0]) == 1.0
    assert estimated_tau([0.8, 0.5, 0.5]) == pytest.approx(1 + 0.8 + 0.4 + 0.2)


class TestVocabulary:
    def test_only_supervised_tokens_count(self) -> None:
        rows = [
            {"input_ids": [5, 5, 3, 3, 0], "spans": [-1, 0, 0, 1, -1]},
            {"input_ids": [5, 9, 9, 0, 0], "spans": [0, -1, 0, -1, -1]},
        ]
        counts = count_tokens(rows, 12)
        assert counts.tolist() == [0, 0, 0, 2, 0, 2, 0, 0, 0, 1, 0, 0]
        assert counts.dtype == torch.long
        assert count_tokens([], 3).tolist() == [0, 0, 0]

    def test_most_frequent_ascending(self) -> None:
        assert choose_vocabulary(torch.tensor([1, 0, 9, 3, 0, 5]), 3).tolist() == [2, 3, 5]

    def test_ties_go_to_the_lower_id(self) -> None:
        assert choose_vocabulary(torch.tensor([0, 2, 7, 2, 2]), 3).tolist() == [1, 2, 3]
        many = torch.arange(10_000) % 2  # long enough for an unstable sort to show
        assert choose_vocabulary(many, 5_003).tolist() == sorted([0, 2, 4, *range(1, 10_000, 2)])

    def test_padded_with_the_lowest_unused(self) -> None:
        assert choose_vocabulary(torch.tensor([0, 0, 0, 4, 0, 1]), 4).tolist() == [0, 1, 3, 5]

    def test_the_whole_vocabulary(self) -> None:
        assert choose_vocabulary(torch.tensor([0, 3, 1]), 3).tolist() == [0, 1, 2]

    @pytest.mark.parametrize("size", [0, 4])
    def test_a_size_that_does_not_fit(self, size: int) -> None:
        with pytest.raises(ForedraftError, match=f"draft_vocab_size={size} does not fit the target's vocabulary of 3"):
            choose_vocabulary(torch.zeros(3), size)

    def test_d2t_holds_offsets_and_t2d_membership(self) -> None:
        draft = tiny_draft(tiny_target(), draft_vocab_size=4)
        draft.set_draft_vocabulary(torch.tensor([3, 4, 10, 49]))
        assert draft.d2t.tolist() == [3, 3, 8, 46]
        assert draft.d2t.dtype == torch.long
        assert draft.t2d.dtype == torch.bool
        assert draft.t2d.nonzero()[:, 0].tolist() == draft.draft_ids.tolist() == [3, 4, 10, 49]

    @pytest.mark.parametrize("ids", [[3, 4, 10], [4, 3, 10, 11], [3, 3, 10, 11], [-1, 3, 10, 11], [3, 4, 10, 50]])
    def test_ids_that_are_no_vocabulary(self, ids: list[int]) -> None:
        draft = tiny_draft(tiny_target(), draft_vocab_size=4)
        with pytest.raises(ForedraftError, match=f"4 distinct ascending ids below 50 is needed, found {len(ids)}"):
            draft.set_draft_vocabulary(torch.tensor(ids))

    def test_the_whole_vocabulary_needs_no_mapping(self) -> None:
        draft = tiny_draft(tiny_target())
        assert not {"d2t", "t2d"} & set(draft.state_dict())
        assert draft.draft_ids.tolist() == list(range(50))


class TestHead:
    @torch.no_grad()
    def test_a_scale_that_the_model_around_leaves_out(self) -> None:
        """Of the text model within (Aya Vision); test_adapters.py has other heads."""
        model = tiny_model(CONFIG_MAPPING["aya_vision"]).eval()
        target, ids = Target(model, (1,)), torch.randint(3, 50, (2, 7))
        assert_close(target.head(target.decoder(ids).last_hidden_state), model(ids).logits, rtol=1e-5, atol=1e-5)

    def test_an_unknown_head_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_target(layers=2)
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda **given: SimpleNamespace(logits=forward(**given).logits * math.pi))
        with pytest.raises(ForedraftError, match="the head of LlamaForCausalLM is not understood"):
            Target(model, (1,))
