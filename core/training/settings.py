"""The settings of a training run: a YAML file and `key=value` overrides, their keys and types checked without loading torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from ..contracts.loading import Rendering
from ..contracts.options import Frozen
from ..errors import ForedraftError, describe_validation
from ..registry import DEFAULT_ALGORITHM
from .arguments import check_training

ABOVE = {"output_dir": "output_dir", "resume_from_checkpoint": "resume"}
ABOVE |= dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "compile")
"""What is said beside `training`, not in it."""


class Source(Frozen):
    """A source of conversations in a mix."""

    path: str = Field(description="JSONL, JSON or parquet file, glob, folder, hub id")
    weight: float = Field(1.0, gt=0, description="how often each of its conversations is taken: 2 is twice, 0.5 a drawn half of them")


class DataConfig(Frozen):
    """Where the conversations come from and how they are packed."""

    train: Annotated[list[str | Source], Field(min_length=1)] | Source | str = Field(
        description="source(s) of conversations: JSONL, JSON or parquet files, globs, folders, hub ids; or `path` and `weight` of each"
    )
    split: str = Field("train", description="split of each source, as in train[:1000]; a file or glob is one split, by any name")
    strict: bool = Field(False, description="stop at the first record that cannot be used, instead of skipping and counting it")
    limit: int | None = Field(None, ge=1, description="use only the first so many conversations of each source")
    held_out: int = Field(0, ge=0, description="conversations of the first source kept out of training, to evaluate on")
    held_out_seed: int = Field(0, description="which ones")
    max_length: int = Field(1024, ge=8, description="tokens per packed row; longer conversations are cut")


class RunConfig(Rendering):
    """A whole training run; what it inherits says how its target is loaded."""

    target: str = Field(
        description="directory or hub id of the target, or a mapping: its `name`, `dtype`, and any of the keys that say how it is loaded"
    )
    output_dir: str = Field(description="checkpoints, the finished draft (draft/), training.json and training.png go here")
    data: DataConfig
    eval_data: Annotated[list[str], Field(min_length=1)] | str | None = Field(
        None, description="source(s) of conversations to evaluate on, as in data.train; what is among them is not trained on"
    )
    draft: str | None = Field(
        None, description="directory or hub id of a draft to start from, ours or any that `foredraft import` reads; it has its own shape"
    )
    algorithm: str = Field(DEFAULT_ALGORITHM, description="drafting algorithm")
    options: dict[str, Any] = Field({}, description="options of the algorithm")
    adapter: str | None = Field(None, description="adapter by name; by default the one for the target's model_type")
    aux_layers: list[int] | None = Field(None, description="target layers to read, as HF hidden_states indices")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="most frequent tokens the draft may propose; default: the target's vocabulary, or that of `draft`"
    )
    train_embedding: bool = Field(False, description="train the draft's token embedding too; by default it stays the target's")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="dtype the target runs in")
    hidden_states_cache: str | None = Field(
        None, description="directory to keep the target's hidden states in, captured before the first step; worth it from two epochs on"
    )
    hidden_states_dtype: Literal["auto", "bfloat16", "float8"] = Field(
        "auto", description="what they are kept in: the target's own dtype, bfloat16, or float8 with a scale for every state"
    )
    hidden_states_room: float | None = Field(
        None, gt=0, description="GiB that they may take: `foredraft capture` runs beside training, which removes what it has read"
    )
    kernel: Literal["auto", "flash", "flash-attn", "flex", "eager"] = Field(
        "auto",
        description="of attention in training: torch's own flash, flash-attn (the package), FlexAttention, or eager; auto: what runs here",
    )
    compile: bool = Field(False, description="compile what lies between a layer's products, see `BaseDraft.compile`")
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest", description="of float32 products (torch.set_float32_matmul_precision)"
    )
    resume: bool = Field(True, description="continue from the newest complete checkpoint in output_dir")
    training: dict[str, Any] = Field({}, description="fields of transformers.TrainingArguments")

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, fields: Any) -> Any:
        """What a target's mapping says, under the run's own keys."""
        target = fields.get("target") if isinstance(fields, Mapping) else None
        if not isinstance(target, Mapping):
            return fields
        own = {"name": "target", "dtype": "target_dtype", **{name: name for name in Rendering.model_fields}}
        said = {own.get(key, f"target.{key}"): value for key, value in target.items()}
        twice = [f"{key} is said beside the target, and in it: leave one out" for key in said if key in fields and key != "target"]
        if twice:
            raise ForedraftError("\n  ".join(twice))
        return {**{key: value for key, value in fields.items() if key != "target"}, **said}

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values). Paths in it are relative to the current directory.

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
        """Validate all keys and the types of their values; what they name is looked at by `train`, before it loads anything.

        Raises `ForedraftError` that lists everything wrong.
        """
        problems = []
        config = None
        try:
            config = cls.model_validate(fields)
        except ValidationError as error:
            within = {"data": DataConfig.model_fields, "target": ("name", "dtype", *Rendering.model_fields)}
            known = dict.fromkeys([*cls.model_fields, *(f"{key}.{k}" for key, names in within.items() for k in names)])
            problems.append(describe_validation(error, known))
        training = fields.get("training")
        training = training if isinstance(training, dict) else {}
        typed, wrong = check_training(training)
        wrong += [f"training.{key}: set {above}, one level up" for key, above in ABOVE.items() if key in training]
        if wrong or problems or config is None:
            raise ForedraftError(f"{where}:\n  " + "\n  ".join(problems + wrong))
        return config.model_copy(update={"training": typed})


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
