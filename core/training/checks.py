"""What can be known of a run before data is packed and the target's weights are loaded: looked at together, told together."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..auto import make_algorithm
from ..data import read_records
from ..draft.model import BaseDraft
from ..draft.start import check_fits
from ..errors import ForedraftError, gathering
from ..files.writing import check_place
from ..registry import default_registry
from ..target.loading import load_config
from .defaults import DraftTrainingArguments
from .settings import RunConfig, Source


def check_run(config: RunConfig) -> DraftTrainingArguments:
    """The run's training arguments. Raises `ForedraftError` that lists all that keeps the run from starting."""
    problems: list[str] = []
    for source in sources(config.data.train) + sources(config.eval_data or []):
        with gathering(problems):
            next(read_records(source.path, config.data.split, few=True), None)
    for key, directory in (("output_dir", config.output_dir), ("hidden_states_cache", config.hidden_states_cache)):
        with gathering(problems):
            if directory is not None:
                check_writable(directory, key)
    with gathering(problems):
        check_place(Path(config.output_dir) / "draft")
    (check_settled if config.draft else check_draft)(config, problems)
    if config.eval_data and config.data.held_out:
        problems.append("eval_data and data.held_out both say what to evaluate on: leave one of them out")
    if config.hidden_states_room is not None and (config.eval_data or config.data.held_out or not config.hidden_states_cache):
        problems.append(
            "hidden_states_room: states are streamed through hidden_states_cache, and only those that are trained on: name a directory "
            "there, leave out eval_data and data.held_out"
        )
    with gathering(problems):
        arguments = DraftTrainingArguments(**{"save_strategy": "epoch", **config.training, "output_dir": config.output_dir})
        if arguments.eval_strategy != "no" and not (config.data.held_out or config.eval_data):
            problems.append("training.eval_strategy asks for evaluations: set eval_data or data.held_out, there is nothing to evaluate on")
    if problems:
        raise ForedraftError("this run cannot start:\n  " + "\n  ".join(problems))
    return arguments


def check_writable(directory: str | Path, what: str) -> None:
    """Raises `ForedraftError` unless `directory` can be written, or made; leaves nothing behind."""
    there = Path(directory).absolute()
    try:
        while not there.exists():
            there = there.parent
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        why = "it is no directory" if there.is_file() else error.strerror
        raise ForedraftError(f"{what}: '{directory}' cannot be written, for '{there}': {why}; choose another directory") from error


def check_draft(config: RunConfig, problems: list[str]) -> None:
    """Adds to `problems` what keeps a draft as asked for (algorithm, adapter, layers, vocabulary) from fitting the target's config."""
    known, registry = len(problems), default_registry()
    with gathering(problems):
        method = make_algorithm(config.algorithm, config.options, registry)
    with gathering(problems):
        target = load_config(config.target, config)
    with gathering(problems):
        adapter = registry.adapter(config.adapter) if config.adapter else None
    if len(problems) > known:
        return
    with gathering(problems):
        adapter = adapter or registry.adapter_for(target.get_text_config().model_type, target)
        adapter.make_config(target, method, tuple(config.aux_layers or ()) or None, config.draft_vocab_size)
    with gathering(problems):
        check_embedding(config, method)
    if config.training.get("gradient_checkpointing") and method.spec.num_layers == 0:
        problems.append(
            f"training.gradient_checkpointing: a draft by algorithm '{method.name}' has no layers to compute again: leave it out"
        )


def check_settled(config: RunConfig, problems: list[str]) -> None:
    """Adds to `problems` what a draft to start from has settled already, and is asked for all the same."""
    problems += [
        f"{key}: the draft to start from, '{config.draft}', has its own: leave out {key}, or draft"
        for key in ("adapter", "aux_layers")
        if getattr(config, key) is not None
    ]


def open_start(config: RunConfig) -> BaseDraft:
    """The draft that a run starts from. Raises `ForedraftError` if it is none, or does not fit the target, the algorithm or its options."""
    from ..formats import open_draft

    asked = config.algorithm if "algorithm" in config.model_fields_set else None
    try:
        draft = open_draft(str(config.draft), config.target, asked, loading=config, **config.options)
        check_fits(draft.config, load_config(config.target, config))
    except ForedraftError as error:
        raise ForedraftError(f"the draft to start from, '{config.draft}': {error}") from error
    check_embedding(config, draft.algorithm)
    return draft


def check_embedding(config: RunConfig, method: Any) -> None:
    """Raises `ForedraftError` where an embedding is to be trained that the draft does not have, or does not read."""
    if config.train_embedding and (method.spec.target_head or method.spec.num_layers == 0):
        why = "has no embedding of its own, it uses its target's" if method.spec.target_head else "reads no embedding"
        raise ForedraftError(f"train_embedding: a draft by algorithm '{method.name}' {why}")


def sources(named: Sequence[Source | str] | Source | str) -> list[Source]:
    """One source of conversations, or several, as a list."""
    several = [named] if isinstance(named, str | Source) else named
    return [Source.model_validate({"path": one}) if isinstance(one, str) else one for one in several]
