"""A training run described by a YAML file: checked as a whole before anything is loaded, then carried out."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import Field, ValidationError
from transformers import set_seed

from ..auto import DEFAULT_ALGORITHM, auto_draft, describe_validation, make_algorithm
from ..checkpoint import save_draft, write_text
from ..data import Conversations, pack
from ..errors import ForedraftError, nearest
from ..protocols import Frozen
from ..registry import default_registry
from ..target import Target, load_target, load_tokenizer
from ..vocabulary import choose_vocabulary, count_tokens
from .cache import CachedTarget
from .plot import plot_training
from .trainer import DraftTrainer, DraftTrainingArguments


class DataConfig(Frozen):
    """Where the conversations come from and how they are packed."""

    train: Annotated[list[str], Field(min_length=1)] | str = Field(description="JSONL, parquet or datasets source(s) of conversations")
    limit: int | None = Field(None, ge=1, description="use only the first so many conversations of each source")
    held_out: int = Field(0, ge=0, description="conversations of the first source kept out of training, to evaluate on")
    held_out_seed: int = Field(0, description="which ones")
    max_length: int = Field(1024, ge=8, description="tokens per packed row; longer conversations are cut")


class RunConfig(Frozen):
    """A whole training run."""

    target: str = Field(description="directory or hub id of the target")
    output_dir: str = Field(description="checkpoints, the finished draft (draft/), training.json and training.png go here")
    data: DataConfig
    algorithm: str = Field(DEFAULT_ALGORITHM, description="drafting algorithm")
    options: dict[str, Any] = Field({}, description="options of the algorithm")
    adapter: str | None = Field(None, description="adapter by name; by default the one for the target's model_type")
    aux_layers: list[int] | None = Field(None, description="target layers to read, as HF hidden_states indices")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="most frequent tokens the draft may propose; default: the target's vocabulary"
    )
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="dtype the target runs in")
    hidden_states_cache: str | None = Field(
        None, description="directory to keep the target's hidden states in; worth it from the second epoch on"
    )
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest", description="of float32 products (torch.set_float32_matmul_precision)"
    )
    resume: bool = Field(True, description="continue from the newest complete checkpoint in output_dir")
    training: dict[str, Any] = Field({}, description="fields of transformers.TrainingArguments")

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values).

        Raises `ForedraftError` that lists everything wrong, each unknown key with the nearest known one.
        """
        try:
            fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ForedraftError(f"run file '{path}': {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ForedraftError(f"run file '{path}' is no YAML: {error}") from error
        if not isinstance(fields, dict):
            raise ForedraftError(f"run file '{path}' holds {type(fields).__name__}, expected keys: {', '.join(cls.model_fields)}")
        for override in overrides:
            _override(fields, override)
        return cls.check(fields, str(path))

    @classmethod
    def check(cls, fields: Mapping[str, Any], where: str = "run") -> "RunConfig":
        """Validate fields, the algorithm's options and the training arguments together."""
        problems = []
        config = None
        try:
            config = cls.model_validate(fields)
        except ValidationError as error:
            known = {**cls.model_fields, **{f"data.{k}": v for k, v in DataConfig.model_fields.items()}}
            problems.append(describe_validation(error, known))
        training, options, algorithm = (fields.get(key) for key in ("training", "options", "algorithm"))
        known_arguments = [f.name for f in dataclasses.fields(DraftTrainingArguments) if f.init]
        for key in training if isinstance(training, dict) else ():
            if key not in known_arguments:
                problems.append(f"unknown training argument '{key}'{nearest(key, known_arguments)} (see transformers.TrainingArguments)")
            elif key == "output_dir":
                problems.append("training.output_dir: set output_dir, one level up")
        try:
            make_algorithm(str(algorithm or DEFAULT_ALGORITHM), options if isinstance(options, dict) else {}, default_registry())
        except ForedraftError as error:
            problems.append(str(error))
        if problems or config is None:
            raise ForedraftError(f"{where}:\n  " + "\n  ".join(problems))
        return config


def train(config: RunConfig) -> Path:
    """Carry out a run; returns the directory of the finished draft, `output_dir/draft`."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    arguments = _arguments(config)
    tokenizer, model = load_tokenizer(config.target), load_target(config.target, config.target_dtype)
    conversations, held_out = load_split(config.data)
    rows = pack(conversations, tokenizer, config.data.max_length)
    eval_rows = pack(held_out, tokenizer, config.data.max_length) if held_out else None
    print(f"training data: {rows.info.description}", flush=True)
    set_seed(arguments.seed)
    draft = auto_draft(
        model.config,
        config.algorithm,
        adapter=config.adapter,
        aux_layers=tuple(config.aux_layers) if config.aux_layers else None,
        draft_vocab_size=config.draft_vocab_size,
        **config.options,
    )
    if config.draft_vocab_size:
        draft.set_draft_vocabulary(choose_vocabulary(count_tokens(rows, draft.config.vocab_size), config.draft_vocab_size))
    layers = draft.config.aux_layers
    target = CachedTarget(model, layers, config.hidden_states_cache) if config.hidden_states_cache else Target(model, layers)
    draft.start_from(target)
    trainer = DraftTrainer(draft, target, arguments, train_dataset=rows, eval_dataset=eval_rows)
    trainer.train(resume_from_checkpoint=config.resume)
    if eval_rows is not None and arguments.eval_strategy == "no":
        trainer.evaluate()
    output = Path(config.output_dir)
    write_text(output / "training.json", json.dumps({"run": config.model_dump(), "history": trainer.state.log_history}, indent=1))
    plot_training(trainer.state.log_history, output / "training.png")
    return save_draft(draft, output / "draft")


def _arguments(config: RunConfig) -> DraftTrainingArguments:
    try:
        # A bar on a terminal, lines in a log file.
        defaults = {"save_strategy": "epoch", "disable_tqdm": not sys.stderr.isatty()}
        arguments = DraftTrainingArguments(**{**defaults, **config.training, "output_dir": config.output_dir})
    except (ValueError, TypeError, ImportError) as error:
        raise ForedraftError(f"training arguments: {error}") from error
    if arguments.eval_strategy != "no" and not config.data.held_out:
        raise ForedraftError("training.eval_strategy asks for evaluations: set data.held_out, there is nothing to evaluate on")
    return arguments


def load_split(data: DataConfig) -> tuple[Conversations, Conversations]:
    """(train, held out): what is held out comes from the first source, so that more training data leaves it the same."""
    first, *others = [data.train] if isinstance(data.train, str) else data.train
    conversations, held_out = _load(first, data.limit).holding_out(data.held_out, data.held_out_seed)
    for other in others:
        conversations = Conversations([*conversations, *_load(other, data.limit)], f"{conversations.source}, {other}")
    return conversations, held_out


def _load(source: str, limit: int | None) -> Conversations:
    return Conversations(Conversations.load(source)[:limit], source)


def _override(fields: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ForedraftError(f"override '{override}': expected key=value, as in training.learning_rate=1e-4")
    *parents, leaf = key.split(".")
    for parent in parents:
        if fields.get(parent) is None:
            fields[parent] = {}
        fields = fields[parent]
        if not isinstance(fields, dict):
            raise ForedraftError(f"override '{override}': '{parent}' holds a value, no keys")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ForedraftError(f"override '{override}': '{value}' is no YAML value: {error}") from error
    with suppress(ValueError):  # YAML reads 1e-4 as text
        parsed = float(parsed) if isinstance(parsed, str) else parsed
    fields[leaf] = parsed
