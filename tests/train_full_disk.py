"""Run by test_training.py: trains until a write fails. Arguments: output directory, the largest file that may be written from step 3 on."""

import resource
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401
from rigged import predictable_target, trainer_of, written_rows
from tiny import tiny_draft
from transformers import TrainerCallback

from foredraft import ForedraftError

RUN = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


class FullDisk(TrainerCallback):
    """Files above the limit fail to be written, as on a full disk; the signal that comes with it is ignored by Python."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))


if __name__ == "__main__":
    target = predictable_target()
    trainer = trainer_of(tiny_draft(target, ttt_steps=2), target, Path(sys.argv[1]), written_rows(target), **RUN)
    trainer.add_callback(FullDisk)
    try:
        trainer.train()
    except ForedraftError as error:
        sys.exit(f"Error: {error}")
