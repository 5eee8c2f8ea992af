"""GGUF files as they are written: types of tensors, a target's tokens, rotary embeddings and their rows as llama.cpp reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ForedraftError
from ..target.gguf import OWN_ROPE, TABLES, is_gguf, library, read_gguf
from ..target.loading import load_target, load_tokenizer
from ..target.weights import matrix_of


def write_gguf(file: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], outtype: str) -> None:
    """Write the file, its matrices in the type that `outtype` names (auto: their own), vectors as float32.

    Raises `ForedraftError` for rows that blocks of that type do not divide, and without the package.
    """
    gguf = library()
    types = {name: _type(tensor, outtype, gguf) for name, tensor in tensors.items()}
    blocks = {name: gguf.GGML_QUANT_SIZES[t][0] for name, t in types.items()}
    if odd := [f"{n} of {t.shape[-1]}" for n, t in tensors.items() if t.shape[-1] % blocks[n]]:
        size = max(blocks.values())
        raise ForedraftError(f"outtype {outtype} packs rows by {size}, no divisor of those of {', '.join(odd)}: choose f16 or bf16")
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in fields.items():
        writer.add_key_value(key, value, *_value_type(value, gguf))
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            packed = gguf.quantize(tensor.detach().float().numpy(), types[name])
            writer.add_tensor(name, packed, raw_dtype=types[name])
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paired(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from two halves to adjacent pairs."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def halved(weight: Tensor, head_dim: int) -> Tensor:
    """The way back."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def rope_fields(rotary: Any, parameters: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """Divisors of the frequencies, None where nothing is scaled, and what the metadata says; any scaling is such a list and a factor."""
    theta = float(parameters["rope_theta"])
    stated: dict[str, Any] = {"rope.freq_base": theta}
    if parameters.get("rope_type", "default") == "default":
        return None, stated
    size = 2 * len(rotary.inv_freq)
    factors = theta ** -(torch.arange(0, size, 2).double() / size) / rotary.inv_freq.double()
    stated |= {"rope.scaling.type": "none", "rope.scaling.attn_factor": float(rotary.attention_scaling)}
    return factors.float(), {**stated, OWN_ROPE: json.dumps(dict(parameters))}


def token_fields(asked: str | None, named: str | None, vocab_size: int) -> dict[str, Any]:
    """The fields that list the target's tokens: its GGUF file's own; of a directory, their texts; else none but numbers.

    llama.cpp reads of a draft's how many there are, and DFlash's mask token. Raises `ForedraftError` where `asked` has other tokens.
    """
    target = asked or (named if named and Path(named).exists() else None)
    plain = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": ["a b"]}
    if target is None:
        return {**plain, "tokenizer.ggml.tokens": [f"<{i}>" for i in range(vocab_size)]}
    if is_gguf(target):
        reader = library().GGUFReader(target)
        fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
        if (found := len(fields.get("tokenizer.ggml.tokens", ()))) != vocab_size:
            raise ForedraftError(f"target '{target}' has {found} tokens, the draft was made for {vocab_size}: name its own target")
        return fields
    ids = load_tokenizer(target).get_vocab()
    if max(ids.values(), default=0) >= vocab_size:
        raise ForedraftError(f"target '{target}' has tokens up to {max(ids.values())}, the draft was made for {vocab_size}")
    texts = {i: text for text, i in ids.items()}
    return {**plain, "tokenizer.ggml.tokens": [texts.get(i, f"<{i}>") for i in range(vocab_size)]}


def tables(target: str) -> dict[str, Tensor]:
    """Embedding and head of a target, by their names there; of a file without a head of its own (tied) the embedding alone.

    Raises `ForedraftError` for a target that cannot be read; a directory's is loaded whole.
    """
    if is_gguf(target):
        held = read_gguf(target)
        return {name: held.load(name) for name in TABLES if name in held.tensors}
    model = load_target(target, "auto")
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    return {name: matrix_of(module).contiguous() for name, module in zip(TABLES, modules, strict=True)}


def _type(tensor: Tensor, outtype: str, gguf: Any) -> Any:
    """What a tensor is written as."""
    if not tensor.is_floating_point():
        return gguf.GGMLQuantizationType.I64
    own = {torch.float16: "F16", torch.bfloat16: "BF16"}.get(tensor.dtype, "F32")
    return gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else own if outtype == "auto" else outtype.upper()]


def _value_type(value: Any, gguf: Any) -> tuple[Any, Any]:
    """What a field is written as; of a list, what its items are."""
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        inner = _value_type(value[0], gguf)[0]
        return kinds.ARRAY, kinds.INT32 if inner == kinds.UINT32 else inner
    return {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)], None
