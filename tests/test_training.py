"""The trainer: it learns, accumulates, resumes, stops when it must; the cache of hidden states; two ranks."""

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from rigged import arguments, letter_tokenizer, predictable_target, trainer_of, written_rows
from safetensors.torch import load_file
from tiny import Document, tiny_draft, tiny_rows, tiny_target
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from train_full_disk import RUN as FULL_DISK_RUN
from train_two_ranks import WAYS
from train_two_ranks import run as run_on_ranks
from transformers import TrainerCallback, TrainerControl, TrainingArguments

from foredraft import (
    Conversations,
    DraftCollator,
    DraftTrainer,
    DraftTrainingArguments,
    ForedraftError,
    Signal,
    Target,
    auto_draft,
    pack,
)
from foredraft.plugins import eagle
from foredraft.training import NonFiniteLoss
from foredraft.training.arguments import training_schema
from foredraft.training.progress import StopOnSignal, line
from foredraft.training.ranks import Blankable, Evened
from foredraft.training.resume import checkpoints_of, latest_complete

HERE = Path(__file__).parent
MODEL = predictable_target()
ROWS = written_rows(MODEL)
STEPS = 3
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}


def fresh(**options: Any) -> Any:
    return tiny_draft(MODEL, **{"ttt_steps": STEPS, **options})


def trained(directory: Path, rows: Any = ROWS, draft: Any = None, target: Any = MODEL, resume: bool | None = None, **fields: Any) -> Any:
    """The trainer of a finished training."""
    trainer = trainer_of(draft if draft is not None else fresh(), target, directory, rows, **fields)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_of(trainer: Any) -> list[dict[str, float]]:
    """The logged steps, without what depends on the clock."""
    return [{name: value for name, value in log.items() if name != "seconds"} for log in trainer.state.log_history if "loss" in log]


def assert_same_weights(ours: Any, theirs: Any) -> None:
    """Bit for bit."""
    mine, others = (each if isinstance(each, Mapping) else each.state_dict() for each in (ours, theirs))
    assert mine.keys() == others.keys()
    assert not (different := [name for name in mine if not torch.equal(mine[name], others[name])]), different


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training that succeeds, and the weights it started from."""
    draft = fresh(draft_vocab_size=30)
    draft.set_draft_vocabulary(torch.arange(10, 40))
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    fields = {"max_steps": 30, "eval_strategy": "steps", "eval_steps": 10}
    return trained(tmp_path_factory.mktemp("run"), ROWS[:6], draft, eval_dataset=ROWS[6:], **fields), before


class TestLearning:
    def test_the_loss_falls_and_accuracy_rises(self, run: Any) -> None:
        logs = steps_of(run[0])
        assert len(logs) == 30
        assert logs[-1]["loss"] < 0.2 * logs[0]["loss"]
        for k in range(1, STEPS + 1):
            assert logs[-1][f"accuracy_{k}"] > 0.4 + logs[0][f"accuracy_{k}"]
        assert logs[-1]["tau"] > 0.5 + logs[0]["tau"]

    def test_logs(self, run: Any) -> None:
        names = {"loss", "tau", "tau_greedy", *(f"accuracy_{k}" for k in range(1, STEPS + 1))}
        for log in steps_of(run[0]):
            assert names <= log.keys()
            assert all(0 <= log[f"accuracy_{k}"] <= 1 for k in range(1, STEPS + 1))
            assert 1 <= log["tau"] <= STEPS + 1
            accuracy = [log[f"accuracy_{k}"] for k in range(1, STEPS + 1)]
            assert log["tau_greedy"] == pytest.approx(1 + accuracy[0] + accuracy[0] * accuracy[1] + accuracy[0] * accuracy[1] * accuracy[2])
        held_out = [log for log in run[0].state.log_history if "eval_loss" in log]
        assert [log["step"] for log in held_out] == [10, 20, 30]
        assert all({f"eval_{name}" for name in names} <= log.keys() for log in held_out)

    def test_evaluate_returns_what_it_logs(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that `metric_for_best_model="eval_tau"` works."""
        monkeypatch.setattr(run[0].state, "log_history", [*run[0].state.log_history])  # the run's own is read by other tests
        found = run[0].evaluate()
        assert found["eval_tau"] == pytest.approx([log for log in run[0].state.log_history if "eval_loss" in log][-1]["eval_tau"])
        assert {"eval_loss", "eval_accuracy_1", "eval_tau_greedy"} <= found.keys()

    def test_the_embedding_stays(self, run: Any) -> None:
        trainer, before = run
        assert not trainer.model.embed_tokens.weight.requires_grad
        assert torch.equal(trainer.model.embed_tokens.weight, MODEL.get_input_embeddings().weight)
        moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == before.keys() - {"embed_tokens.weight"}

    def test_the_target_stays(self, run: Any) -> None:
        assert_same_weights(MODEL, predictable_target())
        assert not any(p.requires_grad for p in MODEL.parameters())


