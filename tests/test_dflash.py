"""DFlash: what is drawn, who sees whom, that training is what serving does, the weights of slots, and what a file holds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigged import predictable_target, trainer_of, written_rows
from safetensors import safe_open
from tiny import (
    backbone_calls,
    check_table,
    gradients,
    spelt_out,
    tiny_batch,
    tiny_document,
    tiny_draft,
    tiny_rows,
    tiny_signal,
    tiny_target,
)
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft import DraftCollator, ForedraftError, auto_draft, generate, save_draft
from foredraft.decoding import BlockDrafter, DraftingStats
from foredraft.draft.attention import Ranged
from foredraft.draft.blocks import drafting_slots
from foredraft.plugins.dflash import DFlash, dpace_weights
from foredraft.testing import AlgorithmTests

MODEL = tiny_target()
BLOCK = 4
ROWS = tiny_rows([["uuuaaaaaauaaa", "uaaaaa", "uuu"], ["aaaaauub", "uuaaaaabbbb"]], 26, high=49)


def draft_of(layers: int = 2, model: Any = MODEL, **options: Any) -> Any:
    return tiny_draft(model, "dflash", **{"num_layers": layers, "num_aux": 3, "block_size": BLOCK, **options})


def slots_of(batch: dict[str, Any], steps: int = BLOCK - 1) -> list[list[tuple[int, int, int]]]:
    """Per drafted position, (row, anchor, j) of every trained slot, in the order of `queries`."""
    width = batch["anchors"].shape[1]
    return [[(b, int(batch["anchors"][b, m]), k + 1) for b, m, k in _unravel(q, width, steps)] for q in batch["queries"]]


def _unravel(query: Tensor, width: int, steps: int) -> list[tuple[int, int, int]]:
    return [(q // steps // width, q // steps % width, q % steps) for q in query.tolist()]


def flat(nested: list[list[Any]]) -> list[Any]:
    return [item for inner in nested for item in inner]


class TestConformance(AlgorithmTests):
    """What depends on the loss, under D-PACE, with a block that is longer than some spans; tests/test_conformance.py has the default."""

    test_greedy_is_lossless = test_sampling_is_lossless = test_save_and_load = test_on_disk = None  # type: ignore[assignment]

    @pytest.fixture
    def algorithm(self) -> type[DFlash]:
        return DFlash

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"block_size": BLOCK, "num_layers": 2, "num_aux": 3, "weighting": "dpace"}


class TestPlan:
    @given(
        st.lists(st.lists(st.text("uab", min_size=1, max_size=12), min_size=1, max_size=3), min_size=1, max_size=3),
        st.integers(2, 6),
        st.sampled_from([1, 3, 512]),
    )
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_equals_the_definition(self, documents: list[list[str]], block_size: int, anchors: int) -> None:
        rows = tiny_rows(documents)
        batch = tiny_batch(DFlash(block_size=block_size, anchors=anchors), rows)
        length, slots = len(rows[0]["input_ids"]), slots_of(batch, block_size - 1)
        for b, row in enumerate(rows):
            spans = [s if s >= 0 else -1 - i for i, s in enumerate(row["spans"])]  # what is no span is a span of its own
            eligible = [a for a in range(length - 1) if spans[a] == spans[a + 1]]
            drawn = [a for r, a, _ in slots[0] if r == b]
            assert drawn == sorted(set(drawn))
            assert set(drawn) <= set(eligible)
            assert len(drawn) == min(anchors, len(eligible))
            for k, found in enumerate(slots):
                reached = [a for a in drawn if len(set(spans[a : a + 2 + k])) == 1 and a + 1 + k < length]
                assert [(a, j) for r, a, j in found if r == b] == [(a, k + 1) for a in reached]
        for k, found in enumerate(slots):
            assert batch["labels"][k].tolist() == [b * length + a + j for b, a, j in found]
            assert batch["counts"][k] == len(found)
        assert len(batch["teacher_rows"]) == 0

    def test_a_block_ends_with_its_span(self) -> None:
        """Spans at 2..4 and 6..7, then a document that begins with one (8..9): no block reaches over any border."""
        batch = tiny_batch(DFlash(block_size=BLOCK), tiny_rows([["uuaaaubb", "aau"]]))
        assert slots_of(batch) == [[(0, 2, 1), (0, 3, 1), (0, 6, 1), (0, 8, 1)], [(0, 2, 2)], []]

    def test_the_draw_follows_seed_epoch_and_row(self) -> None:
        rows = tiny_rows([["u" + "a" * 40], ["u" + "a" * 40]])
        collate = DraftCollator(DFlash(anchors=10), seed=3)
        first = collate(rows)["anchors"]
        assert torch.equal(collate(rows)["anchors"], first)
        assert torch.equal(collate(rows[1:])["anchors"], first[1:])  # whatever shares its batch
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(DraftCollator(DFlash(anchors=10), seed=4)(rows)["anchors"], first)
        collate.epoch = 1
        assert not torch.equal(collate(rows)["anchors"], first)

    def test_draws_are_uniform(self) -> None:
        row = tiny_rows([["u" + "a" * 13]])[0]
        batch = tiny_batch(DFlash(anchors=6), [{**row, "row": i} for i in range(600)])
        times = torch.bincount(batch["anchors"].flatten(), minlength=13)[1:13]
        assert times.sum() == 600 * 6
        assert times.sub(300).abs().max() < 5 * (600 * 0.5 * 0.5) ** 0.5


class TestMask:
    @staticmethod
    def spelt_out(batch: dict[str, Any], size: int) -> Tensor:
        """[B, Q, S + Q] by a loop: the context before the anchor in its document, and the own block."""
        length, (rows, blocks) = batch["input_ids"].shape[1], batch["anchors"].shape
        seen = torch.zeros(rows, blocks * size, length + blocks * size, dtype=torch.bool)
        for b in range(rows):
            for q in range(blocks * size):
                anchor = int(batch["anchors"][b, q // size])
                for t in range(anchor):
                    seen[b, q, t] = bool(batch["documents"][b, t] == batch["documents"][b, anchor])
                for other in range(blocks * size):
                    seen[b, q, length + other] = other // size == q // size
        return seen

    def test_equals_a_loop(self) -> None:
        batch = tiny_batch(DFlash(block_size=BLOCK), [*ROWS, *tiny_rows([["uuu"]], 26)])
        expected = self.spelt_out(batch, BLOCK)
        found = Ranged(batch["ranges"]).visible(3, expected.shape[1], [expected.shape[2]])
        assert torch.equal(found, expected)
        assert (batch["anchors"][2] == 0).all()  # a row without blocks: padding, which sees itself and nothing else
        assert (found[2].sum(-1) == BLOCK).all()

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize("kernel", ["auto", "flex"])
    @pytest.mark.parametrize("last", [True, False])
    def test_attention_over_it(self, kernel: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond a block of FlexAttention, and no multiple of one; queries are a part of the inputs."""
        torch.manual_seed(0)
        batch = tiny_batch(DFlash(block_size=5), tiny_rows([["uu" + "a" * 30, "uaaa"], ["u" + "a" * 20]], 41))
        mask_BQK = self.spelt_out(batch, 5)
        queries, keys = mask_BQK.shape[1:]
        assert queries > 128
        assert queries % 128
        rows_BQ = drafting_slots(batch["anchors"], 41, 5, 0) if last else None
        mask_BQK = mask_BQK[:, drafting_slots(batch["anchors"], 0, 5, 0)[0]] if last else mask_BQK
        q, k, v = torch.randn(2, 4, mask_BQK.shape[1], 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
        monkeypatch.setattr("foredraft.draft.attention.kernels._missing", lambda name, *_: [] if name in (kernel, "dense") else ["CUDA"])
        out = Ranged(batch["ranges"], kernel).attend(q, [k], [v], 0.3, rows_BQ)
        assert_close(out, spelt_out(q, k, v, mask_BQK, 0.3), rtol=1e-4, atol=1e-5)
        check_table(batch["ranges"]["queries" if last else "every"], mask_BQK)


class TestLoss:
    @pytest.mark.parametrize(("weighting", "gamma"), [("decay", None), ("decay", 0.7), ("dpace", None)])
    def test_against_plain_torch(self, weighting: Any, gamma: float | None) -> None:
        """Σ w CE over Σ w (decay) or over the number of blocks (D-PACE), a block at a time; weights carry no gradient."""
        draft = draft_of(2, weighting=weighting, gamma=gamma, dpace_alpha=0.3)
        with torch.no_grad():  # make it right now and then: confidences from small to large
            draft.lm_head.weight.mul_(3)
        batch = tiny_batch(draft.algorithm, ROWS)
        signal = tiny_signal(MODEL, draft, batch)
        out = draft(batch, signal)
        out["loss"].backward()
        found = gradients(draft)
        logits_BMKW = draft.compute_logits(draft.algorithm.states(draft, batch, signal.aux_BSA)).unflatten(1, (-1, BLOCK - 1))
        trained, total, mass, blocks = set(flat(slots_of(batch))), torch.zeros(()), 0.0, 0
        for b in range(2):
            for m, a in enumerate(batch["anchors"][b].tolist()):
                reach = [j for j in range(1, BLOCK) if (b, a, j) in trained]
                blocks += bool(reach)
                ce = [F.cross_entropy(logits_BMKW[b, m, j - 1], batch["input_ids"][b, a + j]) for j in reach]
                smoothed = [0.7 * math.exp(-float(c.detach())) + 0.3 for c in ce]
                for j, c in zip(reach, ce, strict=True):
                    w = math.exp(-(j - 1) / (gamma or BLOCK / 2))
                    if weighting == "dpace":
                        w = sum(math.prod(smoothed[:i]) for i in range(j, len(reach) + 1))
                    total, mass = total + w * c, mass + w
        expected = total / (blocks if weighting == "dpace" else mass)
        assert_close(out["loss"], expected, rtol=1e-4, atol=1e-5)
        expected.backward()
        assert_close(found, gradients(draft), rtol=1e-3, atol=1e-5)
        assert all(bool(g.abs().sum() > 0) for g in found.values())

    def test_published_decay(self) -> None:
        assert {size: DFlash(block_size=size).gamma for size in (8, 10, 16)} == {8: 4.0, 10: 5.0, 16: 7.0}
        assert DFlash(block_size=8, gamma=3.0).gamma == 3.0

    def test_dpace_is_the_gradient_of_the_accepted_length(self) -> None:
        """Without smoothing: w_j = ∂ Σ_m Π_{i≤m} q_i / ∂ log q_j."""
        log_q = torch.rand(3, 5).log().requires_grad_()
        log_q.exp().cumprod(-1).sum().backward()
        assert_close(dpace_weights(log_q.detach().exp()), log_q.grad)

    def test_dpace_where_the_draft_is_hopeless(self) -> None:
        """A confidence that underflows is still a trained slot: it weighs α and what follows it counts."""
        draft = draft_of(1, weighting="dpace")
        draft.lm_head.weight.data.mul_(1e4)
        batch = tiny_batch(draft.algorithm, tiny_rows([["uaaaa"]], high=49))
        out = draft(batch, tiny_signal(MODEL, draft, batch))
        assert (out["metrics"]["cross_entropy"] > 500).all()
        weights = torch.tensor([0.5 + 0.25 + 0.125, 0.25 + 0.125, 0.125, 0.5 + 0.25, 0.25, 0.5])
        states_ND = draft.algorithm.states(draft, batch, tiny_signal(MODEL, draft, batch).aux_BSA)[0]
        logits_MKW = draft.compute_logits(states_ND).view(3, 3, -1)
        labels = batch["input_ids"][0]
        ce = [F.cross_entropy(logits_MKW[a - 1, j - 1], labels[a + j]) for a in (1, 2, 3) for j in range(1, 5 - a)]
        assert_close(out["loss"], (weights * torch.stack(ce)).sum() / 3, rtol=1e-4, atol=1e-4)


class TestOnDisk:
    def test_what_the_file_holds(self, tmp_path: Path) -> None:
        draft = draft_of(2, mask_token_id=48)
        save_draft(draft, tmp_path / "draft")
        with safe_open(tmp_path / "draft/model.safetensors", "pt") as file:
            names = set(file.keys())
        assert names == set(draft.state_dict()) - {"embed_tokens.weight", "lm_head.weight"}
        assert "layers.1.hidden_norm.weight" not in names  # EAGLE's
        config = json.loads((tmp_path / "draft/config.json").read_text())
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["model_type"] == "qwen3"
        assert config["dflash_config"] == {"mask_token_id": 48, "target_layer_ids": [1, 3, 5]}
        assert (config["block_size"], config["num_hidden_layers"], config["eagle_aux_hidden_state_layer_ids"]) == (4, 2, [2, 4, 6])

    def test_the_mask_token_and_chosen_layers_reach_the_engines_fields(self) -> None:
        draft = auto_draft(MODEL.config, "dflash", aux_layers=(1, 5, 7), num_layers=1, num_aux=3)
        draft.start_from(MODEL, ROWS)
        used = {i for row in ROWS for i in row["input_ids"]}
        assert draft.config.mask_token_id == max(set(range(50)) - used)
        assert draft.config.dflash_config == {"mask_token_id": draft.config.mask_token_id, "target_layer_ids": [0, 4, 6]}

    def test_a_loaded_draft_needs_its_targets_head(self, tmp_path: Path) -> None:
        draft = draft_of()
        loaded = auto_draft(save_draft(draft, tmp_path / "draft"))
        batch = tiny_batch(draft.algorithm, ROWS)
        with pytest.raises(ForedraftError, match=r"call draft.take_head\(target\)"):
            loaded(batch, tiny_signal(MODEL, draft, batch))
        loaded.take_head(MODEL)
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in draft.state_dict().items())
        assert [n for n, p in loaded.named_parameters() if not p.requires_grad] == ["embed_tokens.weight", "lm_head.weight"]

    def test_no_vocabulary_of_its_own(self) -> None:
        with pytest.raises(ForedraftError, match="uses its target's own head"):
            auto_draft(MODEL.config, "dflash", draft_vocab_size=20, num_layers=1)

    def test_published_layers(self) -> None:
        """As 0-based layer outputs: the published drafts read [1, 9, 17, 25, 33] of 36 layers, and 18 alone."""
        assert [i - 1 for i in DFlash().aux_layers(36)] == [1, 9, 17, 25, 33]
        assert [i - 1 for i in DFlash(num_layers=1).aux_layers(36)] == [18]
        assert DFlash(num_layers=2, num_aux=5).aux_layers(36) == DFlash().aux_layers(36)
        assert DFlash(num_layers=2).spec.num_aux == 2


