"""A few numbers of a target's weights, by which a draft knows it again: another fine-tune, or an adapter on top, has others."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .capture import decoder_layers
from .weights import corner_of, is_plain, own_tensors

SAMPLED = 8, 4
"""Rows, and numbers of each, that a draft remembers of its target's embedding and head."""
OF_LAYERS = 4, 4
"""The same of each projection in two of its layers, the middle one and the last."""
SAME = 0.01
"""Relative distance of two samples of the same tables, at most: bfloat16 rounds by 0.004."""
TRAINED = 0.003
"""The same of projections, which fine-tuning moves little: rounded to bfloat16, all numbers together differ by less than 0.002."""
TABLES = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}

Rows = Callable[[slice], Tensor]


def sample_of(model: PreTrainedModel) -> dict[str, str]:
    """A few numbers of a target's embedding and head, and of projections by name; without what is quantised or has no storage.

    Of projections with an adapter (LoRA) as they multiply, so that a merged model is the same target.
    """
    found = {}
    for name, table in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        weight = own_tensors(table).get("weight") if table is not None else None
        if weight is not None and is_plain(weight) and weight.ndim == 2 and not weight.is_meta:
            found[name] = _numbers(weight.__getitem__, tuple(weight.shape))
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    for layer in sorted({len(layers) // 2, len(layers) - 1}):
        for path, module in layers[layer].named_modules():
            # Experts that are modules of their own are many; an adapter's parts belong to what they stand beside.
            if not hasattr(module, "in_features") or re.search(r"\.\d+(\.|$)|\.(base_layer|lora_\w+)(\.|$)", path):
                continue
            if (corner := corner_of(module, partial(_places, sampled=OF_LAYERS))) is not None:
                found[f"{names[layers].removeprefix('base_model.model.')}.{layer}.{path}"] = _text(corner)
    return found


def sample_of_files(directory: Path) -> tuple[dict[str, str], set[str]]:
    """The same of safetensors, nothing where they cannot be read; and on which projections they put an adapter.

    Of an adapter's directory, what its base has.
    """
    base, adapted = base_of(directory), set()
    if base is not None:
        adapted = {re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", name) for name in _tensors(directory)}
        directory = base
    found = {}
    for name, part in _tensors(directory).items():
        table = next((table for table, end in TABLES.items() if name.endswith(end)), None)
        if part.get_dtype() in ("F64", "F32", "BF16", "F16") and len(part.get_shape()) == 2 and (table or re.search(r"\.\d+\.", name)):
            sizes = SAMPLED if table else OF_LAYERS
            found[table or name.removesuffix(".weight")] = _numbers(part.__getitem__, tuple(part.get_shape()), sizes)
    return found, adapted


def base_of(directory: Path) -> Path | None:
    """The model for which the adapter in a directory was made, where it is a directory, too; None if it is no adapter."""
    try:
        base = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        return Path(base) if not (directory / "config.json").exists() and Path(base).is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def numbers_of(name: str, weight: Tensor) -> str:
    """A tensor's part in a sample, by its name there."""
    return _numbers(weight.__getitem__, tuple(weight.shape), SAMPLED if name in TABLES else OF_LAYERS)


def others(known: Mapping[str, Any], found: Mapping[str, str]) -> list[str]:
    """The names of what both samples have, with other numbers. Raises `ValueError` where one is malformed."""
    shared = [name for name in known if name in found]
    return [name for name in shared if _distance(str(known[name]), found[name]) > (SAME if name in TABLES else TRAINED)]


def _tensors(directory: Path) -> dict[str, Any]:
    """Every tensor of a directory's safetensors by name, not read yet."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            opened = safe_open(file, "pt")
            found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
        except (OSError, SafetensorError):
            continue
    return found


def _places(shape: Sequence[int], sampled: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Rows and columns, evenly spread over a matrix."""
    rows, columns = ([(2 * i + 1) * size // (2 * count) for i in range(count)] for size, count in zip(shape, sampled, strict=True))
    return rows, columns


def _numbers(rows_of: Rows, shape: Sequence[int], sampled: tuple[int, int] = SAMPLED) -> str:
    """Of a matrix that is read a row at a time."""
    rows, columns = _places(shape, sampled)
    return _text(torch.stack([rows_of(slice(i, i + 1))[0, columns].float() for i in rows]))


def _text(numbers: Tensor) -> str:
    """Four digits each: what dtypes tell apart less than weights."""
    return " ".join(f"{x:.4g}" for x in numbers.float().flatten().tolist())


def _distance(one: str, other: str) -> float:
    """Between two samples, relative to the larger; 0 where they cannot be compared."""
    a, b = (torch.tensor([float(x) for x in text.split()]) for text in (one, other))
    if a.shape != b.shape:
        return 0.0
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp(min=1e-12))
