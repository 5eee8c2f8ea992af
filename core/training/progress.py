"""What a training does beside its steps: a line at each log, with a bar or without, and the end that a signal asks for."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..data import DraftCollator
from ..errors import ForedraftError
from ..progress import duration
from ..target.streaming import place_of, read_up_to

A_TWENTIETH = 0.05
"""How often a training logs unless told otherwise: 20 times, and at least every 10 steps."""


class SeedByEpoch(TrainerCallback):
    """Tells the collator the epoch, which seeds what it draws."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Before the epoch's first batch."""
        collate = getattr(train_dataloader, "collate_fn", None)
        if isinstance(collate, DraftCollator):
            collate.epoch = int(state.epoch or 0)


class Stopwatch(TrainerCallback):
    """Writes the seconds of training so far, those before a resume included, into every entry of the history."""

    began: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the checkpoint is loaded."""
        self.began = time.monotonic() - max((log.get("seconds", 0.0) for log in state.log_history), default=0.0)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The newest entry."""
        if self.began is not None:
            state.log_history[-1]["seconds"] = round(time.monotonic() - self.began, 2)


class ReadUpTo(TrainerCallback):
    """Tells whoever captures beside the training how many rows it has read, and removes their states."""

    def __init__(self, directory: Path, rows: int, batch: int):
        self.directory, self.rows, self.batch = directory, rows, batch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where it begins, or goes on."""
        self._tell(args, state, False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a step."""
        self._tell(args, state, False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing more is read, unless it was stopped on the way."""
        self._tell(args, state, state.global_step >= state.max_steps)

    def _tell(self, args: Any, state: Any, finished: bool) -> None:
        if state.is_world_process_zero:
            per_step = self.batch * args.gradient_accumulation_steps * args.world_size
            read_up_to(self.directory, place_of(state.global_step, self.rows, per_step), finished)


class AsAskedNow(TrainerCallback):
    """A resumed training logs, saves and evaluates as it is asked to now, and its learning rate is that of a run of its length now.

    Trainer takes all that from the checkpoint, the rate for one step: after a finished run it would be 0.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any) -> None:
        """After the checkpoint is loaded."""
        state.compute_steps(args, state.max_steps)
        if args.logging_steps == A_TWENTIETH:
            state.logging_steps = min(state.logging_steps, 10)
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)
        if isinstance(schedule, LambdaLR):
            schedule._last_lr = [base * at(schedule.last_epoch) for base, at in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
            for group, rate in zip(optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = rate


class DraftProgress(ProgressCallback):
    """Trainer's bar with a readable line instead of a dict."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write the line above the bar."""
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(line(state.global_step, state.max_steps, logs))


class DraftPrinter(PrinterCallback):
    """The same line without a bar (`disable_tqdm`, the default off a terminal), with the time that is left."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed training's time counts from where it goes on."""
        self.began, self.first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Print the line."""
        if state.is_world_process_zero and logs:
            done = state.global_step - getattr(self, "first", state.global_step)
            per_step = (time.monotonic() - self.began) / done if done else 0.0
            print(line(state.global_step, state.max_steps, logs, per_step * (state.max_steps - state.global_step)), flush=True)


def line(step: int, steps: int, logs: dict[str, float], seconds_left: float = 0.0) -> str:
    """`step 10 of 155, 3 min left: loss 2.31 ...`; at the end how long it took."""
    if "train_runtime" in logs:
        return f"trained to step {step} in {duration(logs['train_runtime'])}"
    left = f", {duration(seconds_left)} left" if seconds_left else ""
    return f"step {step} of {steps}{left}: " + (summary(logs) or ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))


def summary(logs: dict[str, float]) -> str:
    """`loss 2.31  accuracy .42 .38 .34  τ≈1.66`, or nothing if these are other logs."""
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs or f"{prefix}tau" not in logs:
        return ""
    accuracy = [v for k, v in logs.items() if k.startswith(f"{prefix}accuracy_")]
    parts = [f"loss {logs[f'{prefix}loss']:.3f}", "accuracy " + " ".join(f"{a:.3f}" for a in accuracy), f"τ≈{logs[f'{prefix}tau']:.2f}"]
    if "learning_rate" in logs:
        parts.append(f"lr {logs['learning_rate']:.1e}")
    return ("held out: " if prefix else "") + "  ".join(parts)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingStopped(ForedraftError):
    """A signal ended the training after a whole step; names the checkpoint, and how to go on."""

    def __init__(self, number: int, step: int, steps: int, checkpoint: str):
        self.status = 128 + number
        super().__init__(
            f"stopped by {signal.Signals(number).name} after step {step} of {steps}; '{checkpoint}' is complete.\n"
            "  To go on: the same command again, in Python trainer.train(resume_from_checkpoint=True)"
        )


class StopOnSignal(TrainerCallback):
    """Ends a training at the end of a step once a signal has come, to any of the ranks: all end at the same one."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.group: Any = None
        self.received: int = 0
        """By this rank, at any time."""
        self.agreed: int = 0
        """Among all, at the end of the latest step: what they do must not hang on what only some have received since."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted within the block; Python lets only the main thread do that, elsewhere they act as ever."""
        self.received = self.agreed = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

        def note(number: int, frame: Any) -> None:
            self.received = number
            restore()
            print(f"{signal.Signals(number).name}: this step is finished, then a checkpoint written; again ends at once", file=sys.stderr)

        try:
            for number in SIGNALS:
                signal.signal(number, note)
            yield
        finally:
            restore()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint, and for the end."""
        self.agreed = self.received
        if self.accelerator.num_processes > 1:
            self.group = self.group or dist.new_group(backend="gloo")  # by way of the devices all would wait for them
            number = torch.tensor(self.received)
            dist.all_reduce(number, dist.ReduceOp.MAX, self.group)
            self.agreed = int(number)
        if self.agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is there, and no time for an evaluation."""
        if self.agreed:
            control.should_save = control.should_evaluate = False
