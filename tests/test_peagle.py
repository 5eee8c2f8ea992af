"""P-EAGLE: what is drawn, who sees whom, that training is what serving does, and that it learns, saves and drafts without loss."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigged import letter_tokenizer, predictable_target, trainer_of, written_rows
from tiny import Document, gradients, tiny_batch, tiny_document, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Generator, Tensor
from torch.testing import assert_close

from foredraft import DraftCollator, ForedraftError, Target, auto_draft, evaluate, generate, save_draft
from foredraft.decoding import DraftingStats
from foredraft.draft.attention import Masked
from foredraft.draft.attention.unrolled import unrolled_eager
from foredraft.plugins.peagle import PEagle, sees_earlier
from foredraft.training import CachedTarget

MODEL = tiny_target()
DOCUMENTS = [tiny_document(letters, seed=i) for i, letters in enumerate(["uuuaaaaaauaaa", "uaaaaa", "aaaaauub", "uuaaaaabbbb", "uuu"])]
PACKED = [[0, 1, 4], [2, 3]]
DEPTHS = 4


def packed_rows(packed: Sequence[Sequence[int]] = PACKED, length: int | None = None) -> list[dict[str, Any]]:
    return tiny_rows([[DOCUMENTS[i] for i in row] for row in packed], length)


def draft_of(layers: int = 2, **options: Any) -> Any:
    return tiny_draft(MODEL, "peagle", **{"num_layers": layers, "num_depths": DEPTHS, **options})


def reachable(row: dict[str, Any], depth: int) -> list[int]:
    """The anchors a with x_a .. x_{a+2+depth} in one document and x_{a+1} .. x_{a+2+depth} in one assistant span."""
    spans, documents = row["spans"], row["documents"]
    found = []
    for a in range(len(spans) - 2 - depth):
        needed = range(a + 1, a + 3 + depth)
        if all(documents[i] == documents[a] and spans[i] == spans[a + 1] and spans[i] >= 0 for i in needed):
            found.append(a)
    return found


def elements_of(batch: dict[str, Any]) -> list[list[tuple[int, int, int]]]:
    """Per depth, (row, anchor, depth) of every supervised element, in the order of `queries`."""
    width = batch["supervised"].shape[1]
    found = []
    for query in batch["queries"]:
        rows, columns = query // width, query % width
        at = batch["supervised"][rows, columns]
        found.append(list(zip(rows.tolist(), batch["anchors"][rows, at].tolist(), batch["depths"][rows, at].tolist(), strict=True)))
    return found


def flat(nested: list[list[Any]]) -> list[Any]:
    return [item for inner in nested for item in inner]


def drawn_of(batch: dict[str, Any]) -> list[list[list[int]]]:
    """The anchors by row and depth."""
    return [[[a for b, a, _ in depth if b == row] for depth in elements_of(batch)] for row in range(len(batch["input_ids"]))]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[str]], int]:
    """One to three rows of documents of `u`, `a` and `b`, in runs so that long spans occur, and room for padding."""
    run = st.tuples(st.sampled_from("uab"), st.integers(1, 9)).map(lambda r: r[0] * r[1])
    document = st.lists(run, min_size=1, max_size=4).map("".join)
    rows = draw(st.lists(st.lists(document, min_size=1, max_size=3), min_size=1, max_size=3))
    return rows, max(len("".join(r)) for r in rows) + draw(st.integers(0, 4))


class TestPlan:
    @given(conversations(), st.integers(1, 6), st.sampled_from([(0.7, 0.2), (1.0, 0.2), (0.3, 0.5), (0.5, 0.0)]), st.integers(0, 99))
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_equals_the_definition(self, documents: Any, num_depths: int, shares: tuple[float, float], seed: int) -> None:
        rows = tiny_rows(*documents)
        ratio, floor = shares
        batch = tiny_batch(PEagle(num_depths=num_depths, ratio=ratio, floor=floor), rows, seed)
        length = len(rows[0]["input_ids"])
        for b, (row, drawn) in enumerate(zip(rows, drawn_of(batch), strict=True)):
            assert drawn[0] == reachable(row, 0)
            for d in range(1, num_depths):
                pool = set(drawn[d - 1]) & set(reachable(row, d))
                assert set(drawn[d]) <= pool
                assert len(drawn[d]) == min(len(pool), int(max(0, len(drawn[0]) - d) * max(ratio**d, floor)))
                assert drawn[d] == sorted(set(drawn[d]))
            # The elements of the row: its slots, what was drawn, padding that is deeper.
            deeper = [(a, d) for d, anchors in enumerate(drawn) for a in anchors if d]
            found = list(zip(batch["anchors"][b].tolist(), batch["depths"][b].tolist(), strict=True))
            padding = len(found) - length - len(deeper)
            assert found == [(a, 0) for a in range(length)] + deeper + [(0, num_depths)] * padding
        for d, elements in enumerate(elements_of(batch)):
            assert all(depth == d for _, _, depth in elements)
            assert batch["counts"][d] == len(elements)
            assert batch["teacher_rows"][batch["teachers"][d]].tolist() == [b * length + a + 1 + d for b, a, _ in elements]
        assert torch.cat(batch["teachers"]).unique().tolist() == list(range(len(batch["teacher_rows"])))  # none is asked in vain
        # A cached target keeps the teacher's word on supervised tokens only.
        assert (batch["spans"].flatten()[batch["teacher_rows"]] >= 0).all()

    def test_published_counts(self) -> None:
        """A span of 102 tokens has 101 slots to draft its last 101 from; the rest is 0.7^d of them until the floor holds."""
        counts = tiny_batch(PEagle(), tiny_rows([["u" + "a" * 102]]))["counts"]
        assert counts.tolist() == [101, 70, 48, 33, 23, 19, 19, 18]

    def test_no_anchor_before_the_span_or_in_another_document(self) -> None:
        batch = tiny_batch(PEagle(num_depths=2, ratio=1.0), tiny_rows([["uuu", "aaaa", "uuaaaa"]]))
        # Documents begin at 0, 3 and 7. Slot 2 leads into an answer without a prompt; slot 7 reads the prompt's last token.
        assert drawn_of(batch) == [[[3, 4, 8, 9, 10], [3, 8, 9]]]

    def test_the_draw_follows_seed_epoch_and_row(self) -> None:
        rows = tiny_rows([["u" + "a" * 40], ["u" + "a" * 40]])
        collate = DraftCollator(PEagle(), seed=3)
        first, again = collate(rows), collate(rows)
        for name in ("anchors", "depths", "supervised", "teacher_rows"):
            assert torch.equal(first[name], again[name])
        assert drawn_of(collate(rows[1:])) == drawn_of(first)[1:]  # whatever shares its batch
        assert drawn_of(first)[0] != drawn_of(first)[1]
        collate.epoch = 1
        assert drawn_of(collate(rows)) != drawn_of(first)
        assert drawn_of(DraftCollator(PEagle(), seed=4)(rows)) != drawn_of(first)

    def test_draws_are_uniform(self) -> None:
        """Every eligible anchor as often as any other, over many rows."""
        row = tiny_rows([["u" + "a" * 12]])[0]
        batch = tiny_batch(PEagle(num_depths=2), [{**row, "row": i} for i in range(600)])
        times = torch.bincount(torch.tensor([a for _, a, _ in elements_of(batch)[1]]), minlength=10)
        assert times.sum() == 600 * 7
        assert times.float().sub(420).abs().max() < 5 * (600 * 0.7 * 0.3) ** 0.5


class TestMask:
    @staticmethod
    def spelt_out(batch: dict[str, Any]) -> Tensor:
        """[B, E, E], by a loop over pairs."""
        anchors, depths = batch["anchors"].tolist(), batch["depths"].tolist()
        rows, count = batch["anchors"].shape
        seen = torch.zeros(rows, count, count, dtype=torch.bool)
        for b in range(rows):
            document = [int(batch["documents"][b, a]) for a in anchors[b]]
            for q in range(count):
                for k in range(count):
                    (aq, dq), (ak, dk) = ((anchors[b][i], depths[b][i]) for i in (q, k))
                    seen[b, q, k] = document[q] == document[k] and ((dk == 0 and aq >= ak) or (aq == ak and dq >= dk))
        return seen

    @pytest.mark.parametrize("length", [None, 31])
    def test_equals_a_loop(self, length: int | None) -> None:
        batch = tiny_batch(PEagle(num_depths=DEPTHS), packed_rows(length=length))
        expected = self.spelt_out(batch)
        sees = sees_earlier(batch["anchors"], batch["depths"], batch["documents"])
        index = torch.arange(expected.shape[1])
        found = sees(torch.arange(2)[:, None, None], torch.zeros(1).long(), index[:, None], index)
        assert torch.equal(found, expected)
        assert found.diagonal(dim1=1, dim2=2).all()  # no query without a key
        padding = batch["depths"] == DEPTHS
        assert padding.any()
        assert not found.masked_select(~padding[:, :, None] & padding[:, None, :]).any()

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize(("backend", "rows"), [("auto", True), ("auto", False), ("flex", True)])
    def test_attention_over_it(self, backend: Any, rows: bool) -> None:
        """131 and more elements: beyond a block of FlexAttention, and no multiple of one."""
        torch.manual_seed(0)
        batch = tiny_batch(PEagle(), tiny_rows([["uu" + "a" * 50, "uaaa"], ["u" + "a" * 20]], 61))
        count = batch["anchors"].shape[1]
        assert count > 128
        assert count % 128
        rows_BQ = batch["supervised"] if rows else torch.arange(count).expand(2, -1)
        q, k, v = torch.randn(2, 4, rows_BQ.shape[1], 8), torch.randn(2, 2, count, 8), torch.randn(2, 2, count, 8)
        sees = sees_earlier(batch["anchors"], batch["depths"], batch["documents"])
        out = Masked(sees, batch["supervised"] if rows else None, backend).attend(q, [k], [v], 0.3)
        mask_B1QK = self.spelt_out(batch).gather(1, rows_BQ[:, :, None].expand(-1, -1, count))[:, None]
        wide_k, wide_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        assert_close(out, unrolled_eager(q, [wide_k], [wide_v], mask_B1QK, 0.3), rtol=1e-4, atol=1e-5)


class TestTrainingIsServing:
    @pytest.mark.parametrize("stride", [1, 3])
    @pytest.mark.parametrize(("layers", "options"), [(1, {}), (2, {"fc_norm": True, "draft_vocab_size": 30}), (3, {"qk_norm": True})])
    def test_drafter_equals_training_at_every_depth(self, layers: int, options: dict[str, Any], stride: int) -> None:
        """Packed and padded training against a drafter that walks each document, accepting `stride` tokens at a time."""
        draft = draft_of(layers, ratio=1.0, **options).eval()
        rows = tiny_rows([["uuaaaaaaaaaauaaaaaaa", "uaaaaaaaaa"], ["aaaaaaaaauubb"]])
        batch = tiny_batch(draft.algorithm, rows)
        aux_BSA = tiny_signal(MODEL, draft, batch).aux_BSA
        with torch.no_grad():
            logits_NW = draft.compute_logits(draft.algorithm.states(draft, batch, aux_BSA).flatten(0, 1))[torch.cat(batch["queries"])]
        trained = dict(zip(flat(elements_of(batch)), logits_NW, strict=True))
        assert sorted(trained) == sorted((b, a, d) for b, row in enumerate(rows) for d in range(DEPTHS) for a in reachable(row, d))
        compared, limit = dict.fromkeys(range(DEPTHS), 0), 0
        for b, number in ((0, 0), (0, 1), (1, 0)):
            own = batch["documents"][b] == number
            known = start = int(own.nonzero()[0])
            drafter = draft.algorithm.drafter(draft)
            for a in [a for a in drawn_of(batch)[b][0] if own[a]][::stride]:
                limit = limit % (DEPTHS + 2) + 1
                seen: list[Tensor] = []
                ids, fresh = batch["input_ids"][b, start : a + 2], aux_BSA[b : b + 1, known : a + 1]
                with torch.no_grad():
                    tokens, _ = drafter.propose(ids, fresh, limit, lambda z, so_far, seen=seen: (seen.append(z), None))
                known = a + 1
                assert len(tokens) == len(seen) == min(limit, DEPTHS)  # never deeper than trained
                assert len(drafter.cache) == known - start + len(seen) - 1
                for d, logits_W in enumerate(seen):
                    if (b, a, d) in trained:
                        assert_close(logits_W, trained[b, a, d], rtol=1e-3, atol=1e-4)
                        compared[d] += 1
        assert all(n >= 2 for n in compared.values())

    def test_a_whole_chain_is_one_forward(self) -> None:
        draft = draft_of().eval()
        positions: list[list[int]] = []
        draft.layers.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[3].positions[0].tolist()))
        stats = DraftingStats()
        generate(MODEL, draft, torch.tensor([[5, 6, 7]]), num_draft_tokens=DEPTHS, max_new_tokens=12, do_sample=False, stats=stats)
        assert len(positions) == stats.drafted[0]
        assert positions[0] == list(range(3 + DEPTHS - 1))  # the prompt, and all but the first drafted token

    def test_it_stops_where_nothing_may_follow(self) -> None:
        draft = draft_of().eval()
        drafter = draft.algorithm.drafter(draft)
        aux = torch.randn(1, 2, 96)
        choose = lambda z, so_far: (7, z) if len(so_far) < 2 else None  # noqa: E731
        tokens, scores = drafter.propose(torch.tensor([1, 2, 3]), aux, 4, choose)
        assert (tokens, len(scores)) == ([7, 7], 2)


class TestNothingLeaks:
    """Which inputs an element depends on: its own document, features up to its anchor, tokens up to one more. Two layers."""

    @pytest.fixture(scope="class")
    @staticmethod
    def case() -> tuple[Any, dict[str, Any], Tensor, list[tuple[int, int, int]], Tensor]:
        draft = draft_of(2)
        batch = tiny_batch(draft.algorithm, packed_rows(length=26))
        aux_BSA = tiny_signal(MODEL, draft, batch).aux_BSA
        return draft, batch, aux_BSA, flat(elements_of(batch)), torch.cat(batch["queries"])

    def changed(self, case: Any, ids_BS: Tensor, aux_BSA: Tensor) -> list[tuple[int, int, int]]:
        draft, batch, known_aux_BSA, elements, queries = case
        with torch.no_grad():
            before = draft.algorithm.states(draft, batch, known_aux_BSA).flatten(0, 1)[queries]
            after = draft.algorithm.states(draft, {**batch, "input_ids": ids_BS}, aux_BSA).flatten(0, 1)[queries]
        difference = (after - before).abs().amax(-1)
        assert ((difference < 1e-5) | (difference > 1e-4)).all()
        return [e for e, d in zip(elements, difference.tolist(), strict=True) if d > 1e-4]

    @pytest.mark.parametrize("what", ["tokens", "features"])
    def test_perturbed_inputs(self, case: Any, what: str) -> None:
        _, batch, aux_BSA, elements, _ = case
        depths = {d for _, _, d in elements}
        assert depths == set(range(DEPTHS))
        for b in range(2):
            for at in range(26):
                ids_BS, features_BSA = batch["input_ids"].clone(), aux_BSA.clone()
                if what == "tokens":
                    ids_BS[b, at] = (ids_BS[b, at] + 17) % 49
                else:
                    features_BSA[b, at] += 5 * torch.randn(features_BSA.shape[-1], generator=Generator().manual_seed(at))
                documents = batch["documents"][b]
                starts = at == 0 or documents[at] != documents[at - 1]
                if what == "tokens" and starts:  # the slot before it is the previous document's: nothing reads x_0
                    expected = []
                else:
                    reach = at - 1 if what == "tokens" else at
                    expected = [e for e in elements if e[0] == b and e[1] >= reach and documents[e[1]] == documents[at]]
                assert self.changed(case, ids_BS, features_BSA) == expected

    def test_gradients(self, case: Any) -> None:
        draft, batch, aux_BSA, elements, queries = case
        aux_BSA = aux_BSA.clone().requires_grad_()
        states_ND = draft.algorithm.states(draft, batch, aux_BSA).flatten(0, 1)[queries]
        index = torch.arange(aux_BSA.shape[1])
        for state_D, (b, a, _) in zip(states_ND, elements, strict=True):
            (gradient,) = torch.autograd.grad(state_D.sum(), aux_BSA, retain_graph=True)
            expected = torch.zeros(aux_BSA.shape[:2], dtype=torch.bool)
            expected[b] = (index <= a) & (batch["documents"][b] == batch["documents"][b, a])
            assert torch.equal(gradient.abs().amax(-1) > 0, expected)

    def test_separate_documents_with_the_same_anchors(self) -> None:
        """A row each, ragged no more, gives the loss, metrics and gradients of the packed rows."""
        draft = draft_of(2, draft_vocab_size=30)
        packed = tiny_batch(draft.algorithm, packed_rows(length=37))
        order = [(b, number, i) for b, row in enumerate(PACKED) for number, i in enumerate(row)]
        apart = tiny_batch(draft.algorithm, packed_rows([[i] for _, _, i in order]))
        drawn = []
        for b, number, _ in order:
            own = packed["documents"][b] == number
            first = int(own.nonzero()[0])
            drawn.append([torch.tensor([a - first for a in depth if own[a]]).long() for depth in drawn_of(packed)[b]])
        apart.update(draft.algorithm.arrange(apart, drawn))
        assert torch.equal(apart["counts"], packed["counts"])
        results = []
        for batch in (packed, apart):
            out = draft(batch, tiny_signal(MODEL, draft, batch), batch["counts"])
            out["loss"].backward()
            results.append((out["loss"].detach(), out["metrics"], gradients(draft)))
        assert results[0][0] > 0
        assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


class TestLoss:
    def test_against_plain_torch(self) -> None:
        """The mean over all drawn elements of CE(target ‖ draft), by the target on each document alone; and the metrics."""
        draft = draft_of(1, draft_vocab_size=30)
        batch = tiny_batch(draft.algorithm, packed_rows())
        signal = tiny_signal(MODEL, draft, batch)
        out = draft(batch, signal, batch["counts"])
        states_ND = draft.algorithm.states(draft, batch, signal.aux_BSA).flatten(0, 1)
        total, correct, missed = torch.zeros(()), torch.zeros(DEPTHS), 0
        for d, (query, elements) in enumerate(zip(batch["queries"], elements_of(batch), strict=True)):
            for logits_W, (b, a, _) in zip(draft.compute_logits(states_ND[query]), elements, strict=True):
                start = int((batch["documents"][b] == batch["documents"][b, a]).nonzero()[0])
                teacher_V = MODEL(batch["input_ids"][None, b, start : a + 2 + d]).logits[0, -1]
                correct[d] += draft.draft_ids[logits_W.argmax()] == teacher_V.argmax()
                if teacher_V.argmax() not in draft.draft_ids:
                    missed += 1
                    continue
                total = total - (teacher_V[draft.draft_ids].softmax(-1) * logits_W.log_softmax(-1)).sum()
        assert missed > 0
        assert_close(out["loss"], total / batch["counts"].sum(), rtol=1e-4, atol=1e-5)
        assert_close(out["metrics"]["count"], batch["counts"].float())
        assert_close(out["metrics"]["correct"], correct)

    @pytest.mark.parametrize("layers", [1, 2])
    def test_every_trainable_parameter_gets_a_gradient(self, layers: int) -> None:
        draft = draft_of(layers, fc_norm=True, qk_norm=True, draft_vocab_size=30)
        batch = tiny_batch(draft.algorithm, packed_rows())
        draft(batch, tiny_signal(MODEL, draft, batch), batch["counts"])["loss"].backward()
        found = gradients(draft)
        assert "mask_hidden" in found
        assert not [name for name, g in found.items() if not g.abs().sum() > 0]

    def test_batches_divide_by_the_counts_of_all(self) -> None:
        draft = draft_of(2)
        rows = packed_rows()
        together = tiny_batch(draft.algorithm, rows)
        results = []
        for batches in ([together], [tiny_batch(draft.algorithm, [row]) for row in rows]):
            loss = torch.zeros(())
            for batch in batches:
                part = draft(batch, tiny_signal(MODEL, draft, batch), together["counts"])["loss"]
                part.backward()
                loss = loss + part.detach()
            results.append((loss, gradients(draft)))
        assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)

    def test_nothing_supervised(self) -> None:
        """Zero, with a gradient for every parameter, as collectives need."""
        draft = draft_of(2)
        batch = tiny_batch(draft.algorithm, tiny_rows([["uuuuu"], ["uauua"]]))
        assert batch["supervised"].shape == (2, 1)
        out = draft(batch, tiny_signal(MODEL, draft, batch), batch["counts"])
        out["loss"].backward()
        assert out["loss"] == 0
        assert out["metrics"]["count"].tolist() == [0] * DEPTHS
        assert all(g.eq(0).all() for g in gradients(draft).values())

    def test_half_precision(self) -> None:
        draft = draft_of(2)
        batch = tiny_batch(draft.algorithm, packed_rows())
        signal = tiny_signal(MODEL, draft, batch)
        expected = draft(batch, signal, batch["counts"])["loss"]
        with torch.autocast("cpu", torch.bfloat16):
            autocast = draft(batch, signal, batch["counts"])["loss"]
        half = draft.to(torch.bfloat16)(batch, signal, batch["counts"])["loss"]
        for loss in (autocast, half):
            loss.backward()
            assert_close(loss.float(), expected, rtol=3e-2, atol=3e-2)


class TestFile:
    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        draft = draft_of(2, draft_vocab_size=30)
        path = save_draft(draft, tmp_path / "draft")
        loaded = auto_draft(path)
        for name, value in draft.state_dict().items():
            assert torch.equal(value, loaded.state_dict()[name]), name
        assert loaded.mask_hidden.shape == (1, 1, 3 * 32)
        assert loaded.algorithm.options == draft.algorithm.options
        batch = tiny_batch(draft.algorithm, packed_rows())
        aux_BSA = tiny_signal(MODEL, draft, batch).aux_BSA
        ours, theirs = (d.algorithm.states(d, batch, aux_BSA) for d in (draft.eval(), loaded))
        assert_close(theirs, ours, rtol=1e-5, atol=1e-4)

    def test_what_engines_read(self, tmp_path: Path) -> None:
        draft = draft_of(2, mask_token_id=31)
        fields = json.loads((save_draft(draft, tmp_path / "draft") / "config.json").read_text())
        expected = {"mask_token_id": 31, "ptd_token_id": 31, "pard_token": 31, "num_aux_hidden_states": 3, "num_hidden_layers": 2}
        assert expected.items() <= fields.items()
        assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
        assert fields["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]

    def test_the_mask_token_follows_the_rows(self) -> None:
        rows = tiny_rows([[Document([1, 2, 49, 48], "uaaa")]])
        draft = draft_of(1)
        assert draft.config.mask_token_id == 49
        draft.start_from(MODEL, rows)
        assert (draft.config.mask_token_id, draft.config.ptd_token_id, draft.config.pard_token) == (47, 47, 47)
        with pytest.raises(ForedraftError, match="mask_token_id=48 occurs"):
            draft_of(1, mask_token_id=48).start_from(MODEL, rows)

    def test_the_published_shape_is_the_default(self) -> None:
        config = auto_draft(MODEL.config, "peagle").config
        assert (config.num_hidden_layers, config.spec.num_aux, config.spec.mask_token) == (4, 3, True)


def plain(target: Any, ids: Tensor, **kwargs: Any) -> list[int]:
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, **kwargs})[0].tolist()


def drafted(target: Any, draft: Any, ids: Tensor, **kwargs: Any) -> list[int]:
    return generate(target, draft, ids, **{"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, **kwargs})[0].tolist()


PREDICTABLE = predictable_target()
PREDICTABLE.generation_config.eos_token_id = None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training on cached hidden states that succeeds."""
    directory = tmp_path_factory.mktemp("run")
    draft = tiny_draft(PREDICTABLE, "peagle", num_layers=2, num_depths=3)
    target = CachedTarget(PREDICTABLE, draft.config.aux_layers, directory / "cache")
    trainer = trainer_of(draft, target, directory, written_rows(PREDICTABLE, 8, 20), max_steps=40)
    before = draft.mask_hidden.detach().clone()
    trainer.train()
    draft.eval()
    return trainer, before


