"""Drafts of quantised targets, and of those with an adapter, start from the matrices that packed weights stand for."""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_batch, tiny_rows, tiny_signal, tiny_target
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import CONFIG_MAPPING

from foredraft import DraftTrainer, DraftTrainingArguments, ForedraftError, auto_draft, generate
from foredraft.contracts.loading import Loading
from foredraft.decoding.compatibility import try_out
from foredraft.decoding.families import tiny_model
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


def in_compressed_tensors(model: Any, folder: Path, scheme: str) -> None:
    """The model as llm-compressor writes it: its library's own scales, without calibration."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    how = preset_name_to_scheme(scheme, targets=["Linear"])
    if how.weights.group_size:
        how.weights.group_size = 32
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": how}, ignore=["lm_head"]))
    for module in (m for m in model.modules() if hasattr(m, "weight_scale")):
        pieces = module.weight.detach().view(*module.weight_scale.shape, -1)
        found = calculate_qparams(pieces.amin(-1), pieces.amax(-1), how.weights)
        for name, value in zip(("weight_scale", "weight_zero_point"), found, strict=True):
            if hasattr(module, name):
                getattr(module, name).data.copy_(value)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
    packed = ModelCompressor.from_pretrained_model(model)
    packed.compress_model(model)
    model.save_pretrained(folder)
    packed.update_config(folder)


def in_fp8(model: Any, folder: Path) -> None:
    """The model as DeepSeek-V3 is published: a scale for each block of a matrix."""
    side, state = 32, dict(model.state_dict())
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]:
        weight = state[f"{name}.weight"]
        blocks = weight.view(weight.shape[0] // side, side, -1, side)
        scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        state |= {f"{name}.weight": (blocks / scale).view_as(weight).to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scale[:, 0, :, 0]}
    written(model, folder, state, {"quant_method": "fp8", "weight_block_size": [side, side], "modules_to_not_convert": ["lm_head"]})


def in_four_bits(model: Any, folder: Path, method: str) -> None:
    """The model as AutoAWQ (`gemm`) or AutoGPTQ write it: eight numbers in an integer, of as many columns out of order, or of rows."""
    group, state = 32, dict(model.state_dict())
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]:
        weight_OI = state.pop(f"{name}.weight")
        pieces = weight_OI.view(len(weight_OI), -1, group)
        scale = pieces.abs().amax(-1, keepdim=True) / 7
        integers_IO = ((pieces / scale).round().long() + 8).view_as(weight_OI).T
        zeros = torch.full((pieces.shape[1], len(weight_OI) // 8), 0x88888888 if method == "awq" else 0x77777777)  # GPTQ's less one
        eights = (
            integers_IO.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]] if method == "awq" else integers_IO.unflatten(0, (-1, 8)).mT
        )
        packed = (eights << (4 * torch.arange(8))).sum(-1)
        state |= {f"{name}.qweight": packed.to(torch.int32), f"{name}.qzeros": zeros.to(torch.int32), f"{name}.scales": scale[..., 0].T}
        state |= {} if method == "awq" else {f"{name}.g_idx": (torch.arange(weight_OI.shape[1]) // group).to(torch.int32)}
    own = {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    written(model, folder, state, {"quant_method": method, "bits": 4, "group_size": group, "modules_to_not_convert": ["lm_head"], **own})


def written(model: Any, folder: Path, state: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"})


PUBLISHED: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    "fp8 in blocks": ("accelerate", in_fp8),
    **{method: ("gptqmodel", partial(in_four_bits, method=method)) for method in ("awq", "gptq")},
    **{f"compressed-tensors {s}": ("compressed_tensors", partial(in_compressed_tensors, scheme=s)) for s in ("FP8_DYNAMIC", "FP8")},
    **{f"compressed-tensors {s}": ("compressed_tensors", partial(in_compressed_tensors, scheme=s)) for s in ("W8A8", "W8A16", "W4A16")},
}
"""Checkpoints that are quantised already, which transformers dequantises where their kernels do not run: some as late as in their first
forward."""


@pytest.mark.slow
@pytest.mark.parametrize("how", [*QUANTISERS, *PUBLISHED])
def test_real_quantisers(how: str, tmp_path: Path) -> None:
    """Near the weights that were quantised, where the library is installed; a step is trained, and text decoded with the draft."""
    library, given = {**QUANTISERS, **PUBLISHED}[how]
    pytest.importorskip(library)
    model = tiny_target(hidden=64)
    if isinstance(given, dict):
        model.save_pretrained(tmp_path)
    else:
        given(deepcopy(model), tmp_path)
    loading = Loading(quantization={"quant_method": library, **given} if isinstance(given, dict) else None)
    quantised = load_target(str(tmp_path), "float32", loading)
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


@pytest.mark.slow
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published, four bits a number and a scale for each 32: dequantised by transformers where no kernels are."""
    pytest.importorskip("accelerate")
    model = tiny_model(CONFIG_MAPPING["gpt_oss"])
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith("_proj") and ".experts." in name]:
        experts, rows, columns = state.pop(name).mT.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:3], 122, dtype=torch.uint8)}
    written(model, tmp_path, state, {"quant_method": "mxfp4"})
    quantised = load_target(str(tmp_path), "float32", Loading())
    assert not torch.equal(quantised(torch.tensor([[5, 6, 7]])).logits, model(torch.tensor([[5, 6, 7]])).logits)
    quantised.generation_config.eos_token_id = None
    try_out(quantised)  # a training step, and a decode that gives the target's own text