def test_the_best_checkpoint_by_tau(tmp_path: Path) -> None:
    fields = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = trained(tmp_path, eval_dataset=ROWS[:2], metric_for_best_model="eval_tau", greater_is_better=True, **fields)
    assert trainer.state.best_metric == max(log["eval_tau"] for log in trainer.state.log_history if "eval_tau" in log)


@pytest.mark.parametrize("disabled", [False, True])
def test_no_bar_where_none_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str], disabled: bool) -> None:
    trained(tmp_path, max_steps=1, disable_tqdm=disabled)
    out, err = capsys.readouterr()
    assert "step 1 of 1: loss" in out + err
    assert re.search(r"trained to step 1 in \d+ s", out + err)
    assert "train_runtime" not in out + err
    assert "τ≈" in out + err
    assert ("1/1" in err) is not disabled


class TestReady:
    """A training that cannot teach the draft anything stops before its first step, with all the reasons."""

    ROWS = tiny_rows([[Document(list(range(30, 46)), "uu" + 14 * "a")]] * 4)

    @pytest.mark.parametrize(
        ("rows", "vocabulary", "started", "reasons"),
        [
            (ROWS, None, False, "its token embedding is frozen, and not this target's (mean cosine of their rows"),
            (ROWS, range(10), True, "vocabulary of 10 tokens covers 0.0% of the supervised ones, the most frequent ones would cover 71.4%"),
            (tiny_rows([["uuuuu"], ["uuuau"]]), None, True, "none of the 2 rows has a token that algorithm 'eagle3' trains"),
            (ROWS, range(10), False, "its token embedding is frozen"),
            (ROWS, range(10), False, "vocabulary of 10 tokens covers 0.0%"),
        ],
    )
    def test_refused(self, tmp_path: Path, rows: Any, vocabulary: range | None, started: bool, reasons: str) -> None:
        draft = auto_draft(MODEL.config, draft_vocab_size=vocabulary and len(vocabulary))
        if vocabulary:
            draft.set_draft_vocabulary(torch.tensor(vocabulary))
        if started:
            draft.start_from(MODEL)
        with pytest.raises(ForedraftError, match="would teach the draft nothing:") as caught:
            trained(tmp_path, rows, draft)
        assert reasons in str(caught.value)

    def test_a_vocabulary_that_misses_much_is_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("foredraft"), "propagate", True)
        draft = fresh(draft_vocab_size=10)
        draft.set_draft_vocabulary(torch.arange(28, 38))
        trained(tmp_path, self.ROWS, draft, max_steps=1)
        assert "covers 42.9% of the supervised ones, the most frequent ones would cover 71.4%" in caplog.text
        assert draft.config.foredraft["vocabulary_coverage"] == 0.4286


