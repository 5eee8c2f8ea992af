"""Progress of a training: a bar or none, and a line of loss, accuracy per drafted position and estimated τ at each log."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..data import DraftCollator


class SeedByEpoch(TrainerCallback):
    """Tells the collator the epoch, which seeds what it draws."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Before the epoch's first batch."""
        collate = getattr(train_dataloader, "collate_fn", None)
        if isinstance(collate, DraftCollator):
            collate.epoch = int(state.epoch or 0)


class AsAskedNow(TrainerCallback):
    """A resumed training logs, saves and evaluates as it is asked to now, and its learning rate is that of a run of its length now.

    Trainer takes all that from the checkpoint, the rate for one step: after a finished run it would be 0.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any) -> None:
        """After the checkpoint is loaded."""
        state.compute_steps(args, state.max_steps)
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
            self.training_bar.write(_line(state.global_step, logs))


class DraftPrinter(PrinterCallback):
    """The same line without a bar (`disable_tqdm`)."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Print the line."""
        if state.is_world_process_zero and logs:
            print(_line(state.global_step, logs), flush=True)


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


def _line(step: int, logs: dict[str, float]) -> str:
    line = summary(logs)
    return f"step {step}: {line}" if line else str(logs)
