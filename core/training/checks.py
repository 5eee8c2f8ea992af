"""What can be known of a run before data is packed and the target's weights are loaded: looked at together, told together."""

import sys
import tempfile
from pathlib import Path

from ..auto import make_algorithm
from ..data import read_records
from ..errors import ForedraftError, gathering
from ..registry import default_registry
from ..target import load_config
from .settings import RunConfig
from .trainer import DraftTrainingArguments


def check_run(config: RunConfig) -> DraftTrainingArguments:
    """The run's training arguments. Raises `ForedraftError` that lists all that keeps the run from starting."""
    problems: list[str] = []
    for source in [config.data.train] if isinstance(config.data.train, str) else config.data.train:
        with gathering(problems):
            next(read_records(source, config.data.split), None)
    for key, directory in (("output_dir", config.output_dir), ("hidden_states_cache", config.hidden_states_cache)):
        with gathering(problems):
            if directory is not None:
                check_writable(directory, key)
    check_draft(config, problems)
    with gathering(problems):
        # A bar on a terminal, lines in a log file.
        defaults = {"save_strategy": "epoch", "disable_tqdm": not sys.stderr.isatty()}
        arguments = DraftTrainingArguments(**{**defaults, **config.training, "output_dir": config.output_dir})
        if arguments.eval_strategy != "no" and not config.data.held_out:
            problems.append("training.eval_strategy asks for evaluations: set data.held_out, there is nothing to evaluate on")
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
    if config.train_embedding and (method.spec.target_head or method.spec.num_layers == 0):
        why = "has no embedding of its own, it uses its target's" if method.spec.target_head else "reads no embedding"
        problems.append(f"train_embedding: a draft by algorithm '{config.algorithm}' {why}")