def test_lines_in_a_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default no bar off a terminal, and twenty lines, with the time that is left."""
    args = DraftTrainingArguments(output_dir=str(tmp_path), max_steps=40, save_strategy="no", use_cpu=True)
    DraftTrainer(fresh(ttt_steps=1), MODEL, args, train_dataset=ROWS).train()
    out, err = capsys.readouterr()
    assert [text.split(":")[0].split(",")[0] for text in out.splitlines()] == [
        *(f"step {step} of 40" for step in range(2, 41, 2)),
        "trained to step 40 in " + out.rsplit(" in ", 1)[1].strip(),
    ]
    assert re.search(r"step 2 of 40, \d+ s left: loss ", out)
    assert "40/40" not in err
    assert line(10, 155, {"loss": 2.0, "tau": 1.5, "accuracy_1": 0.5}, 190).startswith("step 10 of 155, 3 min left: loss 2.000")


class TestAccumulation:
    def test_equals_one_large_batch(self, tmp_path: Path) -> None:
        """Rows with few, many and no supervised slots: means of micro-batches would weigh them equally."""
        rows = tiny_rows([["uuaaaaaaaaaaaa"], ["uaaa"], ["uuuuuu"], ["uaauaaaauaaaaaaa"]])
        together = trained(tmp_path / "a", rows, max_steps=3, per_device_train_batch_size=4, **SGD)
        apart = trained(tmp_path / "b", rows, max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=4, **SGD)
        assert_close(dict(apart.model.named_parameters()), dict(together.model.named_parameters()), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(steps_of(apart), steps_of(together), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
            assert ours["accuracy_1"] == pytest.approx(theirs["accuracy_1"])
            assert ours["tau"] == pytest.approx(theirs["tau"], rel=1e-3)

    def test_a_remainder_at_the_end_of_the_epoch(self, tmp_path: Path) -> None:
        """Six rows, four to a step: the last step of the epoch has two, and is divided by their counts."""
        apart = trained(tmp_path / "a", ROWS[:6], max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=4, **SGD)
        together = trained(tmp_path / "b", ROWS[:6], max_steps=4, per_device_train_batch_size=4, **SGD)
        assert_close(dict(apart.model.named_parameters()), dict(together.model.named_parameters()), rtol=1e-4, atol=1e-5)


class TestNothingSupervised:
    def test_among_others(self, tmp_path: Path) -> None:
        trainer = trained(tmp_path, tiny_rows([["uuuuuuu"], ["uuaaaaa"]], 7), max_steps=6, per_device_train_batch_size=1)
        losses = [log["loss"] for log in steps_of(trainer)]
        assert sum(loss == 0 for loss in losses) == 3
        assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_bfloat16_autocast(tmp_path: Path) -> None:
    half, full = (
        steps_of(trained(tmp_path / name, draft=fresh(ttt_steps=1), bf16=bf16, max_steps=20)) for name, bf16 in (("a", True), ("b", False))
    )
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], rel=2e-2)
    assert half[-1]["loss"] < 0.3 * half[0]["loss"]


RESUMED = {"max_steps": 7, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Uninterrupted: four steps to an epoch, so checkpoint-3 lies within the first, checkpoint-6 within the second."""
    return trained(tmp_path_factory.mktemp("whole"), draft=fresh(num_layers=2, draft_vocab_size=30), **RESUMED)


