"""Whether a target is the one a draft was made for: by its shape, its config, and a sample of its weights."""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..contracts.draft import DraftModel
from ..contracts.loading import PLAIN, Repository
from ..errors import ForedraftError
from ..files.reading import read_json
from .gguf import is_gguf
from .loading import load_config
from .weights import is_plain, own_tensors

SAMPLED = 8, 4
"""Rows, and numbers of each, that a draft remembers of its target's embedding and head."""

SAME = 0.01
"""Relative distance of two samples of the same weights, at most: bfloat16 rounds by 0.004."""

Rows = Callable[[slice], Tensor]


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
    text = target.get_text_config()
    differences = [
        f"{name}: the draft expects {made[name]}, the target has {getattr(text, name)}"
        for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        if made[name] != getattr(text, name)
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
    read_json(directory / "config.json")
    try:
        config = load_config(str(directory), repository)
    except ForedraftError as error:
        reason = str(error).split("\n")[0][:200]
        warnings.warn(f"the config of target '{name}' is not understood: whether the draft fits it is open ({reason})", stacklevel=3)
        return
    check_shape(made, config)
    _warn(made, config, _sample_of_files(directory))


def remember(config: Any, target: PreTrainedModel) -> None:
    """Record in a draft's config what weights its target has."""
    made = config.foredraft
    config.update({"foredraft": {**made, "target": {**made["target"], "sample": sample_of(target)}}})


def sample_of(model: PreTrainedModel) -> dict[str, str]:
    """A few numbers of a target's embedding and head, by the tensor; without those that are quantised or have no storage."""
    found = {}
    for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        weight = own_tensors(module).get("weight") if module is not None else None
        if weight is not None and is_plain(weight) and weight.ndim == 2 and not weight.is_meta:
            found[name] = _numbers(weight.__getitem__, tuple(weight.shape))
    return found


def other_weights(made: Mapping[str, Any], tables: Mapping[str, Tensor | None]) -> list[str]:
    """Which of a target's matrices, `embedding` and `head` [V, T], are not those that `made` remembers.

    Raises `ValueError` where it remembers no numbers.
    """
    known = made.get("sample") or {}
    given = {name: t for name, t in tables.items() if name in known and t is not None and t.ndim == 2 and t.is_floating_point()}
    return [name for name, t in given.items() if _distance(str(known[name]), _numbers(t.__getitem__, tuple(t.shape))) > SAME]


def _sample_of_files(directory: Path) -> dict[str, str]:
    """The same of safetensors; nothing where they cannot be read."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118 (it is no mapping)
                    for name, end in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
                        part = opened.get_slice(tensor)
                        if tensor.endswith(end) and part.get_dtype() in ("F32", "BF16", "F16") and len(part.get_shape()) == 2:
                            found[name] = _numbers(part.__getitem__, tuple(part.get_shape()))
        except (OSError, SafetensorError):
            continue
    return found


def _numbers(rows_of: Rows, shape: tuple[int, ...]) -> str:
    """Evenly spread over a matrix, four digits each: what dtypes tell apart less than weights."""
    rows, columns = ([(2 * i + 1) * size // (2 * count) for i in range(count)] for size, count in zip(shape, SAMPLED, strict=True))
    return " ".join(f"{x:.4g}" for i in rows for x in rows_of(slice(i, i + 1))[0, columns].float().tolist())


def _warn(made: Mapping[str, Any], config: PretrainedConfig, found: Mapping[str, str]) -> None:
    reasons = ["another config"] if describe_target(config)["fingerprint"] != made["fingerprint"] else []
    if not getattr(config, "quantization_config", None):
        known = made.get("sample") or {}
        reasons += [f"another {name}" for name in known if name in found and _distance(known[name], found[name]) > SAME]
    if reasons:
        name = f" than '{made['name']}', its own" if made.get("name") else ""
        warnings.warn(
            f"this draft was made for another target: this one has {' and '.join(reasons)}{name}; if acceptance is low, that is why",
            stacklevel=1,  # one place, so that Python tells it once
        )


def _distance(one: str, other: str) -> float:
    """Between two samples, relative to the larger; 0 where they cannot be compared."""
    a, b = (torch.tensor([float(x) for x in text.split()]) for text in (one, other))
    if a.shape != b.shape:
        return 0.0
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp(min=1e-12))


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
        "num_hidden_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "fingerprint": digest[:16],
    }