class TestTraining:
    TARGET = predictable_target()
    RUN = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 3e-3}  # noqa: RUF012
    LONG = {"max_steps": 30, "per_device_train_batch_size": 17}  # noqa: RUF012

    @pytest.fixture(scope="class")
    @staticmethod
    def rows() -> list[dict[str, Any]]:
        return written_rows(TestTraining.TARGET)

    def draft(self, **options: Any) -> Any:
        return draft_of(2, self.TARGET, **options)

    def train(self, rows: Any, directory: Path, draft: Any = None, target: Any = None, resume: bool = False, **fields: Any) -> Any:
        trainer = trainer_of(draft or self.draft(), target or self.TARGET, directory, rows, **{**self.RUN, **fields})
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def test_resumed_equals_uninterrupted(self, rows: Any, tmp_path: Path) -> None:
        """Bit for bit, embedding and head included, which are in no checkpoint; from another random start."""
        whole = self.train(rows, tmp_path / "whole").model.state_dict()
        self.train(rows, tmp_path / "cut", max_steps=3, save_strategy="steps", save_steps=3)
        with safe_open(tmp_path / "cut/checkpoint-3/model.safetensors", "pt") as file:
            assert not {"embed_tokens.weight", "lm_head.weight"} & set(file.keys())
        resumed = self.train(rows, tmp_path / "cut", self.draft(seed=5), resume=True).model.state_dict()
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())

    def test_a_loaded_draft_trains_on(self, rows: Any, tmp_path: Path) -> None:
        """The trainer gives it its target's embedding and head."""
        loaded = auto_draft(save_draft(self.draft(), tmp_path / "draft"))
        trained = self.train(rows, tmp_path / "on", loaded).model
        assert torch.equal(trained.lm_head.weight, self.TARGET.get_output_embeddings().weight)


