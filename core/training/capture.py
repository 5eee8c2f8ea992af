"""The states that a run will read, captured by themselves: by another engine, on another machine, or before several ranks train."""

import tempfile
from pathlib import Path
from typing import Any

from ..contracts.aux_layers import BEFORE_NORM
from ..errors import ForedraftError
from ..registry import default_registry
from ..serving import Server
from ..serving.process import running_engine
from ..target.cached import CachedTarget
from ..target.extraction import Extraction
from ..target.loading import load_config, load_target
from ..target.store import Source, Store, Wanted
from ..target.streaming import stream
from .checks import check_run, open_start
from .inputs import as_arrays
from .run import fresh_draft, packed_rows
from .settings import RunConfig
from .stored import store_of_run


def capture(
    config: RunConfig, batch_size: int = 8, engine: str | None = None, base_url: str | None = None, engine_arguments: str | None = None
) -> Wanted | int:
    """Store what the run reads in its `hidden_states_cache`; a capture that was ended goes on.

    With `hidden_states_room` it captures beside training, until that is finished, and returns how many rows.

    The target runs in this process; in an `engine` that is started for it, with more `engine_arguments`; or in the server at `base_url`.
    Raises `ForedraftError` where the run cannot start, or the states cannot be had or stored.
    """
    if config.hidden_states_cache is None:
        raise ForedraftError("hidden_states_cache: the run names no directory to keep hidden states in")
    arguments = check_run(config)
    tokenizer, *packed = packed_rows(config)
    sets: list[Any] = [rows for rows in packed if rows is not None]
    target = load_config(config.target, config)
    draft = open_start(config) if config.draft else fresh_draft(config, target)
    layers, needs = draft.config.aux_layers, draft.algorithm.needs

    def fill(store: Store, source: Source, rows_at_once: int) -> Wanted | int:
        if config.hidden_states_room is None:
            return store.fill(sets, source, rows_at_once)
        return stream(store, as_arrays(sets[0]), arguments.seed, round(config.hidden_states_room * 2**30), source, rows_at_once)

    if engine is None and base_url is None:
        model = load_target(config.target, config.target_dtype, config, arguments.device)
        kept: Any = {"kept": config.hidden_states_dtype, "tokenizer": tokenizer}
        cached = CachedTarget(model, layers, config.hidden_states_cache, needs, **kept)
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
        extraction = Extraction(server, config.target, target, layers, needs, dtype)
        return fill(store, extraction, 4 * extraction.concurrency)

    if base_url is not None:
        return by(Server(base_url))
    last = target.get_text_config().num_hidden_layers  # which engines hand out as it is before the norm
    read = list(dict.fromkeys([*(last if i == BEFORE_NORM else i for i in layers), *([last] if "final" in needs else [])]))
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        started = default_registry().engine(str(engine))()
        command = started.extraction(config.target, read, directory)
        if command is None:
            raise ForedraftError(f"engine '{engine}' extracts no hidden states; leave --engine out, and transformers runs the target")
        more = started.repository_arguments(config, str(dtype).removeprefix("torch."))
        with running_engine([*command, *more], engine_arguments) as url:
            return by(Server(url))


def _memory() -> str | None:
    """Where files that are read at once are written: memory, if the machine has such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
