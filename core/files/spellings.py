"""Where engines and peers look in a `config.json` for what all drafts state: one table of its spellings."""

from collections.abc import Mapping
from typing import Any

NESTED = ("eagle_config", "dflash_config")
"""Objects that hold fields of the draft."""
AUX_LAYERS = {
    "eagle_aux_hidden_state_layer_ids": 0,
    "aux_hidden_state_layer_ids": 0,
    "eagle_config.eagle_aux_hidden_state_layer_ids": 1,
    "dflash_config.target_layer_ids": 1,
    "target_layer_ids": 1,
}
"""The aux layers, and what makes HF `hidden_states` indices of them. The convention goes with the field, not with who wrote it."""
MASK_TOKEN = ("mask_token_id", "ptd_token_id", "pard_token", "dflash_config.mask_token_id")
"""The token that stands for the unknown."""


def value(fields: Mapping[str, Any], spelling: str) -> Any:
    """What a field says, `object.field` for one inside an object; None if it is not there."""
    *inside, name = spelling.split(".")
    place = fields.get(inside[0]) if inside else fields
    return place.get(name) if isinstance(place, Mapping) else None


def set_value(fields: dict[str, Any], spelling: str, new: Any) -> None:
    """Let a field say something else; the object that a spelling names must be there."""
    *inside, name = spelling.split(".")
    (fields[inside[0]] if inside else fields)[name] = new


def flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All fields side by side, those at the top level before those inside objects."""
    inner = [nested for name in NESTED if isinstance(nested := fields.get(name), Mapping)]
    stated = {name: v for name, v in fields.items() if v is not None}
    return {name: v for part in (*inner, fields, stated) for name, v in part.items()}


TARGET_HEAD = ("embed_tokens.weight", "lm_head.weight")
"""What a draft that uses its target's embedding and head leaves out of its file."""
