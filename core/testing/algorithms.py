"""`AlgorithmTests`: what every drafting algorithm must do, whatever it drafts; see `docs/testing.md`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..contracts.algorithm import AlgorithmBase
from ..contracts.spec import DraftSpec
from ..files.ours import save_draft
from ..loss.readable import METRICS
from .case import SUPERVISORS, Case, Supervise, chi_square, equal, forced, likeliest, reduced, scrambled
from .common import TOLERANCE, Conformance, check_dtype, check_gradients, check_options, gap, missing, registry_of
from .disk import check_config, check_names, check_round_trip
from .passes import check_lossless
from .tiny import gradients, tiny_config

LETTERS = "uuaaaaaaaaau"
TWO = [["uuaaaaaaaa", "uubbbbuub"], ["uaaaaauu", "uuaaaaaaaa"]]


class AlgorithmTests(Conformance):
    """Subclass it as `class TestMine(AlgorithmTests)` and supply the fixture `algorithm`; `options` make it small."""

    @pytest.fixture
    def algorithm(self) -> type[AlgorithmBase]:
        """The algorithm under test."""
        raise missing(self, "algorithm", "the algorithm under test, a class", "MyAlgorithm")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Its options; by default none."""
        return {}

    @pytest.fixture
    def target_config(self) -> Any:
        """The config of a tiny target; by default a Llama."""
        return tiny_config()

    @pytest.fixture
    def supervisors(self) -> Mapping[str, Supervise]:
        """What training may hold its logits against, by name; by default the target's distribution, or the text itself."""
        return SUPERVISORS

    @pytest.fixture
    def case(self, algorithm: type[AlgorithmBase], options: dict[str, Any], target_config: Any) -> Case:
        """Target and draft."""
        return Case.of(algorithm, options, target_config)

    def test_contract(self, algorithm: type[AlgorithmBase], options: dict[str, Any]) -> None:
        """Options are strict, described and survive JSON; the spec follows from them."""
        check_options(algorithm)
        method = algorithm(**options)
        assert isinstance(method.spec, DraftSpec), f"{algorithm.__name__}.spec must be a property that gives a DraftSpec"
        again = registry_of(algorithm).make_algorithm(method.name, method.options.model_dump(mode="json"))
        assert again.spec == method.spec, "the spec changes when the options are saved and read again: derive it from self.options alone"

    def test_plan_is_deterministic(self, case: Case) -> None:
        """The plan of a row depends on (seed, epoch, row) alone, not on other draws or on the rows beside it."""
        rows = case.rows(TWO)
        torch.manual_seed(1)
        first = case.batch(rows)
        torch.manual_seed(2)
        assert equal(first, case.batch(rows)), "two plans of one batch differ: draw from the generator of each row, never from torch's own"
        apart = sum(case.batch([row])["counts"] for row in rows)
        assert torch.equal(first["counts"], apart), (
            f"counts of two rows are {first['counts'].tolist()} together and {apart.tolist()} apart: "
            "plan each row by itself, from its own generator"
        )

    def test_plan_has_what_others_read(self, case: Case) -> None:
        """`counts` and `teacher_rows`, on the CPU; the teacher is asked only inside assistant spans or right before them."""
        batch = case.batch(case.rows(TWO))
        for key in ("counts", "teacher_rows"):
            assert key in batch, f"plan must give '{key}': see AlgorithmBase.plan"
            integers = batch[key].ndim == 1 and not batch[key].is_floating_point()
            assert integers, f"'{key}' must be a vector of integers"
        assert int(batch["counts"][0]) > 0, "the plan trains nothing of rows with assistant turns of up to 8 tokens"
        length = batch["input_ids"].shape[1]
        following = batch["spans"].roll(-1, dims=1).flatten()
        idle = sorted({int(r) % length for r in batch["teacher_rows"] if following[r] < 0})
        assert not idle, f"teacher_rows {idle} do not come right before an assistant's token: what follows them is not supervised"

    def test_no_future_leak(self, case: Case) -> None:
        """The target's features of the last two trained tokens, and all that lies behind them, change no loss."""
        for letters in ("uuaaau", "uuaaaau", "uuaaaaaau"):
            batch = case.batch(case.rows([[letters + "uuu"]]))
            signal = case.target.capture(batch)
            expected = case.step(batch, signal).loss
            last = len(letters) - 2
            after = [slice(n, None) for n in (last - 1, last, last + 1)]
            found = case.step(*scrambled(case, batch, signal, *after)).loss
            assert gap(found, expected) < TOLERANCE, (
                f"the loss on {last - 1} assistant tokens changed when the target's features of the last two did, or the tokens "
                "after them. Serving has neither: what predicts x_n may read features up to x_{n-2} and embeddings up to x_{n-1}"
            )

    def test_no_document_leak(self, case: Case) -> None:
        """A document's loss depends on no other document of its row, by value or by gradient."""
        for packed, other in ((["uuaaaaaa", "uuuuuuuu"], slice(8, None)), (["uuuuuuuu", "uuaaaaaa"], slice(None, 8))):
            batch = case.batch(case.rows([packed]))
            signal = case.target.capture(batch)
            signal = replace(signal, aux_BSA=signal.aux_BSA.clone().requires_grad_())
            step = case.step(batch, signal)
            found = case.step(*scrambled(case, batch, signal, other, other, other)).loss
            where = "behind" if other.start else "before"
            assert gap(found, step.loss) < TOLERANCE, f"the loss changed when the document {where} it did: hand `documents` to the pattern"
            (grad,) = torch.autograd.grad(step.loss, signal.aux_BSA, allow_unused=True)
            assert grad is None or not bool(grad[:, other].any()), (
                f"the loss has a gradient in the document {where} it: documents leak into each other"
            )

    def test_packing(self, case: Case) -> None:
        """Documents in one row give the loss they give in rows of their own."""
        first, second = (row["input_ids"] for row in case.rows([["uuaaaaaa"], ["uubbbbub"]]))
        packed, apart = case.rows([["uuaaaaaa", "uubbbbub"]]), case.rows([["uuaaaaaa"], ["uubbbbub"]])
        packed[0]["input_ids"] = first + second
        if case.draws(packed) or case.draws(apart):
            pytest.skip("the plan draws at random: other rows, other draws (choose `options` that draw nothing to check this)")
        together, separate = case.batch(packed), case.batch(apart)
        assert torch.equal(together["counts"], separate["counts"]), (
            f"packed, two documents have counts {together['counts'].tolist()}, in rows of their own {separate['counts'].tolist()}: "
            "slots may not reach over the end of a document"
        )
        assert gap(case.step(together).loss, case.step(separate).loss) < TOLERANCE, "packed documents give another loss than separate ones"

    def test_accumulation(self, case: Case) -> None:
        """Two small batches under common counts add up to the large one, loss and gradients."""
        rows = case.rows(TWO)
        whole = case.batch(rows)
        loss = case.step(whole).loss
        loss.backward()
        expected = gradients(case.draft)
        parts = [case.step(case.batch([row]), counts=whole["counts"]).loss for row in rows]
        added = sum(parts, torch.zeros(())).detach()
        assert gap(added, loss) < TOLERANCE, (
            f"two batches of one row add up to a loss of {float(added):.4g}, both rows in one give {float(loss.detach()):.4g}: "
            "divide by the `counts` that loss() is given, not by those of the batch"
        )
        for part in parts:
            part.backward()
        other = [name for name, grad in gradients(case.draft).items() if gap(grad, expected[name]) > TOLERANCE]
        assert not other, f"accumulated gradients differ from those of the large batch: {', '.join(other)}"

    def test_every_parameter_learns(self, case: Case) -> None:
        """A gradient reaches every trainable parameter."""
        case.step(case.batch(case.rows(TWO))).loss.backward()
        check_gradients(case.draft)

    def test_padding(self, case: Case) -> None:
        """Padding changes nothing, and rows or batches without a supervised token give a loss of zero, never NaN."""
        rows = [["uuaaaaaaaa"], ["uuuuuu"]]
        losses = [case.step(case.batch(case.rows(rows, length))).loss for length in (10, 16)]
        assert all(bool(loss.isfinite()) for loss in losses), (
            "the loss is not finite where a row is padded: does a query of padding see no key at all, or is something divided by zero?"
        )
        assert gap(losses[1], losses[0]) < TOLERANCE, "the loss changed with the amount of padding"
        idle = case.step(case.batch(case.rows([["uuuuuu"]])))
        assert float(idle.loss.detach()) == 0, (
            f"the loss of a batch without a supervised token is {float(idle.loss.detach())}: clamp counts to at least one"
        )
        assert idle.loss.requires_grad, "the loss of a batch without a supervised token has no graph: other ranks would wait for ever"
        idle.loss.backward()
        bad = [n for n, p in case.draft.named_parameters() if p.requires_grad and (p.grad is None or bool(p.grad.any()))]
        assert not bad, f"without a supervised token {', '.join(bad)} must have a gradient of zeros, which other ranks wait for"

    def test_metrics(self, case: Case) -> None:
        """Sums per drafting step, under the names that the trainer reads."""
        batch = case.batch(case.rows(TWO))
        metrics = case.step(batch).metrics
        for name in METRICS:
            assert name in metrics, f"metrics lack '{name}': see foredraft.loss.readable"
            assert metrics[name].shape == batch["counts"].shape, f"metric '{name}' must have an entry per drafting step, as `counts` has"
        assert torch.equal(metrics["count"].long(), batch["counts"]), (
            f"the plan counted {batch['counts'].tolist()}, the loss {metrics['count'].tolist()}"
        )

    @pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
    def test_half_precision(self, case: Case, precision: str) -> None:
        """Forward and backward are finite, and near those in float32."""
        batch = case.batch(case.rows(TWO))
        signal, exact = case.target.capture(batch), case.step(batch).loss
        if precision == "bfloat16":
            case.draft.to(torch.bfloat16)
            check_dtype(case.draft, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = case.step(batch, signal).loss
        found, expected = float(loss.detach()), float(exact.detach())
        assert gap(loss, exact) < 0.05, f"the loss is {found:.4g} in {precision}, {expected:.4g} in float32"
        loss.backward()
        check_gradients(case.draft)

    @pytest.mark.parametrize("draft_vocab_size", [None, 30], ids=["whole", "reduced"])
    def test_training_is_decoding(self, case: Case, supervisors: Mapping[str, Supervise], draft_vocab_size: int | None) -> None:
        """The logits that training scores are those that the drafter drafts from, at every position and step."""
        if draft_vocab_size is not None:
            case = reduced(case, draft_vocab_size)
        batch = case.batch(case.rows([[LETTERS]]))
        trained = case.step(batch).metrics
        drafted, possible = forced(case, batch["input_ids"][0], LETTERS, len(batch["counts"]), supervisors)
        compared = 0
        for k, count in enumerate(trained["count"].long().tolist()):
            assert count <= possible[k], (
                f"step {k + 1} trains {count} slots of a text in which serving reaches {possible[k]}: "
                "a chain starts at an assistant's token, and ends with its turn"
            )
            if count < possible[k] or not count:
                continue  # the plan draws a part of them
            compared += 1
            gaps = [max(gap(trained[name][k], theirs[name][k]) for name in ("cross_entropy", "accepted")) for theirs in drafted.values()]
            ours, *theirs = (float(metrics["cross_entropy"][k]) / count for metrics in (trained, *drafted.values()))
            held = " and ".join(f"one of {value:.4f} against {name}" for name, value in zip(drafted, theirs, strict=True))
            assert min(gaps) < TOLERANCE, (
                f"step {k + 1} of training has a cross-entropy of {ours:.4f}, the drafter's logits on the same text {held}: training and "
                "drafting differ in what they read, see or where it sits (or training learns from something else: say so by the fixture "
                "`supervisors`)"
            )
        if not compared:
            pytest.skip("the plan draws a part of the slots at every step (choose `options` that draw all to check this)")

    @torch.no_grad()
    def test_drafting_again(self, case: Case) -> None:
        """Whatever was accepted of earlier drafts, a drafter proposes what a fresh one would."""
        (ids, aux), drafter, known = case.read(LETTERS), case.method.drafter(case.draft), 0
        for end in (3, 4, 7, 8, 12):  # nothing accepted, two tokens, ..
            proposed, seen = likeliest(drafter, case.draft, ids[:end], aux[:, known : end - 1], 3)
            fresh, expected = likeliest(case.method.drafter(case.draft), case.draft, ids[:end], aux[:, : end - 1], 3)
            known = end - 1
            gaps = [gap(a, b) for a, b in zip(seen, expected, strict=proposed == fresh)]
            assert proposed == fresh and max(gaps) < TOLERANCE, (  # noqa: PT018
                f"after {end} tokens in several calls the drafter proposes {proposed}, a fresh one {fresh}: "
                "forget what was drafted (crop the cache to the confirmed slots) and read all aux states handed over"
            )

    @torch.no_grad()
    def test_drafter_keeps_its_word(self, case: Case) -> None:
        """It proposes the tokens that `choose` chose, with the very logits they were drawn from, and at most `limit`."""
        (ids, aux), offered = case.read(LETTERS), [(7 * i + 3, torch.full((case.draft.config.vocab_size,), float(i))) for i in range(4)]

        def choose(logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor] | None:
            expected = [token for token, _ in offered[: len(drafted)]]
            assert logits_W.shape == (case.draft.config.draft_vocab_size,), f"choose takes logits [W], found {tuple(logits_W.shape)}"
            assert list(drafted) == expected, f"choose was told of the drafted tokens {list(drafted)}, chosen were {expected}"
            return offered[len(drafted)] if len(drafted) < 3 else None

        for limit in (1, 2, 5):
            tokens, scores = case.method.drafter(case.draft).propose(ids, aux[:, :-1], limit, choose)
            assert 1 <= len(tokens) <= min(limit, 3), f"asked for at most {limit} tokens (choose ends it after 3), it drafted {len(tokens)}"
            assert tokens == [token for token, _ in offered[: len(tokens)]], "the drafted tokens are not those that choose gave"
            same = len(scores) == len(tokens) and all(torch.equal(s, o) for s, (_, o) in zip(scores, offered, strict=False))
            assert same, "the logits returned are not those that choose gave: sampling would no longer follow the target's distribution"

    @pytest.mark.parametrize("draft_vocab_size", [None, 30], ids=["whole", "reduced"])
    def test_greedy_is_lossless(self, case: Case, draft_vocab_size: int | None) -> None:
        """Greedy decoding gives the target's own text."""
        if draft_vocab_size is not None:
            case = reduced(case, draft_vocab_size)
        case.draft.start_from(case.model)
        check_lossless(case.model, case.draft)

    @torch.no_grad()
    def test_sampling_is_lossless(self, case: Case) -> None:
        """Drafted, accepted or drawn again, a token follows the target's distribution (χ² test)."""
        ids, aux = case.read("uuaaa")
        torch.manual_seed(0)
        p_V = (case.model(ids[None]).logits[0, -1] / 3).softmax(-1)  # warm, so that many tokens occur
        counts_V = torch.zeros_like(p_V)

        def choose(logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor]:
            logits_V = torch.full_like(p_V, float("-inf"))
            logits_V[case.draft.draft_ids] = logits_W.float()
            return int(torch.multinomial(logits_V.softmax(-1), 1)), logits_V

        for _ in range(300):
            tokens, scores = case.method.drafter(case.draft).propose(ids, aux[:, :-1], 1, choose)
            q_V, token = scores[0].softmax(-1), tokens[0]
            if float(torch.rand(())) > float(p_V[token] / q_V[token]):
                token = int(torch.multinomial((p_V - q_V).clamp(min=0), 1))
            counts_V[token] += 1
        chance = chi_square(counts_V, p_V)
        assert chance > 1e-4, f"300 sampled tokens follow the target's distribution with a probability of {chance:.1g} only"

    def test_save_and_load(self, case: Case, tmp_path: Path) -> None:
        """Saved and loaded: the same weights bit for bit, the algorithm's own modules included, and the same loss."""
        again = check_round_trip(case.draft, registry_of(type(case.draft), type(case.method)), tmp_path / "draft")
        batch = case.batch(case.rows(TWO))
        with torch.no_grad():
            before, after = case.step(batch).loss, Case(case.model, again).step(batch).loss
        assert gap(after, before) == 0, f"the loss was {float(before):.6g}, and is {float(after):.6g} after saving and loading"

    def test_on_disk(self, case: Case, tmp_path: Path) -> None:
        """`config.json` and tensor names as engines read them."""
        check_config(save_draft(case.draft, tmp_path), case.draft)
        check_names(tmp_path, case.draft)
