"""Recorded outputs of other projects' trainers (see golden/README.md): the target they were made for, and a file's tensors."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

GOLDEN = Path(__file__).parent / "golden"
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
)


@dataclass
class Recorded:
    """One file of golden/."""

    name: str
    suffix: ClassVar[str] = ""

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(GOLDEN / f"{self.name}{self.suffix}.safetensors")

    def ours(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under `prefix`, by our parameter names."""
        names = {n: n.removeprefix(f"{prefix}.").removeprefix("model.") for n in self.tensors if n.startswith(f"{prefix}.")}
        named = {ours.replace("midlayer.", "layers.0."): self.tensors[n] for n, ours in names.items()}
        return {n: t for n, t in named.items() if not n.startswith("verifier_")}
