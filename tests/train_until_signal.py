"""Run by test_resume.py: a training that gets SIGTERM within its second step. Arguments: directory, how often it is sent."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401
from rigged import predictable_target, trainer_of, written_rows
from tiny import tiny_draft
from transformers import TrainerCallback

from foredraft import ForedraftError


class Signals(TrainerCallback):
    """Within the second step, where it is not expected."""

    def __init__(self, number: int, times: int):
        self.number, self.times = number, times

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for _ in range(self.times if state.global_step == 1 else 0):
            os.kill(os.getpid(), self.number)


if __name__ == "__main__":
    target = predictable_target()
    trainer = trainer_of(tiny_draft(target, ttt_steps=1), target, Path(sys.argv[1]), written_rows(target))
    trainer.add_callback(Signals(signal.SIGTERM, int(sys.argv[2])))
    try:
        trainer.train()
    except ForedraftError as error:
        sys.exit(error.status)
