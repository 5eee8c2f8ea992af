"""Drafts of quantised targets, and of those with an adapter, start from the matrices that packed weights stand for."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_rows, tiny_signal, tiny_target
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft import DraftTrainer, DraftTrainingArguments, ForedraftError, auto_draft, generate
from foredraft.contracts.loading import Loading
from foredraft.target.loading import load_target
from foredraft.target.sample import others, sample_of
from foredraft.target.weights import matrix_of


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


class Adapted(nn.Module):
    """As peft wraps them: the module itself is kept beside a product of two small matrices."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = linear, linear.in_features, linear.out_features
        self.lora_A = nn.Parameter(torch.randn(2, linear.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(linear.out_features, 2) * 0.1)

    @property
    def matrix(self) -> Tensor:
        return self.base_layer.weight.detach() + (self.lora_B @ self.lora_A).detach().to(self.base_layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + F.linear(F.linear(x, self.lora_A.to(x)), self.lora_B.to(x))


class Int8Embedding(nn.Embedding):
    """A table of integers, a scale per row, multiplied as Gemma's are."""

    def __init__(self, table: nn.Embedding, embed_scale: float = 1.0):
        super().__init__(1, 1)
        self.num_embeddings, self.embedding_dim, self.embed_scale = table.num_embeddings, table.embedding_dim, embed_scale
        self.scale = nn.Parameter(table.weight.detach().abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((table.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    @property
    def matrix(self) -> Tensor:
        return self.weight * self.scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.matrix[ids] * self.embed_scale


class Elsewhere(Int8Linear):
    """One whose kernel is for another device."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")


def test_tables_are_looked_up_and_what_does_not_run_is_named() -> None:
    table, linear = nn.Embedding(40, 16), nn.Linear(16, 24)
    packed = Int8Embedding(table, embed_scale=4.0)
    assert_close(matrix_of(packed), packed.matrix)
    with pytest.raises(
        ForedraftError, match=r"Elsewhere is quantised, and does not run here: RuntimeError: no kernel(.|\n)*dequantize: true"
    ):
        matrix_of(Elsewhere(linear))
    with pytest.raises(ForedraftError, match="neither an embedding nor a projection"):
        matrix_of(nn.Identity())


@pytest.mark.parametrize("packed", [Int8Linear, PackedLinear, Adapted])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layers_start_from_what_they_multiply_by(packed: Any, dtype: torch.dtype) -> None:
    """As from the same model with its weights rounded; and its own head is the teacher."""
    model = tiny_target(attention_bias=True).to(dtype)
    rounded = deepcopy(model)
    torch.manual_seed(1)
    for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]:
        parent, _, last = name.rpartition(".")
        stored = (packed if isinstance(module, nn.Linear) else Int8Embedding)(module).to(dtype if packed is Adapted else None)
        setattr(model.get_submodule(parent), last, stored)
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
    loose = {"rtol": 1e-4, "atol": 1e-4} if packed is Adapted else {}
    if dtype == torch.float32 or not loose:  # beside a matrix and merged with it, half precision rounds otherwise
        assert_close(*(s.head(s.hidden_BST[0]) for s in signals), **loose)
    ids, settings = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(generate(model, drafts[0].eval(), ids, **settings), model.generate(ids, **settings))
    known = drafts[1].config.foredraft["target"]["sample"]
    layers = {name for name in known if name not in ("embedding", "head")}
    assert set(sample_of(model)) == (layers if packed is Adapted else set())
    assert not others(known, sample_of(model)), "merged or beside, it is one target"
    other = tiny_target(attention_bias=True).to(dtype)
    assert bool(others(sample_of(other), sample_of(model))) is (packed is Adapted)


TORCHAO: dict[str, Any] = {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"version": 2}}}
INT4: dict[str, Any] = {"_type": "IntxWeightOnlyConfig", "_data": {"version": 2, "weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}}
SAME = {"llm_int8_threshold": 0.0}
"""With outliers apart, columns are told by all rows of a forward: numbers depend on its width, with any draft."""
QUANTISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "torchao int8": ("torchao", {"quant_type": TORCHAO}),
    "torchao int8, head": ("torchao", {"quant_type": TORCHAO, "include_input_output_embeddings": True}),
    "torchao int4": ("torchao", {"quant_type": {"default": INT4}}),
    "bitsandbytes 8 bit": ("bitsandbytes", {"load_in_8bit": True, **SAME}),
    "bitsandbytes 8 bit, head": ("bitsandbytes", {"load_in_8bit": True, "llm_int8_skip_modules": [], **SAME}),
    "bitsandbytes nf4": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", QUANTISERS)
def test_real_quantisers(how: str, tmp_path: Path) -> None:
    """Near the weights that were quantised, where the library is installed; a step is trained, and text decoded with the draft."""
    library, quantization = QUANTISERS[how]
    pytest.importorskip(library)
    model = tiny_target(hidden=64)
    model.save_pretrained(tmp_path)
    quantised = load_target(str(tmp_path), "float32", Loading(quantization={"quant_method": library, **quantization}))
    draft = auto_draft(model.config, num_layers=2, ttt_steps=2)
    assert "18 of 19 layer tensors" in draft.start_from(quantised)
    pairs = {name: model.model.layers[-1].get_submodule(name) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")}
    for name, ours, theirs in (
        *((name, draft.layers[1].get_submodule(name).weight, module.weight) for name, module in pairs.items()),
        ("head" if "head" in how else "", draft.lm_head.weight, model.lm_head.weight),
        ("", draft.embed_tokens.weight, model.get_input_embeddings().weight),
    ):
        assert torch.equal(ours, theirs) is (not name), name
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.95
    run = DraftTrainingArguments(str(tmp_path / "run"), max_steps=1, use_cpu=True, save_strategy="no")
    DraftTrainer(draft, quantised, run, train_dataset=tiny_rows([["uuaaaauaaa"]])).train()
    ids, settings = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(generate(quantised, draft.eval(), ids, **settings), quantised.generate(ids, **settings))