class TestResume:
    def resumed(self, directory: Path) -> Any:
        draft = fresh(num_layers=2, draft_vocab_size=30, seed=5)  # another start: all must come from the checkpoint
        return trained(directory, draft=draft, resume=True, **RESUMED)

    @pytest.fixture
    def copied(self, whole: Any, tmp_path: Path) -> Path:
        """Its folder, as if it had been stopped before the end."""
        shutil.copytree(whole.args.output_dir, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoint-7")
        return tmp_path / "run"

    @pytest.mark.parametrize("step", [3, 6])
    def test_equals_uninterrupted_training(self, whole: Any, copied: Path, step: int) -> None:
        if step == 3:
            shutil.rmtree(copied / "checkpoint-6")
        again = self.resumed(copied)
        assert_same_weights(again.model, whole.model)
        assert steps_of(again) == steps_of(whole)

    def test_without_a_checkpoint_it_starts(self, whole: Any, tmp_path: Path) -> None:
        again = trained(tmp_path, draft=fresh(num_layers=2, draft_vocab_size=30), resume=True, **RESUMED)
        assert steps_of(again) == steps_of(whole)

    DAMAGE: Mapping[str, Any] = {
        "no trainer_state.json": lambda c: (c / "trainer_state.json").unlink(),
        "half a trainer_state.json": lambda c: (c / "trainer_state.json").write_text('{"epoch": 1.5, "glob'),
        "half a model.safetensors": lambda c: os.truncate(c / "model.safetensors", (c / "model.safetensors").stat().st_size // 2),
        "an empty model.safetensors": lambda c: os.truncate(c / "model.safetensors", 0),
        "no model.safetensors": lambda c: (c / "model.safetensors").unlink(),
        "no optimizer.pt": lambda c: (c / "optimizer.pt").unlink(),
    }

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_an_incomplete_checkpoint_is_skipped(
        self, whole: Any, copied: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.DAMAGE[damage](copied / "checkpoint-6")
        monkeypatch.setattr(logging.getLogger("foredraft"), "propagate", True)
        with caplog.at_level(logging.WARNING):
            found = latest_complete(copied)
        assert found == copied / "checkpoint-3"
        assert f"checkpoint '{copied / 'checkpoint-6'}' is incomplete and is skipped" in caplog.text
        if damage.startswith("half"):
            again = self.resumed(copied)
            assert_same_weights(again.model, whole.model)
            assert steps_of(again) == steps_of(whole)

    def test_the_newest_is_by_number(self, copied: Path) -> None:
        shutil.copytree(copied / "checkpoint-3", copied / "checkpoint-10")
        (copied / "checkpoint-best").mkdir()
        assert latest_complete(copied) == copied / "checkpoint-10"

    def test_a_checkpoint_is_a_draft(self, whole: Any, copied: Path) -> None:
        draft = auto_draft(copied / "checkpoint-6")
        assert draft.config.num_hidden_layers == 2
        assert draft.draft_ids.tolist() == whole.model.draft_ids.tolist()


class Spoiled(Target):
    """A target whose hidden states overflow in one row, from its second visit on."""

    def __init__(self, row: int, visit: int = 1):
        super().__init__(MODEL, (2, 4, 5))
        self.row, self.visits = row, -visit

    def capture(self, batch: Any) -> Signal:
        signal = super().capture(batch)
        here = batch["row"] == self.row
        if here.any():
            self.visits += 1
            if self.visits > 0:
                signal.aux_BSA[here] = float("inf")
        return signal


class TestNonFinite:
    RUN: Mapping[str, Any] = {"max_steps": 12, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1}

    def test_stops_and_names_rows_and_checkpoint(self, tmp_path: Path) -> None:
        trainer = trainer_of(fresh(), Spoiled(5), tmp_path, ROWS, **self.RUN)
        with pytest.raises(NonFiniteLoss) as caught:
            trainer.train()
        step = trainer.state.global_step
        assert 4 <= step < 8  # the second epoch
        good = tmp_path / f"checkpoint-{step}"
        message = str(caught.value)
        assert str(good) in message
        assert f"after step {step}" in message
        rows = json.loads(message[message.index("[") : message.index("]") + 1])
        assert len(rows) == 2
        assert 5 in rows
        assert latest_complete(tmp_path) == good
        weights = auto_draft(good).state_dict()
        assert all(t.isfinite().all() for t in weights.values())
        resumed = trained(tmp_path, resume=True, **self.RUN)
        assert resumed.state.global_step == 12

    def test_before_the_first_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(NonFiniteLoss, match="none yet"):
            trained(tmp_path, target=Spoiled(5, visit=0), **{**self.RUN, "save_strategy": "no"})

    def test_a_finite_loss_with_an_infinite_gradient(self, tmp_path: Path) -> None:
        """Its weights must not become the last checkpoint."""
        draft = fresh()
        trainer = trainer_of(draft, MODEL, tmp_path, ROWS, **self.RUN)

        def overflow(gradient: Tensor) -> Tensor:
            return gradient * float("inf") if trainer.state.global_step == 2 else gradient

        draft.fc.weight.register_hook(overflow)
        with pytest.raises(NonFiniteLoss, match="a gradient overflowed") as caught:
            trainer.train()
        assert str(tmp_path / "checkpoint-2") in str(caught.value)
        assert [c.name for c in checkpoints_of(tmp_path)] == ["checkpoint-1", "checkpoint-2"]

    def test_a_shorter_batch_does_not_hide_an_earlier_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On devices where looking costs time, several batches pass before anybody looks."""
        trainer = trainer_of(fresh(), MODEL, tmp_path, ROWS)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "_raise_if_bad", lambda: None)
            for loss, rows in ((1.0, [0]), (float("nan"), [4, 7, 6]), (2.0, [1]), (float("inf"), [2, 3, 8, 9]), (1.0, [3])):
                trainer._watch(torch.tensor(loss), torch.tensor(rows))
        with pytest.raises(NonFiniteLoss, match=r"rows \[4, 7, 6\]"):
            trainer._raise_if_bad()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "limit"), [("model.safetensors", 20_000), ("optimizer.pt", 100_000)])
def test_a_full_disk(tmp_path: Path, what: str, limit: int) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(HERE / "train_full_disk.py"), str(run), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("Error: could not write checkpoint-4") :]
    assert "disk full?" in message
    assert f"Complete is: {run / 'checkpoint-2'}; make room, then resume" in message
    assert (run / "checkpoint-4").exists()
    assert (run / "checkpoint-2" / what).stat().st_size > limit
    assert latest_complete(run) == run / "checkpoint-2"
    whole = trained(tmp_path / "whole", draft=fresh(ttt_steps=2), **FULL_DISK_RUN)
    again = trained(run, draft=fresh(ttt_steps=2), resume=True, **FULL_DISK_RUN)
    assert_same_weights(again.model, whole.model)


def test_python_use(tmp_path: Path) -> None:
    """From conversations to a draft on disk."""
    tokenizer, model = letter_tokenizer(), MODEL
    talk = [[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "hovCJQ" * 2}] for _ in range(6)]
    rows = pack(Conversations(talk), tokenizer, 32)
    draft = auto_draft(model.config, ttt_steps=2)
    target = Target(model, draft.config.aux_layers)
    draft.start_from(target)
    args = DraftTrainingArguments(output_dir=str(tmp_path), max_steps=3, use_cpu=True, logging_steps=1)
    trainer = DraftTrainer(draft, target, args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "draft"))
    assert_same_weights(auto_draft(tmp_path / "draft"), draft)
    assert latest_complete(tmp_path) == tmp_path / "checkpoint-3"


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "another width": ({"target": tiny_target(hidden=64)}, "hidden_size: the draft expects 32, the target has 64"),
    "another vocabulary": ({"target": tiny_target(vocab=60)}, "vocab_size: the draft expects 50, the target has 60"),
    "conversations": ({"train_dataset": [[{"role": "user", "content": "hi"}]]}, "train_dataset: expected packed rows .* found list"),
    "records": ({"eval_dataset": {"a": [{"messages": []}]}}, "eval_dataset 'a': expected packed rows .* found the fields messages"),
    "nothing": ({"train_dataset": []}, "train_dataset is empty"),
    "ids beyond the embedding": ({"train_dataset": [{**ROWS[0], "input_ids": [50] * 16}]}, "holds token 50, .* has 50 rows"),
    "the same from a file": ({"train_dataset": Dataset.from_list([{**ROWS[0], "input_ids": [50] * 16}])}, "holds token 50, .* has 50 rows"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_training_is_given(tmp_path: Path, wrong: str) -> None:
    given, message = WRONG[wrong]
    with pytest.raises(ForedraftError, match=message):
        DraftTrainer(fresh(), args=arguments(tmp_path), **{"target": MODEL, "train_dataset": ROWS, **given})
    if "holds token" in message:
        with pytest.raises(ForedraftError, match=message):
            auto_draft(MODEL.config, draft_vocab_size=20).start_from(MODEL, given["train_dataset"])


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", "fast"), ("per_device_train_batch_size", 0), ("report_to", "wandb"), ("optim", "no such")]
)
def test_training_arguments_that_cannot_be(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ForedraftError, match=r"fast|greater than or equal to 1|wandb|no such"):
        arguments(tmp_path, **{field: value})


def test_the_keys_of_training_are_transformers_own(tmp_path: Path) -> None:
    """They are read from its source, not imported."""
    assert {f.name for f in dataclasses.fields(DraftTrainingArguments) if f.init} == set(training_schema().model_fields)
    assert arguments(tmp_path, learning_rate="1e-4", num_train_epochs=2).learning_rate == 1e-4


def test_the_collator_knows_the_epoch(tmp_path: Path) -> None:
    """What it draws differs from epoch to epoch, and after a resumption it is what it would have been."""
    seen: list[tuple[int, int]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, kwargs["train_dataloader"].collate_fn.epoch))

    fields = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    trainer = trainer_of(fresh(), MODEL, tmp_path, ROWS, **fields)
    trainer.add_callback(Watch)
    trainer.train()
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    seen.clear()
    trainer = trainer_of(fresh(), MODEL, tmp_path, ROWS, **fields)
    trainer.add_callback(Watch)
    shutil.rmtree(tmp_path / "checkpoint-5", ignore_errors=True)
    trainer.train(resume_from_checkpoint=True)
    assert seen == [(4, 1), (5, 2)]


def test_workers_know_the_epoch() -> None:
    """Those that outlive one, too: they draw what this process would."""
    draft = tiny_draft(MODEL, "dflash", num_layers=1, anchors=3, block_size=4)
    here, loaded = DraftCollator(draft.algorithm), DraftCollator(draft.algorithm)
    loader = DataLoader(ROWS, 4, collate_fn=loaded, num_workers=1, persistent_workers=True)
    drawn = []
    for epoch in range(3):
        here.epoch = loaded.epoch = epoch
        for batch, rows in zip(loader, (ROWS[:4], ROWS[4:]), strict=True):
            assert torch.equal(batch["anchors"], here(rows)["anchors"])
            drawn.append(batch["anchors"].tolist())
    assert drawn[0] != drawn[2] != drawn[4] != drawn[0]


@pytest.mark.parametrize(("device", "native", "given", "bf16", "workers"), [
    ("cuda", True, {}, True, 2),
    ("cuda", True, {"bf16": False, "dataloader_num_workers": 1}, False, 1),
    ("cuda", True, {"fp16": True}, False, 2),
    ("cuda", False, {}, False, 2),
    ("cuda", True, {"use_cpu": True}, False, 0),
    (None, True, {}, False, 0),
])  # fmt: skip
def test_defaults_by_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, native: bool, given: dict[str, Any], bf16: bool, workers: int
) -> None:
    """bfloat16 where a device multiplies it, and processes that make batches while it does."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device and torch.device(device))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # which would look for the device
    found = DraftTrainingArguments(str(tmp_path), **given)
    assert (found.bf16, found.dataloader_num_workers) == (bf16, workers)
    assert found.dataloader_persistent_workers is (workers == 2)
    assert found.accelerator_config == (None if workers == 0 else {"non_blocking": True})


@pytest.mark.parametrize(("dtype", "bf16"), [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_frozen_tables_are_the_targets_while_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bf16: bool
) -> None:
    """Head and embedding of DFlash; the same weights come of it and the same files, as if each had its own."""
    target, states, shared = predictable_target().to(dtype), [], []
    before = {name: t.clone() for name, t in target.state_dict().items()}

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            mine, theirs = (model.embed_tokens, model.lm_head), (target.get_input_embeddings(), target.get_output_embeddings())
            shared.append({a.weight.data_ptr() == b.weight.data_ptr() for a, b in zip(mine, theirs, strict=True)})

    for lends in (True, False):
        draft = tiny_draft(target, "dflash", num_layers=1, block_size=4)
        if not lends:
            monkeypatch.setattr("foredraft.training.sharding.Borrow._may_stand_for", lambda *_: False)
        trainer = trainer_of(draft, target, tmp_path / str(lends), ROWS, max_steps=2, bf16=bf16, save_strategy="steps", save_steps=2)
        trainer.add_callback(Watch)
        trainer.train()
        states.append(draft.state_dict())
        states.append(load_file(tmp_path / str(lends) / "checkpoint-2" / "model.safetensors"))
    assert shared == [{dtype == torch.float32 or bf16}] * 2 + [{False}] * 2
    for ours, theirs in ((states[0], states[2]), (states[1], states[3]), (target.state_dict(), before)):
        assert_close(ours, theirs, rtol=0, atol=0)
    states[0]["lm_head.weight"].zero_()
    assert_close(target.state_dict(), before, rtol=0, atol=0)


def test_half_weights_are_refused_unless_asked_for(tmp_path: Path) -> None:
    draft = fresh().to(torch.bfloat16)
    with pytest.raises(ForedraftError, match=r"weights are torch.bfloat16, where most updates round to nothing: train draft.float\(\)"):
        DraftTrainer(draft, MODEL, arguments(tmp_path), train_dataset=ROWS)
    DraftTrainer(draft, MODEL, arguments(tmp_path, max_steps=1), train_dataset=ROWS, half_weights=True).train()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS[:4])


@pytest.mark.parametrize(("algorithm", "options"), [("eagle3", {"ttt_steps": 2}), ("dflash", {"block_size": 4}), ("medusa", {})])
def test_a_stream_of_rows_trains_as_a_list_does(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for rows in (ROWS[:4], Stream()):
        draft = tiny_draft(MODEL, algorithm, **options)
        losses.append([log["loss"] for log in steps_of(trained(tmp_path / str(len(losses)), rows, draft, max_steps=3))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_batches_that_one_process_makes_for_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="dispatch_batches cuts batches by rows"):
        trainer_of(fresh(), MODEL, tmp_path, ROWS, accelerator_config={"dispatch_batches": True})


def test_batches_for_ranks_are_filled_with_rows_that_train_nothing() -> None:
    """Two ranks, two rows each at a time, five rows: one of the fifth and a blank, and two more blanks."""
    batches = Evened(BatchSampler(range(5), 2, drop_last=False), 2)
    assert list(batches) == [[0, 1], [2, 3], [4, ~4], [~4, ~4]]
    assert len(batches) == 4
    rows = Blankable(ROWS[:5])
    collate = DraftCollator(fresh().algorithm)
    assert collate([rows[4], rows[~4]])["counts"].equal(collate([rows[4]])["counts"])
    assert not collate([rows[~4]])["counts"].any()


def test_noise_is_a_rows_own() -> None:
    """EAGLE-1's, whichever rank and batch the row is in; another one every epoch."""
    draft = tiny_draft(MODEL, "eagle", noise=0.3).train()
    collate, seen = DraftCollator(draft.algorithm), []

    def noises(rows: Any, epoch: int = 0) -> Tensor:
        collate.epoch = epoch
        batch = collate(rows)
        aux_BSA = torch.zeros(*batch["input_ids"].shape, 32)
        with patch.object(eagle, "unrolled", lambda draft, batch, aux_BSA, *_, **__: seen.append(aux_BSA) or []):
            draft.algorithm.states(draft, {**batch, "queries": []}, aux_BSA)
        return seen[-1]

    both = noises(ROWS[:2])
    assert both.abs().max() <= 0.3
    assert both[1].equal(noises(ROWS[1:2])[0])
    assert not both[0].equal(both[1])
    assert not both.equal(noises(ROWS[:2], epoch=1))


def test_what_a_rank_receives_between_steps_waits_for_the_next() -> None:
    """At an epoch's end ranks save together, or not at all."""
    stop, control = StopOnSignal(SimpleNamespace(num_processes=1)), TrainerControl(should_save=True)
    stop.on_step_end(None, None, control)
    stop.received = 15
    stop.on_epoch_end(None, None, control)
    assert control.should_save
    stop.on_step_end(None, None, control)
    stop.on_epoch_end(None, None, control)
    assert control.should_training_stop
    assert not control.should_save


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """By DDP, by FSDP, and with a target between them; what one process saved two go on with, and the other way round."""
    for name in ("one", "one_resumed", *WAYS):
        (tmp_path / name).mkdir()
    MODEL.save_pretrained(tmp_path / "target")
    run_on_ranks(tmp_path / "one", 4)
    shutil.copytree(tmp_path / "one" / "checkpoint-3", tmp_path / "fsdp_resumed" / "checkpoint-3")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(HERE / "train_two_ranks.py")]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.copytree(tmp_path / "fsdp" / "checkpoint-3", tmp_path / "one_resumed" / "checkpoint-3")
    run_on_ranks(tmp_path / "one_resumed", 4)
    expected, logs = torch.load(tmp_path / "one" / "weights.pt"), json.loads((tmp_path / "one" / "logs.json").read_text())
    compared = {"loss", "grad_norm", "accuracy_1", "accuracy_3", "tau", "eval_accuracy_1", "eval_tau"}
    for name in ("one_resumed", *WAYS):
        weights, rounded = torch.load(tmp_path / name / "weights.pt"), name.endswith("bf16")
        if not rounded:
            assert_close(weights, expected, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        assert_same_weights(auto_draft(tmp_path / name / "checkpoint-5"), weights)
        for two, one in zip(json.loads((tmp_path / name / "logs.json").read_text()), logs, strict=True):
            for key in set(one) & ({"loss"} if rounded else compared):
                assert two[key] == pytest.approx(one[key], rel=0.1 if rounded else 1e-3), (name, key, one["step"])
