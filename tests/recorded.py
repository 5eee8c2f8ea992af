"""Recorded outputs of other projects' trainers (see golden/README.md): the target they were made for, and a file's tensors."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
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

    def check_loss(self, draft: Any, loss: Tensor, atol: float = 1e-6) -> None:
        """Our loss, and its gradient for every trained parameter, are those that were recorded."""
        assert_close(loss, self.tensors["loss"], rtol=1e-5, atol=1e-5)
        parameters = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), retain_graph=True), strict=True))
        theirs = self.ours("grads")
        assert gradients.keys() == theirs.keys()
        for name, gradient in gradients.items():
            assert_close(gradient, theirs[name], rtol=1e-4, atol=atol, msg=lambda m, name=name: f"gradient of {name}: {m}")
