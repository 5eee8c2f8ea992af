"""What a draft's directory must hold: loadable by us bit for bit, and under the names engines look for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ..auto import auto_draft
from ..files.ours import WEIGHTS, save_draft
from ..registry import Registry
from .common import randomize


def check_names(directory: Path, draft: Any) -> None:
    """The tensors' names are those that engines read for the architecture claimed; skips one that no engine is known for."""
    architecture, num_layers = draft.config.foredraft["architecture"], draft.config.num_hidden_layers
    with safe_open(directory / WEIGHTS, "pt") as file:
        names = set(file.keys())
    prefixed = sorted(n for n in names if n.startswith("model."))
    assert not prefixed, f"{', '.join(prefixed)}: no name may begin with 'model.' (base_model_prefix must be '')"
    if architecture not in LAYOUTS:
        pytest.skip(f"no engine's tensor names are known for architecture '{architecture}'")
    top, layer, optional = LAYOUTS[architecture]
    expected = {f"{n}.weight" for n in top} | {f"layers.{i}.{n}.weight" for i in range(num_layers) for n in layer}
    unknown = sorted(n for n in names - expected if not re.fullmatch(optional, n))
    lacking = sorted(expected - names)
    wrong = [*unknown, *lacking]
    assert not wrong, (
        f"engines know '{architecture}' by other tensors: they would ignore {', '.join(unknown) or 'nothing'} and miss "
        f"{', '.join(lacking) or 'nothing'}, mostly without a word; rename the modules, or claim another architecture"
    )


def check_config(directory: Path, draft: Any) -> None:
    """`config.json` says what engines ask, in every spelling they know."""
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    problems = []
    for key in ("num_hidden_layers", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "vocab_size", "hidden_size"):
        if not isinstance(fields.get(key), int) or isinstance(fields.get(key), bool):
            problems.append(f"{key} must be an integer, found {fields.get(key)!r}")
    layers = draft.config.spec.num_layers
    if fields.get("num_hidden_layers") != layers:
        problems.append(f"num_hidden_layers must be the draft's {layers}, not the target's: found {fields.get('num_hidden_layers')}")
    if fields.get("architectures") != [draft.config.foredraft["architecture"]]:
        problems.append(f"architectures must be ['{draft.config.foredraft['architecture']}'], found {fields.get('architectures')}")
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:
        if fields.get("rope_theta") != rope["rope_theta"]:
            problems.append(f"rope_theta is {rope['rope_theta']} in rope_parameters, {fields.get('rope_theta')} where older readers look")
        if rope.get("rope_type", "default") != "default" and not fields.get("rope_scaling"):
            problems.append("rope_scaling, which older readers look for, is missing beside rope_parameters")
    assert not problems, (
        "config.json: " + "; ".join(problems) + " (is config_class made as `class XDraftConfig(DraftConfigMixin, XConfig)`, and does "
        "its to_dict call super?)"
    )


def check_round_trip(draft: Any, registry: Registry, directory: Path) -> Any:
    """Saved and loaded, every tensor is what it was; returns the loaded draft, embedding and head put back where the file lacks them."""
    randomize(draft, seed=2)
    save_draft(draft, directory)
    again = loaded(directory, registry)
    if not again.complete:
        again.embed_tokens.weight.data.copy_(draft.embed_tokens.weight)
        again.lm_head.weight.data.copy_(draft.lm_head.weight)
        again.complete = True
    saved, read = draft.algorithm.options, again.algorithm.options
    assert read == saved, f"the options were {saved}, and are {read} after saving and loading: make them of what JSON can hold"
    theirs = again.state_dict()
    changed = [name for name, tensor in draft.state_dict().items() if not torch.equal(tensor, theirs[name])]
    assert not changed, (
        f"loaded, {', '.join(changed)} differ from what was saved: something initialises weights anew after loading "
        "(an _init_weights of your own, or a parameter that is no part of the file)"
    )
    return again


def loaded(directory: Path, registry: Registry) -> Any:
    """The draft in a directory, its weights in memory of their own.

    Products of some CPUs are summed in an order that depends on where their operands begin, and a file's tensors may begin anywhere.
    """
    draft: Any = auto_draft(directory, registry=registry)
    for parameter in draft.parameters():
        parameter.data = parameter.data.clone()
    return draft


NORMS, MLP = ("input_layernorm", "post_attention_layernorm"), ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

GROUPED = tuple(f"self_attn.{x}_proj" for x in "qkvo")

QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")

LATENT_PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")

LATENT = tuple(f"self_attn.{part}" for part in LATENT_PARTS)

EAGLE = ("fc", "norm", "lm_head")

EAGLE_OPTIONAL = r"embed_tokens\.weight|fc_norm\.\d+\.weight|d2t|t2d|mask_hidden"

BLOCK, BLOCK_LAYER = ("fc", "hidden_norm", "norm"), (*NORMS, *GROUPED, *QK_NORM, *MLP)

CONVOLVED = ("attention_conv.kernel_projection", "mlp_conv.kernel_projection")

DFLASH2_OPTIONAL = r"layers\.\d+\.(attention|mlp)_conv\.base_kernel|candidate_selector\.(predecessor|successor)_codebook"

MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")

LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "LlamaForCausalLMEagle3": (EAGLE, (*NORMS, "hidden_norm", *GROUPED, *MLP), EAGLE_OPTIONAL),
    "Eagle3Qwen3ForCausalLM": (EAGLE, (*NORMS, "hidden_norm", *GROUPED, *QK_NORM, *MLP), EAGLE_OPTIONAL),
    "Eagle3DeepseekV2ForCausalLM": (EAGLE, (*NORMS, "hidden_norm", *LATENT, *MLP), EAGLE_OPTIONAL),
    "EagleLlamaForCausalLM": (("fc",), ("post_attention_layernorm", *GROUPED, *MLP), r"layers\.[1-9]\d*\.input_layernorm\.weight"),
    "DFlashDraftModel": (BLOCK, BLOCK_LAYER, r"prefix_gru\.weight_[ih]h_l0|embed_proj\.[02]\.weight"),
    "DFlash2DraftModel": ((*BLOCK, "candidate_selector.hidden_projection"), (*BLOCK_LAYER, *CONVOLVED), DFLASH2_OPTIONAL),
    "Qwen3DSparkModel": (
        (*BLOCK, *MARKOV),
        BLOCK_LAYER,
        r"(markov_head\.(gate|joint)_proj|confidence_head\.proj)\.(weight|bias)",
    ),
}
"""By the `architectures` entry: weights of the draft, weights of each layer, and a pattern of what may be there too."""
