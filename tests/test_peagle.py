"""P-EAGLE: what is drawn, who sees whom, that training is what serving does, and what a file holds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_supervision import packed, reachable
from tiny import (
    Document,
    backbone_calls,
    check_table,
    spelt_out,
    tiny_batch,
    tiny_document,
    tiny_draft,
    tiny_rows,
    tiny_signal,
    tiny_target,
)
from torch import Tensor
from torch.testing import assert_close

from foredraft import DraftCollator, ForedraftError, auto_draft, generate, save_draft
from foredraft.decoding import DraftingStats
from foredraft.draft.attention import Ranged
from foredraft.plugins.peagle import PEagle

MODEL = tiny_target()
DOCUMENTS = [tiny_document(letters, seed=i) for i, letters in enumerate(["uuuaaaaaauaaa", "uaaaaa", "aaaaauub", "uuaaaaabbbb", "uuu"])]
PACKED = [[0, 1, 4], [2, 3]]
DEPTHS = 4


def packed_rows(packed: Sequence[Sequence[int]] = PACKED, length: int | None = None) -> list[dict[str, Any]]:
    return tiny_rows([[DOCUMENTS[i] for i in row] for row in packed], length)


def draft_of(layers: int = 2, **options: Any) -> Any:
    return tiny_draft(MODEL, "peagle", **{"num_layers": layers, "num_depths": DEPTHS, **options})


def elements_of(batch: dict[str, Any]) -> list[list[tuple[int, int, int]]]:
    """Per depth, (row, anchor, depth) of every supervised element, in the order of `queries`."""
    width = batch["supervised"].shape[1]
    found = []
    for query in batch["queries"]:
        rows, columns = query // width, query % width
        at = batch["supervised"][rows, columns]
        found.append(list(zip(rows.tolist(), batch["anchors"][rows, at].tolist(), batch["depths"][rows, at].tolist(), strict=True)))
    return found


def drawn_of(batch: dict[str, Any]) -> list[list[list[int]]]:
    """The anchors by row and depth."""
    return [[[a for b, a, _ in depth if b == row] for depth in elements_of(batch)] for row in range(len(batch["input_ids"]))]


class TestPlan:
    @given(packed(), st.integers(1, 6), st.sampled_from([(0.7, 0.2), (1.0, 0.2), (0.3, 0.5), (0.5, 0.0)]), st.integers(0, 99))
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
            deeper = sorted((a, d) for d, anchors in enumerate(drawn) for a in anchors if d)
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
    def spelt_out(batch: dict[str, Any], depth_of_padding: int) -> Tensor:
        """[B, E, E], by a loop over pairs."""
        anchors, depths = batch["anchors"].tolist(), batch["depths"].tolist()
        rows, count = batch["anchors"].shape
        seen = torch.zeros(rows, count, count, dtype=torch.bool)
        for b in range(rows):
            document = [int(batch["documents"][b, a]) for a in anchors[b]]
            for q in range(count):
                for k in range(count):
                    (aq, dq), (ak, dk) = ((anchors[b][i], depths[b][i]) for i in (q, k))
                    earlier = document[q] == document[k] and ((dk == 0 and aq >= ak) or (aq == ak and dq >= dk))
                    seen[b, q, k] = q == k if depth_of_padding in (dq, dk) else earlier
        return seen

    @pytest.mark.parametrize("length", [None, 31])
    def test_equals_a_loop(self, length: int | None) -> None:
        batch = tiny_batch(PEagle(num_depths=DEPTHS), packed_rows(length=length))
        expected = self.spelt_out(batch, DEPTHS)
        found = Ranged(batch["ranges"]).visible(2, expected.shape[1], [expected.shape[1]])
        assert torch.equal(found, expected)
        assert found.diagonal(dim1=1, dim2=2).all()  # no query without a key
        padding = batch["depths"] == DEPTHS
        assert padding.any()
        assert not found.masked_select(~padding[:, :, None] & padding[:, None, :]).any()

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize(("kernel", "rows"), [("auto", True), ("auto", False), ("flex", True), ("flex", False)])
    def test_attention_over_it(self, kernel: str, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """131 and more elements: beyond a block of FlexAttention, and no multiple of one."""
        torch.manual_seed(0)
        batch = tiny_batch(PEagle(), tiny_rows([["uu" + "a" * 50, "uaaa"], ["u" + "a" * 20]], 61))
        count = batch["anchors"].shape[1]
        assert count > 128
        assert count % 128
        rows_BQ = batch["supervised"] if rows else torch.arange(count).expand(2, -1)
        q, k, v = torch.randn(2, 4, rows_BQ.shape[1], 8), torch.randn(2, 2, count, 8), torch.randn(2, 2, count, 8)
        monkeypatch.setattr("foredraft.draft.attention.kernels._missing", lambda name, *_: [] if name in (kernel, "dense") else ["CUDA"])
        out = Ranged(batch["ranges"], kernel).attend(q, [k], [v], 0.3, batch["supervised"] if rows else None)
        mask_BQK = self.spelt_out(batch, 8).gather(1, rows_BQ[:, :, None].expand(-1, -1, count))
        assert_close(out, spelt_out(q, k, v, mask_BQK, 0.3), rtol=1e-4, atol=1e-5)
        check_table(batch["ranges"]["queries" if rows else "every"], mask_BQK)


class TestTrainingIsServing:
    def test_a_whole_chain_is_one_forward(self) -> None:
        draft = draft_of().eval()
        calls = backbone_calls(draft)
        stats = DraftingStats()
        generate(MODEL, draft, torch.tensor([[5, 6, 7]]), num_draft_tokens=DEPTHS, max_new_tokens=12, do_sample=False, stats=stats)
        assert len(calls) == stats.drafted[0]
        assert calls[0][2].positions[0].tolist() == list(range(3 + DEPTHS - 1))  # the prompt, and all but the first drafted token

    def test_it_stops_where_nothing_may_follow(self) -> None:
        draft = draft_of().eval()
        drafter = draft.algorithm.drafter(draft)
        aux = torch.randn(1, 2, 96)
        choose = lambda z, so_far: (7, z) if len(so_far) < 2 else None  # noqa: E731
        tokens, scores = drafter.propose(torch.tensor([1, 2, 3]), aux, 4, choose)
        assert (tokens, len(scores)) == ([7, 7], 2)


class TestLoss:
    def test_against_plain_torch(self) -> None:
        """The mean over all drawn elements of CE(target ‖ draft), by the target on each document alone; and the metrics."""
        draft = draft_of(1, draft_vocab_size=30)
        batch = tiny_batch(draft.algorithm, packed_rows())
        signal = tiny_signal(MODEL, draft, batch)
        out = draft(batch, signal)
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


class TestFile:
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
