"""Drafts of quantised targets start from the matrices that packed weights stand for."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_rows, tiny_signal, tiny_target
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft import auto_draft
from foredraft.contracts.loading import Loading
from foredraft.target.loading import load_target


class Int8Linear(nn.Module):
    """As LLM.int8 keeps them: integers of the matrix's own shape under its name, a scale per row."""

    stored = "weight"

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        integers = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.register_parameter(self.stored, nn.Parameter(integers, requires_grad=False))

    @property
    def matrix(self) -> Tensor:
        return getattr(self, self.stored) * self.scale.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix, self.bias)


class PackedLinear(Int8Linear):
    """As GPTQ keeps them: nothing is called weight."""

    stored = "qweight"


@pytest.mark.parametrize("packed", [Int8Linear, PackedLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layers_start_from_what_they_multiply_by(packed: Any, dtype: torch.dtype) -> None:
    """As from the same model with its weights rounded; and its own head is the teacher."""
    model = tiny_target(attention_bias=True).to(dtype)
    rounded = deepcopy(model)
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, stored := packed(linear))
        rounded.get_submodule(name).weight.data = stored.matrix
    drafts, signals = [], []
    for target in (model, rounded):
        torch.manual_seed(0)
        drafts.append(auto_draft(target.config, num_layers=2, draft_vocab_size=30))
        assert "18 of 19 layer tensors" in drafts[-1].start_from(target)
        signals.append(tiny_signal(target, drafts[-1], tiny_batch(drafts[-1].algorithm, tiny_rows([["uuaaaauaaa"]]))))
    ours, theirs = (draft.state_dict() for draft in drafts)
    assert_close(ours, theirs)
    assert_close(ours["layers.1.mlp.up_proj.weight"].to(dtype), rounded.model.layers[-1].mlp.up_proj.weight)
    assert_close(*(s.head(s.hidden_BST[0]) for s in signals))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_real_quantisers(library: str, tmp_path: Path) -> None:
    """Near the weights that were quantised, where one of these is installed."""
    pytest.importorskip(library)
    model = tiny_target(hidden=64)
    model.save_pretrained(tmp_path)
    if library == "bitsandbytes":
        quantization: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
    else:
        quantization = {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"version": 2}}}}
    quantised = load_target(str(tmp_path), "float32", Loading(quantization={"quant_method": library, **quantization}))
    draft = auto_draft(model.config, num_layers=2)
    assert "18 of 19 layer tensors" in draft.start_from(quantised)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        ours = draft.layers[1].get_submodule(name).weight
        theirs = model.model.layers[-1].get_submodule(name).weight
        assert not torch.equal(ours, theirs)
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.95
