"""GGUF files, llama.cpp's: what they hold, read by the package `gguf`; targets among them are loaded by transformers, dequantised."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ForedraftError

SUFFIX = ".gguf"
TABLES = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
"""Embedding and head of a target, there and in transformers."""
OWN_ROPE = "rope.scaling.parameters"
"""Where exports of ours keep the rotary embedding as transformers spells it; llama.cpp reads frequencies, and skips it."""
DRAFTS = ("eagle3", "dflash")
"""Architectures of files that are no targets."""
SPLIT_DIGITS = ("smollm", "codeshell", "exaone", "minerva", "mellum2")
"""`tokenizer.ggml.pre` of tokenizers that take digits one by one before anything else."""


@dataclass(frozen=True)
class GGUFFile:
    """Metadata, lists of tokens as their length, and tensors, none of them loaded."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape as in torch (rows first), and torch's name of the dtype that `load` gives."""
    load: Callable[[str], Tensor]
    packed: tuple[str, ...] = ()
    """The types of quantised tensors; they are loaded as float32."""


def is_gguf(name: str | Path) -> bool:
    """Whether this is a file of that kind, by its name."""
    return Path(name).suffix == SUFFIX and Path(name).is_file()


def library() -> Any:
    """The package. Raises `ForedraftError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ForedraftError("GGUF files need the package gguf: pip install 'foredraft[gguf]'") from error
    return gguf


def read_gguf(file: str | Path) -> GGUFFile:
    """What the file holds. Raises `ForedraftError` without the package; whatever that raises, the file is damaged."""
    status = Path(file).stat()
    return _read(str(file), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(file: str, changed: int, size: int) -> GGUFFile:
    """Once per state of a file: a vocabulary takes seconds."""
    gguf = library()
    reader = gguf.GGUFReader(file)
    held = {tensor.name: tensor for tensor in reader.tensors}
    fields = {name: _value(field, gguf) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    dtypes = {name: _dtype(t.tensor_type.name) for name, t in held.items()}
    matrices = {dtypes[name] for name, t in held.items() if len(t.shape) > 1}
    half = next(iter(matrices)) if len(matrices) == 1 else torch.float32
    dtypes |= {name: half for name, t in held.items() if len(t.shape) == 1 and dtypes[name] == torch.float32 and _fits(t, half)}
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in held.items()}

    def load(name: str) -> Tensor:
        return _tensor(held[name], gguf).reshape(shapes[name]).to(dtypes[name])

    packed = sorted({t.tensor_type.name for t in held.values()} - set(FLOATS) - set(INTEGERS))
    infos = {name: (shapes[name], str(dtypes[name]).removeprefix("torch.")) for name in held}
    return GGUFFile(fields, infos, load, tuple(packed))


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}


def _dtype(kind: str) -> torch.dtype:
    return (FLOATS | INTEGERS).get(kind, torch.float32)


def _tensor(held: Any, gguf: Any) -> Tensor:
    kind = held.tensor_type.name
    if kind == "BF16":
        return torch.from_numpy(held.data.copy()).view(torch.bfloat16)
    plain = kind in FLOATS or kind in INTEGERS
    return torch.from_numpy(held.data.copy() if plain else gguf.dequantize(held.data, held.tensor_type))


def _fits(held: Any, half: torch.dtype) -> bool:
    """Whether a vector, which such files keep as float32, is one of a draft (or target) of half precision."""
    vector = torch.from_numpy(held.data.copy())
    return half.is_floating_point and torch.equal(vector.to(half).float(), vector)


def _value(field: Any, gguf: Any) -> Any:
    listed = field.types and field.types[0] == gguf.GGUFValueType.ARRAY
    return len(field.data) if listed and field.name.startswith("tokenizer.") else field.contents()


def shortest(value: Any) -> Any:
    """Of a float32 the shortest number that is stored so, as people write it: 1e-05; anything else as it is."""
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value


def rope_parameters(fields: Mapping[str, Any], kind: str, factors: list[float] | None = None) -> dict[str, Any]:
    """The rotary embedding as transformers spells it; `factors` divide the frequencies (`rope_freqs.weight`)."""

    def told(key: str) -> Any:
        return shortest(fields.get(f"{kind}.{key}"))

    if isinstance(own := told(OWN_ROPE), str):
        try:
            return dict(json.loads(own))
        except (TypeError, ValueError) as error:
            raise ForedraftError(f"{kind}.{OWN_ROPE} is no JSON object: {own[:200]!r}") from error
    plain = {"rope_type": "default", "rope_theta": told("rope.freq_base") or 10000.0}
    turned, wide = told("rope.dimension_count"), told("attention.key_length")
    if turned and wide and turned != wide:
        plain["partial_rotary_factor"] = turned / wide
    length = told("rope.scaling.original_context_length") or told("context_length")
    factor, scale = told("rope.scaling.factor"), told("rope.scaling.attn_factor") or 1.0
    if factors and any(f != 1.0 for f in factors):
        listed = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": length}
        return {**plain, "rope_type": "longrope", "factor": 1.0, "attention_factor": scale, **listed}
    if told("rope.scaling.type") == "yarn" and factor:
        scaled = {"attention_factor": scale * (1 + 0.1 * math.log(max(factor, 1.0))), "original_max_position_embeddings": length}
        return {**plain, "rope_type": "yarn", "factor": factor, **scaled}
    if told("rope.scaling.type") in (None, "linear") and factor not in (None, 0.0, 1.0):
        return {**plain, "rope_type": "linear", "factor": factor}
    return plain


# Targets, which transformers reads.


def source(name: str) -> dict[str, str]:
    """What `from_pretrained` is told of where a target is: a directory, an id, or a file in a directory."""
    file = {"gguf_file": Path(name).name} if is_gguf(name) else {}
    return {"pretrained_model_name_or_path": str(Path(name).parent) if file else name, **file}


def check_readable(name: str) -> None:
    """Raises `ForedraftError` if the file is damaged, or a draft."""
    try:
        kind = read_gguf(name).fields.get("general.architecture")
    except ForedraftError:
        raise
    except Exception as error:  # whatever the package raises
        raise ForedraftError(f"'{name}' cannot be read as GGUF: {type(error).__name__}: {str(error)[:200]}") from error
    if kind in DRAFTS:
        raise ForedraftError(f"'{name}' is a draft ({kind}): --target names the model it drafts for")


def completed(config: Any, name: str) -> Any:
    """The config of a target, with what transformers leaves out for some architectures: the width of heads, how RoPE is scaled."""
    if is_gguf(name):
        config.name_or_path = name
        file = read_gguf(name)
        kind = str(file.fields["general.architecture"])
        factors = file.load("rope_freqs.weight").tolist() if "rope_freqs.weight" in file.tensors else None
        rope = rope_parameters(file.fields, kind, factors)
        if rope["rope_type"] != "default" and (config.rope_parameters or {}).get("rope_type", "default") == "default":
            config.rope_parameters = rope
        if (width := file.fields.get(f"{kind}.attention.key_length")) and hasattr(config, "head_dim"):
            config.head_dim = width
        if hasattr(config, "rms_norm_eps"):
            config.rms_norm_eps = shortest(config.rms_norm_eps)
    return config


def with_digits(tokenizer: Any, name: str) -> Any:
    """The tokenizer of a target, which splits digits where llama.cpp does (`tokenizer.ggml.pre`) and transformers does not."""
    if is_gguf(name) and read_gguf(name).fields.get("tokenizer.ggml.pre") in SPLIT_DIGITS:
        from tokenizers import pre_tokenizers

        bytes_too = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_too])
    return tokenizer


def plain(model: Any, name: str) -> Any:
    """A model of a file without the claim to be quantised: its weights are floats now."""
    if is_gguf(name):
        model.config.name_or_path = name
        vars(model.config).pop("quantization_config", None)
        vars(model).update({flag: None for flag in ("hf_quantizer", "quantization_method") if flag in vars(model)})
        if vars(model).get("is_quantized"):
            model.is_quantized = False
    return model
