"""Checks of a draft of ours against what foredraft recorded when it made it, and against what any draft of ours computes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ..contracts.finding import Finding, error
from ..files.spellings import NESTED, flat
from ..formats.fields import DraftFields
from .config import NEEDED, TYPES
from .subject import Subject


def as_made(s: Subject) -> dict[str, Any]:
    """What foredraft recorded of fields when it made the draft, without those of which other checks tell."""
    wanted = {name: s.spec[name] for name in ("fc_norm", "norm_output", "norm_before_residual") if name in s.spec}
    elsewhere = ("attention_bias", "eagle_aux_hidden_state_layer_ids", "mask_token_id", "mlp_bias", "rope_parameters")
    wanted |= {name: value for name, value in s.saved.items() if name not in elsewhere}
    for name, spec, held in (("num_hidden_layers", "num_layers", len(s.layers)), ("num_aux_hidden_states", "num_aux", s.chunks)):
        if spec in s.spec and s.integer(name) == held:  # else the file says which is right
            wanted[name] = s.spec[spec]
    return {**wanted, **s.remade}


def changed(s: Subject) -> Iterator[Finding]:
    """Fields that differ from what foredraft recorded when it made the draft."""
    both = [(name, s.fields.get(name), then) for name, then in as_made(s).items()]
    told = {name for name, now, _ in both if (name in NEEDED if now is None else not TYPES.get(name, bool)(now))}
    if other := [(name, now, then) for name, now, then in both if (now or False) != (then or False) and name not in told]:
        yield error(
            "record-disagrees",
            "; ".join(f"{name}={str(now)[:40]}, made with {str(then)[:40]}" for name, now, then in other),
            "the draft runs otherwise than it was trained, or engines take it for another",
            "write what it was made with (the entry 'foredraft' of config.json)",
        )


def foreign(s: Subject) -> Iterator[Finding]:
    """Of our drafts: what engines would compute by fields that no draft of ours has."""
    if not s.made:
        return
    # Others say what is wrong there; and what the draft's own family has a field for, it computes.
    skipped = {"layer_types", "sliding_window", "use_sliding_window", "use_swa", "norm_before_fc", "use_aux_hidden_state", *NESTED}
    if s.built is not None:
        skipped |= {field.name for field in dataclasses.fields(s.built.config)} | set(s.built.config.rope_parameters or ())
        skipped |= set(s.built.algorithm.options.model_dump())
    try:
        problems = DraftFields.model_validate({n: v for n, v in flat(s.fields).items() if n not in skipped}).objections()
    except ValidationError:  # fields of a wrong type are named elsewhere
        return
    if problems:
        yield error(
            "config-foreign",
            "; ".join(problems)[:300],
            "the draft was trained without: engines that read this compute something else",
            "take these fields out of config.json",
        )


CHECKS = (changed, foreign)
