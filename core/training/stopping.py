"""SIGTERM and Ctrl-C: the step is finished and a checkpoint written; a second signal ends at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from ..errors import ForedraftError

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
        self.received: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted within the block; Python lets only the main thread do that, elsewhere they act as ever."""
        self.received = 0
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
        if self.accelerator.num_processes > 1:
            number = torch.tensor([self.received], device=self.accelerator.device)
            self.received = int(self.accelerator.gather(number).max())
        if self.received:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is there, and no time for an evaluation."""
        if self.received:
            control.should_save = control.should_evaluate = False
