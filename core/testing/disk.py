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
from .tensor_names import LAYOUTS, tensor_names


def check_names(directory: Path, draft: Any) -> None:
    """The tensors' names are those that engines read for the architecture claimed; skips one that no engine is known for."""
    architecture, num_layers = draft.config.foredraft["architecture"], draft.config.num_hidden_layers
    with safe_open(directory / WEIGHTS, "pt") as file:
        names = set(file.keys())
    prefixed = sorted(n for n in names if n.startswith("model."))
    assert not prefixed, f"{', '.join(prefixed)}: no name may begin with 'model.' (base_model_prefix must be '')"
    if architecture not in LAYOUTS:
        pytest.skip(f"no engine's tensor names are known for architecture '{architecture}'")
    expected, optional = tensor_names(architecture, num_layers)
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
    again: Any = auto_draft(directory, registry=registry)
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