class TestTraining:
    def test_it_learns(self, run: Any) -> None:
        trainer, before = run
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert logs[-1]["loss"] < 0.4 * logs[0]["loss"]
        for d in (1, 2, 3):
            assert logs[-1][f"accuracy_{d}"] > 0.3 + logs[0][f"accuracy_{d}"]
        assert not torch.equal(trainer.model.mask_hidden, before)

    def test_accumulation_equals_one_large_batch(self, tmp_path: Path) -> None:
        """Rows with few, many and no supervised slots: means of micro-batches would weigh them equally."""
        rows = tiny_rows([["uuaaaaaaaaaaaa"], ["uaaa"], ["uuuuuu"], ["uaauaaaauaaaaaaa"]])
        fields = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
        trainers = []
        for name, size in (("together", 4), ("apart", 1)):
            draft = tiny_draft(PREDICTABLE, "peagle", num_layers=2, num_depths=3)
            sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
            trainers.append(trainer_of(draft, PREDICTABLE, tmp_path / name, rows, **sizes, **fields))
            trainers[-1].train()
        together, apart = (dict(t.model.named_parameters()) for t in trainers)
        assert_close(apart, together, rtol=1e-4, atol=1e-5)
        losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in trainers]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        assert losses[0][0] != losses[0][-1]

    def test_a_cached_target_serves_every_epochs_draw(self, tmp_path: Path) -> None:
        draft = draft_of(1)
        cached, fresh = CachedTarget(MODEL, draft.config.aux_layers, tmp_path), Target(MODEL, draft.config.aux_layers)
        collate = DraftCollator(draft.algorithm)
        rows = tiny_rows([["u" + "a" * 20], ["uaaaaaauubbbbbb"]])
        asked = []
        for collate.epoch in range(3):
            batch = collate(rows)
            ours, theirs = cached.capture(batch), fresh.capture(batch)
            assert torch.equal(ours.top_R, theirs.top_R)
            assert_close((ours.aux_BSA, ours.hidden_BST, ours.logsumexp_R), (theirs.aux_BSA, theirs.hidden_BST, theirs.logsumexp_R))
            asked.append(drawn_of(batch))
        assert asked[0] != asked[1]
        assert len(list(tmp_path.iterdir())) == 2


