"""The states that a run will read, captured by themselves: by another engine, on another machine, or before several ranks train."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..contracts.aux_layers import BEFORE_NORM
from ..data import Reader
from ..data.spread import Work, spread
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..progress import Progress
from ..registry import default_registry
from ..serving import Server
from ..serving.process import running_engine
from ..target.capture import depth_of
from ..target.extraction import Extraction
from ..target.loading import load_config, load_target
from ..target.store import SHARD, Source, Store, Wanted
from ..target.streaming import stream
from .checks import check_run
from .ready import as_arrays
from .run import cached_target, draft_of, packed_rows, store_of_run
from .settings import RunConfig


def capture(
    config: RunConfig,
    batch_size: int = 8,
    engine: str | None = None,
    base_url: str | None = None,
    engine_arguments: str | None = None,
    workers: int | None = None,
) -> Wanted | int:
    """Store what the run reads in its `hidden_states_cache`; a capture that was ended goes on.

    With `hidden_states_room` it captures beside training, until that is finished, and returns how many rows.

    The target runs in this process; in each of several `workers`, which Ray places; in an `engine` that is started for it, with more
    `engine_arguments`; or in the server at `base_url`.
    Raises `ForedraftError` where the run cannot start, or the states cannot be had or stored.
    """
    if config.hidden_states_cache is None:
        raise ForedraftError("hidden_states_cache: the run names no directory to keep hidden states in")
    arguments = check_run(config)
    tokenizer, *packed = packed_rows(config)
    sets: list[Any] = [rows for rows in packed if rows is not None]
    target = load_config(config.target, config)
    draft = draft_of(config, target)
    layers, needs = draft.config.aux_layers, draft.algorithm.needs

    def fill(store: Store, source: Source, rows_at_once: int) -> Wanted | int:
        if config.hidden_states_room is None:
            return store.fill(sets, source, rows_at_once)
        return stream(store, as_arrays(sets[0]), arguments.seed, round(config.hidden_states_room * 2**30), source, rows_at_once)

    if workers is not None:
        return _spread(config, draft, tokenizer, sets, workers, batch_size)
    if engine is None and base_url is None:
        model = load_target(config.target, config.target_dtype, config, arguments.device)
        cached = cached_target(config, draft, tokenizer, model)
        return fill(cached.store, cached.run, batch_size)
    if any("pixels" in rows.column_names for rows in sets):
        raise ForedraftError(
            "the data has images, and engines are given ids alone: leave engine and base_url out, transformers runs the target"
        )
    store = store_of_run(config, draft, tokenizer)
    if store is None:
        raise ForedraftError(f"an engine's states are told by its target's files: '{config.target}' must be a directory of safetensors")
    dtype = store.form.dtype

    def by(server: Server) -> Wanted | int:
        extraction = Extraction(server, config.target, target, layers, store.of["needs"], dtype)
        return fill(store, extraction, 4 * extraction.concurrency)

    if base_url is not None:
        return by(Server(base_url))
    last = depth_of(target)  # which engines hand out as it is before the norm
    read = list(dict.fromkeys([*(last if i == BEFORE_NORM else i for i in layers), *([last] if "final" in needs else [])]))
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        started = default_registry().engine(str(engine))()
        command = started.extraction(config.target, read, directory)
        if command is None:
            raise ForedraftError(f"engine '{engine}' extracts no hidden states; leave --engine out, and transformers runs the target")
        more = started.repository_arguments(config, str(dtype).removeprefix("torch."))
        with running_engine([*command, *more], engine_arguments) as url:
            return by(Server(url))


def _spread(config: RunConfig, draft: BaseDraft, tokenizer: Reader, sets: list[Any], workers: int, batch_size: int) -> Wanted:
    """Every worker writes shards of its own; what a killed run has written stays."""
    store = store_of_run(config, draft, tokenizer)
    if store is None or config.hidden_states_room is not None:
        raise ForedraftError(
            f"several workers store the states of a directory of safetensors, without hidden_states_room: found '{config.target}'"
        )
    with store.filling(sets) as wanted:
        each = max(batch_size, min(len(wanted.rows) // (4 * workers), SHARD * len(wanted.rows) // max(1, wanted.to_write)))
        with Progress("capturing documents", wanted.documents, wanted.documents - wanted.missing, wanted.missing > 0) as advance:
            places = range(len(wanted.rows))
            for written in spread(places, partial(_begin, config, wanted.rows, batch_size), workers, each) if wanted.missing else ():
                advance(written)
    return wanted


def _begin(config: RunConfig, rows: list[tuple[int, int]], batch_size: int) -> Work:
    """In a worker: the target, and what stores some of the rows; returns how many documents."""
    tokenizer, *packed = packed_rows(config)
    sets = [part for part in packed if part is not None]
    draft = draft_of(config, load_config(config.target, config))
    model = load_target(config.target, config.target_dtype, config, "cuda" if torch.cuda.is_available() else "cpu")
    cached = cached_target(config, draft, tokenizer, model)

    def store(places: list[int]) -> list[int]:
        written = list[int]()
        cached.store.shards.refresh()
        cached.store.take(sets, [rows[place] for place in places], cached.run, batch_size, written.append)
        return [sum(written)]

    return store


def _memory() -> str | None:
    """Where files that are read at once are written: memory, if the machine has such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
