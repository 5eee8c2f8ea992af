"""Which checkpoint a run can be resumed from: Trainer writes them in place, so the newest may be half there."""

import json
from pathlib import Path

from transformers.utils import logging

from ..checkpoint import check_weights
from ..errors import ForedraftError

logger = logging.get_logger("foredraft")

NEEDED = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "config.json")


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """The `checkpoint-N` folders of a run, oldest first."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.rsplit("-", 1)[1].isdigit()]
    return sorted(folders, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def why_incomplete(checkpoint: Path) -> str | None:
    """What keeps a checkpoint from being resumed, or None."""
    if missing := [name for name in NEEDED if not (checkpoint / name).exists()]:
        return f"no {', '.join(missing)}"
    try:
        check_weights(checkpoint)
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (ForedraftError, ValueError) as error:
        return str(error)
    return None


def latest_complete(output_dir: str | Path | None) -> Path | None:
    """The newest checkpoint that is whole; a warning names each one skipped."""
    for checkpoint in reversed(checkpoints_of(output_dir or ".")):
        reason = why_incomplete(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning(f"checkpoint '{checkpoint}' is incomplete and is skipped: {reason}")
    return None