class TestDecoding:
    @pytest.mark.parametrize("k", [1, 2, 3, None])
    def test_greedy_is_the_targets_own(self, run: Any, k: int | None) -> None:
        """With drafts that are right, and wrong, at every length; by default all three tokens are drafted."""
        stats = DraftingStats()
        for i in range(4):
            ids = torch.tensor([[3 * i + 1, 30 + i]])
            expected = plain(PREDICTABLE, ids)
            for new in (1, 7, 20):
                ours = drafted(PREDICTABLE, run[0].model, ids, max_new_tokens=new, num_draft_tokens=k, stats=stats)
                assert ours == expected[: 2 + new]
        assert len(stats.accepted) == (k or 3)
        assert all(n > 0 for n in stats.accepted)

    @pytest.mark.parametrize("size", [None, 20, 1])
    def test_greedy_with_a_random_draft(self, size: int | None) -> None:
        draft = draft_of(2, draft_vocab_size=size).eval()
        torch.nn.init.normal_(draft.mask_hidden)
        for i in range(3):
            ids = torch.tensor([[7 + i, 8, 9]])
            assert drafted(MODEL, draft, ids) == plain(MODEL, ids)

    def test_samples_have_the_targets_distribution(self) -> None:
        """F(token) under the target's exact distribution after its own prefix is uniform, token for token."""
        torch.manual_seed(0)
        target = tiny_target(layers=2, vocab=12, hidden=16, initializer_range=0.2, eos_token_id=None)
        draft = tiny_draft(target, "peagle", aux_layers=(1,), num_aux=1, num_layers=1, num_depths=3, draft_vocab_size=8).eval()
        stats, values = DraftingStats(), []
        # Tokens that the draft can name stand last, so that a preference for them shows.
        order = torch.isin(torch.arange(12), draft.draft_ids).long().argsort(stable=True)
        for _ in range(12):
            kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "num_draft_tokens": 3, "stats": stats}
            ids = torch.tensor(drafted(target, draft, torch.tensor([[3, 4, 5]]), **kwargs))
            with torch.no_grad():
                p_LV = target(ids[None]).logits[0, 2:-1].softmax(-1)[:, order]
            at = (order == ids[3:, None]).long().argmax(-1, keepdim=True)
            values.append((p_LV.cumsum(-1).gather(1, at) - p_LV.gather(1, at) * torch.rand(len(at), 1)).flatten())
        counts = torch.histc(torch.cat(values), 12, 0, 1)
        assert counts.sum() == 480
        assert 0.2 < stats.acceptance[0] < 0.95
        assert stats.accepted[2] > 0
        assert ((counts - 40) ** 2 / 40).sum() < 31.3  # χ² on 11 degrees of freedom, p = 0.001

    def test_evaluate(self, run: Any) -> None:
        prompts = [[{"role": "user", "content": text}] for text in ("ho", "CJQbi")]
        found = evaluate(PREDICTABLE, run[0].model, letter_tokenizer(), prompts, num_draft_tokens=3, max_new_tokens=16)
        assert (found.identical, found.different) == (2, [])
        assert found.tau > 1.5
        assert len(found.acceptance) == 3
