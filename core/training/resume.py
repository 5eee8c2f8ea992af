"""A run's directory: nobody else trains there; whether the run goes on, and from which checkpoint: the newest may be half there."""

import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from datasets import Dataset
from filelock import FileLock, Timeout
from transformers.utils import logging

from ..errors import ForedraftError
from ..files.ours import check_weights
from ..files.writing import write_text
from .defaults import DraftTrainingArguments
from .settings import RunConfig

logger = logging.get_logger("foredraft")

RUN_FILE = "run.json"
"""The settings of the run that wrote an output_dir, a digest of its rows, and whether it came to its end."""
LENGTH = ("training.max_steps", "training.num_train_epochs")
FREE = re.compile(
    r"resume|output_dir|kernel|compile|eval_data|data\.strict|hidden_states_cache|(device_map|tp_plan)(\..*)?|"
    r"training\.((logging|save|eval|log|hub|report)_\w+|max_steps|num_train_epochs|"
    r"per_device_(train|eval)_batch_size|gradient_accumulation_steps|fsdp|disable_tqdm|run_name|push_to_hub|dataloader_(num_workers|pin_memory|prefetch_factor|persistent_workers))"
)
"""Settings that change nothing in the result, or only how far it is trained; how many rows make a step is compared as a whole."""
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


def earlier_run(config: RunConfig) -> dict[str, Any]:
    """What `run.json` says of the run that `config` goes on with, nothing where none was begun or `resume` is false.

    Raises `ForedraftError` that names the settings that differ, if they change the result: a finished checkpoint would otherwise pass for
    the new run's result.
    """
    file = Path(config.output_dir) / RUN_FILE
    if not (config.resume and file.exists()):
        return {}
    noted: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    before, now = dict(_flat(noted)), dict(_flat(json.loads(config.model_dump_json())))
    defaults = {key: field.default for key, field in RunConfig.model_fields.items()}
    changed = [
        f"{key}: {was!r} then, {now.get(key)!r} now"
        for key in sorted({*before, *now} - {"rows", "finished", "ranks"})
        if not FREE.fullmatch(key) and (was := before.get(key, defaults.get(key))) != now.get(key)
    ]
    length = [(key, before.get(key), now.get(key)) for key in LENGTH if before.get(key) != now.get(key)]
    were = noted.get("ranks", ranks())
    are = were if noted.get("finished") and not length else ranks()  # nothing is left for these to train
    if (then := rows_of(noted["training"]) * were) != (rows := rows_of(config.training) * are):
        changed.append(
            f"rows per step: {then} then, {rows} now (per_device_train_batch_size × gradient_accumulation_steps × {are} ranks, {were} then)"
        )
    if changed and (noted.get("finished") or latest_complete(config.output_dir)):
        raise ForedraftError(
            f"'{config.output_dir}' belongs to a run with other settings:\n  " + "\n  ".join(changed) + "\n"
            "  Choose another output_dir, or resume=false to start anew in this one"
        )
    return {**noted, "length": length}


def note(config: RunConfig, rows: Dataset, finished: bool) -> None:
    """Write `run.json`."""
    fields = {**json.loads(config.model_dump_json()), "rows": digest(rows), "finished": finished, "ranks": ranks()}
    write_text(Path(config.output_dir) / RUN_FILE, json.dumps(fields, indent=1))


def rows_of(training: Mapping[str, Any]) -> int:
    """A step's, on each rank."""
    fields = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return math.prod(int(training.get(name, getattr(DraftTrainingArguments, name))) for name in fields)


def ranks() -> int:
    """How many processes torchrun, or Accelerate, has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def digest(rows: Dataset) -> str:
    """Of what is trained on: tokens, spans and images."""
    found = hashlib.sha256()
    for name in ("input_ids", "spans", *(["pixels"] if "pixels" in rows.column_names else [])):
        for chunk in rows.data.column(name).chunks:
            for buffer in (chunk if name == "pixels" else chunk.flatten().cast("int64")).buffers():
                found.update(buffer or b"")
    return found.hexdigest()[:16]


def _flat(fields: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{key}.")
        elif value != {}:
            yield within + key, value


LOCK, NOTE = ".training.lock", ".training.json"
"""The lock's file, and who holds it."""


@contextmanager
def alone_in(directory: str | Path) -> Iterator[None]:
    """Nobody else trains into `directory` within the block, which may be entered again inside; of several ranks the first stands for all.

    Raises `ForedraftError` that names the other, or if the directory cannot be written.
    """
    directory = Path(directory)
    if int(os.environ.get("RANK", "0")):
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.resolve() / LOCK, timeout=0, is_singleton=True)
        outermost = not lock.is_locked
        lock.acquire()
    except Timeout:
        raise ForedraftError(
            f"output_dir: in '{directory}' trains {_who(directory / NOTE)}\n  wait for it, end it, or choose another output_dir"
        ) from None
    except OSError as error:
        raise ForedraftError(f"output_dir: '{directory}' cannot be written: {error.strerror}; choose another directory") from error
    try:
        if outermost:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            write_text(directory / NOTE, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        yield
    finally:
        if outermost:
            with suppress(OSError):
                (directory / NOTE).unlink()
        lock.release()


def _who(note: Path) -> str:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
