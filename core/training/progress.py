"""Progress of a training: one bar, and a line of loss, accuracy per drafted position and estimated τ at each log."""

from typing import Any

from transformers.trainer_callback import ProgressCallback

from ..data import DraftCollator


class DraftProgress(ProgressCallback):
    """Trainer's bar with a readable line instead of a dict."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write the line above the bar."""
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        line = summary(logs)
        self.training_bar.write(f"step {state.global_step}: {line}" if line else str(logs))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Tell the collator the epoch, which seeds what it draws."""
        collate = getattr(train_dataloader, "collate_fn", None)
        if isinstance(collate, DraftCollator):
            collate.epoch = int(state.epoch or 0)


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
