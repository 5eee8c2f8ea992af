"""A training run described by a YAML file: checked as a whole before anything is loaded, then carried out."""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
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
from .cache import CachedTarget
from .plot import plot_training
from .resume import latest_complete
from .trainer import DraftTrainer, DraftTrainingArguments

RUN_FILE = "run.json"
"""The settings of the run that wrote an output_dir."""


class DataConfig(Frozen):
    """Where the conversations come from and how they are packed."""

    train: Annotated[list[str], Field(min_length=1)] | str = Field(description="JSONL, parquet or datasets source(s) of conversations")
    split: str = Field("train", description="split of hub data sets")
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
    train_embedding: bool = Field(False, description="train the draft's token embedding too; by default it stays the target's")
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
            fields = _yaml(Path(path).read_text(encoding="utf-8"))
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
            elif key in ("output_dir", "resume_from_checkpoint"):
                problems.append(f"training.{key}: set {key.split('_from')[0]}, one level up")
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
    _check_resume(config)
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
    spec = draft.config.spec
    if config.train_embedding and (spec.target_head or spec.num_layers == 0):
        raise ForedraftError(
            f"train_embedding: a draft by algorithm '{config.algorithm}' "
            + ("has no embedding of its own, it uses its target's" if spec.target_head else "reads no embedding")
        )
    draft.embed_tokens.requires_grad_(config.train_embedding)
    layers = draft.config.aux_layers
    target = CachedTarget(model, layers, config.hidden_states_cache) if config.hidden_states_cache else Target(model, layers)
    draft.start_from(target, rows)
    trainer = DraftTrainer(draft, target, arguments, train_dataset=rows, eval_dataset=eval_rows)
    if trainer.is_world_process_zero():
        write_text(Path(config.output_dir) / RUN_FILE, config.model_dump_json(indent=1))
    trainer.train(resume_from_checkpoint=config.resume)
    if eval_rows is not None and arguments.eval_strategy == "no":
        trainer.evaluate()
    finished = Path(config.output_dir) / "draft"
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        write_text(finished.parent / "training.json", json.dumps({"run": config.model_dump(), "history": history}, indent=1))
        plot_training(history, finished.parent / "training.png")
        save_draft(draft, finished)
    trainer.accelerator.wait_for_everyone()
    return finished


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


def _check_resume(config: RunConfig) -> None:
    """A run resumes what it was, or says what changed: a finished checkpoint would otherwise pass for the new run's result."""
    output = Path(config.output_dir)
    newest = latest_complete(output) if config.resume else None
    if newest is None or not (output / RUN_FILE).exists():
        return
    before, now = json.loads((output / RUN_FILE).read_text()), json.loads(config.model_dump_json())
    changed = [
        f"{key}: {before.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted({*before, *now} - {"resume"})
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise ForedraftError(
            f"'{newest}' belongs to a run with other settings:\n  " + "\n  ".join(changed) + "\n"
            "  Choose another output_dir, or resume=false to start anew in this one"
        )
    print(f"resuming from {newest}", flush=True)


def load_split(data: DataConfig) -> tuple[Conversations, Conversations]:
    """(train, held out): what is held out comes from the first source, so that more training data leaves it the same."""
    first, *others = [data.train] if isinstance(data.train, str) else data.train
    conversations, held_out = _load(first, data).holding_out(data.held_out, data.held_out_seed)
    for other in others:
        conversations = Conversations([*conversations, *_load(other, data)], f"{conversations.source}, {other}")
    return conversations, held_out


def _load(source: str, data: DataConfig) -> Conversations:
    return Conversations(Conversations.load(source, data.split)[: data.limit], source)


def parse_options(overrides: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts as a dict: dotted keys, YAML values. Raises `ForedraftError` naming the one that is neither."""
    fields: dict[str, Any] = {}
    for override in overrides:
        _override(fields, override)
    return fields


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
        fields[leaf] = _yaml(value)
    except yaml.YAMLError as error:
        raise ForedraftError(f"override '{override}': '{value}' is no YAML value: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text; here it is a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)