def test_blocks_are_one_forward_each_and_lossless(tmp_path: Path) -> None:
    """A loaded draft: one backbone call per verification; the text is the target's own, stopped anywhere."""
    loaded = auto_draft(save_draft(draft_of(), tmp_path / "draft"))
    calls = backbone_calls(loaded)
    ids = torch.tensor([tiny_document("uuuuuuu").ids])
    for new_tokens in (1, 2, 23):
        stats = DraftingStats()
        calls.clear()
        out = generate(MODEL, loaded, ids, max_new_tokens=new_tokens, do_sample=False, stats=stats)
        assert torch.equal(out, MODEL.generate(ids, max_new_tokens=new_tokens, do_sample=False))
        assert [embeds.shape[1] for embeds, *_ in calls] == [BLOCK] * sum(stats.drafted[:1])
    assert stats.drafted[0] > 3
    assert len(stats.acceptance) == BLOCK - 1


def test_the_cache_keeps_features_only() -> None:
    draft = draft_of().eval()
    drafter = BlockDrafter(draft, BLOCK)
    with torch.no_grad():
        drafter.propose(torch.arange(1, 7), torch.randn(1, 5, 96), 3, lambda z, so_far: (1, None))
        drafter.propose(torch.arange(1, 9), torch.randn(1, 2, 96), 3, lambda z, so_far: (1, None))
    assert len(drafter.cache) == 7 + BLOCK
    drafter.cache.crop(drafter.confirmed)
    assert len(drafter.cache) == 7
