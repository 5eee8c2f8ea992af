"""Whether a target is the one a draft was made for: by its shape, its config, and a sample of its weights."""

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig, PreTrainedModel

from ..contracts.draft import DraftModel
from ..contracts.loading import PLAIN, Repository
from ..errors import ForedraftError
from ..files.reading import read_json
from .capture import depth_of
from .gguf import is_gguf
from .loading import load_config
from .sample import TABLES, base_of, others, sample_of, sample_of_files


def check_pair(target: PreTrainedModel, draft: DraftModel) -> None:
    """Raises `ForedraftError` unless the draft was made for a target of this shape; warns of other weights or another config.

    A draft that uses its target's embedding and head gets them.
    """
    check_shape(draft.config.foredraft["target"], target.config)
    warn_of_other(draft.config.foredraft["target"], target)
    if not draft.complete:
        draft.take_head(target)


def check_shape(made: Mapping[str, Any], target: PretrainedConfig) -> None:
    """Raises `ForedraftError` if a target's config has another shape than the one that `made` describes."""
    theirs = describe_target(target)
    differences = [
        f"{name}: the draft expects {made[name]}, the target has {theirs[name]}"
        for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        if made[name] != theirs[name]
    ]
    if differences:
        raise ForedraftError(
            f"this draft was made for another target ({made['name'] or made['model_type']}):\n  " + "\n  ".join(differences)
        )


def warn_of_other(made: Mapping[str, Any], target: PreTrainedModel) -> None:
    """One line if the target's weights, or fields of its config, are not those of the one that `made` describes."""
    _warn(made, target.config, sample_of(target))


def check_named(made: Mapping[str, Any], name: str, repository: Repository = PLAIN) -> None:
    """The same for a target that is not loaded, by its files: those in a directory, or in the hub's cache.

    Raises `ForedraftError` if there is no such directory, or one of another shape; warns where there is nothing to look at.
    """
    directory = Path(name)
    if is_gguf(name):
        config = load_config(name, repository)
        check_shape(made, config)
        _warn(made, config, {})
        return
    if not directory.is_dir():
        if directory.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
            raise ForedraftError(f"no target at '{name}': no such directory, and no id on the hub")
        cached = try_to_load_from_cache(name, "config.json", revision=repository.revision)
        if not isinstance(cached, str):
            warnings.warn(f"target '{name}' is no directory and not in the hub's cache: whether the draft fits it is open", stacklevel=3)
            return
        directory = Path(cached).parent
    if base_of(directory) is None:
        read_json(directory / "config.json")
    try:
        config = load_config(str(directory), repository)
    except ForedraftError as error:
        reason = str(error).split("\n")[0][:200]
        warnings.warn(f"the config of target '{name}' is not understood: whether the draft fits it is open ({reason})", stacklevel=3)
        return
    check_shape(made, config)
    _warn(made, config, *sample_of_files(directory))


def remember(config: Any, target: PreTrainedModel) -> None:
    """Record in a draft's config what weights its target has."""
    made = config.foredraft
    config.update({"foredraft": {**made, "target": {**made["target"], "sample": sample_of(target)}}})


def differences(made: Mapping[str, Any], found: Mapping[str, str], adapted: Iterable[str] = ()) -> tuple[list[str], bool]:
    """Which of a target's tables (`embedding`, `head`) are not those that `made` remembers; and whether it is another fine-tune of them.

    `adapted` are projections of `found` that an adapter changes. Raises `ValueError` for a malformed record.
    """
    known = made.get("sample") or {}
    other = others(known, found)
    tables = [name for name in other if name in TABLES]
    layers = {name for name in other if name not in TABLES}
    bare = [name for name in adapted if name in known and name in found]  # a draft for the adapted ones remembers other numbers
    return tables, not tables and bool(layers - set(bare) or (bare and not layers & set(bare)))


def _warn(made: Mapping[str, Any], config: PretrainedConfig, found: Mapping[str, str], adapted: Iterable[str] = ()) -> None:
    reasons = ["another config"] if describe_target(config)["fingerprint"] != made["fingerprint"] else []
    if not getattr(config, "quantization_config", None):
        tables, tuned = differences(made, found, adapted)
        tuned &= not is_gguf(config.name_or_path)  # dequantised: its layers are near those of the model that it was made of
        reasons += [f"another {name}" for name in tables] + (["other layers, as one of the two is fine-tuned"] if tuned else [])
    if reasons:
        name = f" than '{made['name']}', its own" if made.get("name") else ""
        warnings.warn(
            f"this draft was made for another target: this one has {' and '.join(reasons)}{name}; if acceptance is low, that is why",
            stacklevel=1,  # one place, so that Python tells it once
        )


# Fields that tell a target from another; the rest varies with the transformers version and the way it was loaded.
_TELLING = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
)


def describe_target(config: PretrainedConfig) -> dict[str, Any]:
    """What a checkpoint remembers of its target: name, shape and a fingerprint of both."""
    text = config.get_text_config()
    fields = text.to_dict()
    kept = {name: fields.get(name) for name in _TELLING}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "name": config.name_or_path,
        "model_type": text.model_type,
        "num_hidden_layers": depth_of(config),
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "fingerprint": digest[:16],
    }
