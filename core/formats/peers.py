"""Whose checkpoint a directory holds, told by its content: an entry per format, an entry per sort of draft, no code per pair."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ForedraftError

Config = Mapping[str, Any]
Names = Collection[str]


@dataclass(frozen=True)
class Peer:
    """One way of writing a draft down."""

    name: str
    sign: str
    """What tells it, in words."""
    recognises: Callable[[Config, Names], bool]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of its tensors' names, and ours."""
    ignored: str = r"(?!)"
    """Pattern of tensors that only its training reads."""
    flatten: Callable[[Config], dict[str, Any]] = dict
    """Its config with all fields that describe the draft side by side, and its own defaults."""
    norms_before_head: bool = False
    """Its `norm_output` says that the head sees the normed state; what is fed back is the un-normed one, always."""

    def rename(self, name: str) -> str:
        """Our name of its tensor."""
        for theirs, ours in self.prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


@dataclass(frozen=True)
class Kind:
    """One sort of draft, by the name that our algorithms and speculators' models share."""

    name: str
    sign: str
    recognises: Callable[[Names], bool]
    """Of its tensors, by our names."""


FUSED = {"fc.weight", "layers.0.hidden_norm.weight"}
"""What every EAGLE-3 draft has, by our names."""
KINDS = (
    Kind("dflash", "fc.weight and hidden_norm.weight", lambda names: {"fc.weight", "hidden_norm.weight"} <= set(names)),
    Kind("peagle", "EAGLE-3's tensors and mask_hidden", lambda names: FUSED | {"mask_hidden"} <= set(names)),
    Kind("eagle3", "fc.weight and layers.0.hidden_norm.weight", lambda names: set(names) >= FUSED),
)
"""The first that fits counts."""


def flatten_speculators(config: Config) -> dict[str, Any]:
    """The layers' config and the draft's own fields; EAGLE-3's residual is normed unless the file says no."""
    kind, layers = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind not in (known := [k.name for k in KINDS]):
        raise ForedraftError(f"speculators_model_type {str(kind)[:80]!r}: foredraft reads {', '.join(known)} of speculators' models")
    if not isinstance(layers, Mapping):
        raise ForedraftError("a speculators config needs the object transformer_layer_config, which describes the draft's layers")
    fields = {**layers, "norm_before_residual": kind == "eagle3", **config}
    try:
        tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, TypeError, IndexError):
        return fields
    return {**fields, "num_depths": tokens, "ttt_steps": tokens}


PEERS = (
    Peer(
        "speculators",
        "speculators_model_type in config.json",
        lambda config, names: "speculators_model_type" in config,
        ignored=r"verifier_(lm_head|norm)\.weight",
        flatten=flatten_speculators,
    ),
    Peer(
        "NeMo Automodel",
        "names that begin with 'model.'",
        lambda config, names: any(name.startswith("model.") for name in names),
        {"model.": ""},
    ),
    Peer(
        "SafeAILab/EAGLE or SpecForge",
        "names that begin with 'midlayer.'",
        lambda config, names: any(name.startswith("midlayer.") for name in names),
        {"midlayer.": "layers.0."},
        norms_before_head=True,
    ),
    Peer("DFlash (z-lab, SpecForge, NeMo)", "hidden_norm.weight beside fc.weight", lambda config, names: KINDS[0].recognises(names)),
    Peer(
        "EAGLE-3 as engines read it (SpecForge's P-EAGLE, vLLM)",
        KINDS[2].sign,
        lambda config, names: KINDS[2].recognises(names),
    ),
)
"""The first that fits counts."""


def recognise(config: Config, names: Names) -> tuple[Peer, Kind, dict[str, Any], dict[str, str]]:
    """Whose a checkpoint is, what sort of draft, its config made flat, and the names of its tensors by ours.

    Raises `ForedraftError` with what was seen if it is nobody's, if the names mix two formats, or if the config tells another sort.
    """
    peer = next((p for p in PEERS if p.recognises(config, names)), None)
    if peer is None:
        known = "\n".join(f"    {p.name}: {p.sign}" for p in PEERS)
        raise ForedraftError(f"this is no draft in a format that foredraft reads\n  known, by\n{known}\n{seen(config, names)}")
    flat = peer.flatten(config)
    ours: dict[str, list[str]] = {}
    for name in names:
        if not re.fullmatch(peer.ignored, name):
            ours.setdefault(peer.rename(name), []).append(name)
    if twice := [" and ".join(theirs) for theirs in ours.values() if len(theirs) > 1]:
        raise ForedraftError(f"tensors of two formats in one checkpoint: {'; '.join(twice[:5])}\n{seen(config, names)}")
    kind = next((k for k in KINDS if k.recognises(ours)), None)
    if kind is None:
        known = "\n".join(f"    {k.name}: {k.sign}" for k in KINDS)
        raise ForedraftError(f"names as {peer.name} writes them, but not a draft's\n  known, by\n{known}\n{seen(config, names)}")
    if kind.name != (told := config.get("speculators_model_type", kind.name)):
        raise ForedraftError(f"config.json says '{told}', but the tensors are those of {kind.name}\n{seen(config, names)}")
    return peer, kind, flat, {mine: theirs[0] for mine, theirs in ours.items()}


def seen(config: Config, names: Names, most: int = 24) -> str:
    """What a checkpoint holds, two lines."""

    def some(items: Names) -> str:
        items = sorted(items)
        return ", ".join(i[:80] for i in items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "") or "nothing"

    return f"  seen: tensors {some(names)}\n        config fields {some(config)}"
