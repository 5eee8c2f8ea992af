"""What a step and a run take, told without running them: held against steps that are run, and against arithmetic."""

import json
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_draft, tiny_rows, tiny_target, tiny_tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft import DraftCollator, ForedraftError, Target, auto_draft
from foredraft.cli import main
from foredraft.training.cost import Cost, Shape, count_step
from foredraft.training.meter import Meter, visible_pairs
from foredraft.training.plan import plan_run
from foredraft.training.settings import RunConfig

STEPS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3, "draft_vocab_size": 100},
    "peagle": {"num_depths": 3, "num_layers": 2},
    "dflash": {"block_size": 4, "num_layers": 2, "anchors": 64},
    "medusa": {"num_heads": 3},
}
SHAPE = Shape(rows=2, length=192, supervised=0.5, document=96)


@pytest.mark.parametrize(("algorithm", "checkpointing"), [*((name, False) for name in STEPS), ("eagle3", True)])
def test_the_count_is_that_of_a_step_that_is_run(algorithm: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory within 5 %, with what a GPU's kernels hold in place of what the CPU does: of a mask no pieces of keys and values."""
    monkeypatch.setattr("foredraft.loss.chunks.is_fake", lambda _: False)  # where a GPU has kernels the CPU has none
    monkeypatch.setattr("foredraft.loss.chunks.in_cache", lambda _: False)
    monkeypatch.setattr("foredraft.loss.teachers.in_cache", lambda _: False)
    monkeypatch.setattr("foredraft.draft.attention.patterns.masked_dense", unmasked)
    model = tiny_target(hidden=64, vocab=400)
    draft = auto_draft(model.config, algorithm, **STEPS[algorithm]).train()
    if checkpointing:
        draft.gradient_checkpointing_enable()
    target = Target(model, draft.config.aux_layers, draft.algorithm.needs)
    batch = DraftCollator(draft.algorithm)(SHAPE.packed())
    meter = Meter(t for m in (draft, model) for t in chain(m.parameters(), m.buffers()))
    with meter:
        signal = target.capture(batch)
        meter.peak = meter.live
        draft(batch, signal)["loss"].backward()

    def make() -> Any:
        return auto_draft(model.config, algorithm, **STEPS[algorithm])

    cost = count_step(make, model.config, SHAPE, dtype=torch.float32, target_dtype=torch.float32, checkpointing=checkpointing)
    assert cost.step_bytes == pytest.approx(meter.peak, rel=0.05), cost.step_bytes / meter.peak
    assert cost.gradient_bytes == sum(p.grad.nbytes for p in draft.parameters() if p.grad is not None)
    assert cost.state_bytes == signal.aux_BSA.nbytes + signal.hidden_BST.nbytes
    if not checkpointing:  # what is recomputed is run, and not needed
        products = sum(n for part, n in cost.flops.items() if part != "attention") - causal(model.config)
        assert products == pytest.approx(meter.flops.total())


def unmasked(q: Tensor, k: Tensor, v: Tensor, sees: Any, rows: Tensor, scale: float) -> Tensor:
    """A kernel that keeps its inputs, its output and its normaliser."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def causal(config: Any) -> int:
    """FLOPs of the target's attention over `SHAPE`'s documents."""
    pairs = SHAPE.rows * sum(n * (n + 1) // 2 for n in [96, 96])
    return config.num_hidden_layers * 4 * config.num_attention_heads * config.head_dim * pairs


def test_pairs_are_those_that_see_each_other() -> None:
    """By hand: two documents of 8, the second half of each an assistant's; and beyond what is counted, as they grow."""
    draft = tiny_draft(tiny_target(), "eagle3", ttt_steps=2, num_layers=2)
    packed = tiny_rows([["uuuuaaaa", "uuuuaaaa"]])
    whole, slots = 2 * 36, 2 * (4 + 5 + 6)  # x_{t+1}, x_{t+2} in the span: t = 3, 4, 5
    assert visible_pairs(draft, packed) == [whole, slots, slots + 6, slots + 6]
    long = visible_pairs(draft, Shape(length=3000).packed())
    assert_close(long[1], 3000**2 / 2, rtol=0.01, atol=0.0)


class TestMeter:
    def test_bytes_live_and_peak(self) -> None:
        weight = torch.ones(10)
        with Meter([weight], widths=[5]) as meter:
            made = weight * 2
            both = made[:5].reshape(1, 5) + torch.stack([weight[:5]] * 4)
            del made
        assert (meter.peak, meter.live) == (40 + 80 + 80, 80)
        assert meter.rows == {5: 4}
        del both
        assert meter.live == 0


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """A run on a tiny target, and 6 conversations."""
    tokenizer = tiny_tokenizer()
    tiny_config(layers=4, vocab=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    line = {"messages": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer in a sentence"}]}
    (tmp_path / "data.jsonl").write_text((json.dumps(line) + "\n") * 6)
    return {
        "target": str(tmp_path / "target"),
        "output_dir": str(tmp_path / "out"),
        "algorithm": "medusa",
        "aux_layers": [1, 2, 3],
        "data": {"train": str(tmp_path / "data.jsonl"), "max_length": 64},
        "training": {"per_device_train_batch_size": 2},
    }


def main_alone() -> None:
    """The command line, which ends with an exit status."""
    with pytest.raises(SystemExit, match="0"):
        main()


class TestPlan:
    def test_a_run(
        self, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Data, disk and hours follow from what is counted; in words, and as JSON."""
        plan = plan_run(RunConfig.check(fields), device="NVIDIA H200")
        monkeypatch.setattr("foredraft.training.plan.plan_run", lambda *_, **__: plan)
        (tmp_path / "run.yaml").write_text(json.dumps(fields))
        for style in ([], ["--json"]):
            monkeypatch.setattr(sys, "argv", ["foredraft", "plan", str(tmp_path / "run.yaml"), "--device", "NVIDIA H200", *style])
            main_alone()
        told = capsys.readouterr().out
        assert "by medusa, adapter llama" in told
        assert json.loads(told[told.index("{") :]) == asdict(plan)
        assert plan.text is not None
        assert plan.text.conversations == 6
        assert plan.tokens == 3 * 6 * plan.text.tokens
        assert plan.stored_bytes_per_token == 4 * 32 * 2
        assert plan.tokens_per_second["online"] == pytest.approx(0.4 * 989e3 / sum(plan.gflop_per_token.values()))
        assert plan.hours == pytest.approx(plan.tokens / plan.tokens_per_second["online"] / 3600)
        assert plan.memory["sum"] == sum(n for part, n in plan.memory.items() if part != "sum")
        more = {
            **fields,
            "hidden_states_cache": "c",
            "hidden_states_dtype": "float8",
            "training": {"max_steps": 10, "gradient_accumulation_steps": 3, "bf16": False},
        }
        other = plan_run(RunConfig.check(more), tflops=10, devices=2)
        assert (other.tokens, other.dtype, other.rows) == (10 * 3 * 2 * 8 * 64, "float32", 8)
        assert other.stored_bytes_per_token == 4 * (32 + 4)  # a byte each, and a scale per state
        epoch = plan.text.tokens * 6
        seconds = epoch / other.tokens_per_second["online"] + (other.tokens - epoch) / other.tokens_per_second["stored"]
        assert other.hours == pytest.approx(seconds / 3600 / 2)
        online = plan_run(RunConfig.check({**more, "hidden_states_cache": None}), tflops=10)
        waiting = {part: other.memory[part] - online.memory[part] for part in ("step", "sum")}
        assert waiting == dict.fromkeys(waiting, 2 * 8 * 64 * 4 * 32 * 2), "the states of two more micro-batches, bfloat16"

    def test_without_data_or_with_a_draft(self, fields: dict[str, Any], tmp_path: Path) -> None:
        fields["data"] = {"train": "nobody/nothing.jsonl", "max_length": 64}
        plan = plan_run(RunConfig.check(fields))
        assert (plan.text, plan.tokens, plan.stored_bytes) == (None, None, None)
        assert plan.hours == pytest.approx(1e9 / plan.tokens_per_second["online"] / 3600)
        auto_draft(fields["target"], "medusa", aux_layers=(1, 2, 3)).save_pretrained(tmp_path / "draft")
        del fields["aux_layers"]
        assert plan_run(RunConfig.check({**fields, "draft": str(tmp_path / "draft")})).gflop_per_token == plan.gflop_per_token

    def test_what_cannot_be_planned(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ForedraftError, match=r"device 'abacus' is not known: choose A100, .*--tflops"):
            plan_run(RunConfig.check(fields), device="abacus")
        with pytest.raises(ForedraftError, match=r"cannot start:\n  aux layers \[99\]"):
            plan_run(RunConfig.check({**fields, "aux_layers": [99]}))


def test_what_depends_on_values_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()

    def peeking() -> Any:
        draft = auto_draft(config, "medusa")
        project = draft.project_hidden_states
        draft.project_hidden_states = lambda aux: project(aux) * float(aux.sum())
        return draft

    with pytest.raises(ForedraftError, match="cannot be counted without running it"):
        count_step(peeking, config, Shape(length=32))


def test_costs_are_read_per_token() -> None:
    """And more rows than were run cost as much as the last of these."""
    flops = {"draft layers": 300.0, "target": 500.0}
    cost = Cost({}, 10, 5, 1, flops, 7, 100, 200, 50, 20, 4, {})
    assert (cost.bytes_per_token, cost.peak_bytes, cost.per_token(), cost.per_token(stored=True)) == (3, 350, 80, 30)
    more = cost.extended(30, replace(cost, tokens=5, step_bytes=40))
    assert (more.per_token(), more.step_bytes, more.state_bytes) == (80, 50 + 20 * 2, 12)
