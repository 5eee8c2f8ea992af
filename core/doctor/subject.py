"""What the checks look at: one view of a draft in any format, told by its content, and of its target."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ForedraftError
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

MAX_INTEGER = 2**24
"""More than any size, count or token id of a real model."""
MAX_LAYERS = 1024
_LAYER = re.compile(r"layers\.(\d{1,4})\.")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """A draft and, where known, its target. Fields and tensors that are not what they should be read as absent."""

    draft: Checkpoint
    target: Checkpoint | None = None

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The draft's config; of a speculators one, the decoder's fields beside those of the draft."""
        inner = self.draft.config.get("transformer_layer_config")
        return {**inner, **self.draft.config} if isinstance(inner, Mapping) else self.draft.config

    @cached_property
    def target_fields(self) -> Mapping[str, Any]:
        """The target's config, of a multimodal one that of its text model; empty without a target."""
        config = self.target.config if self.target else {}
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, Mapping) else config

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The name in the file of each tensor, by the name in our format."""
        return {canonical(name): name for name in self.draft.tensors}

    @cached_property
    def made(self) -> Mapping[str, Any]:
        """What foredraft recorded when it made the draft; empty for a peer's."""
        return as_mapping(self.draft.config.get("foredraft"))

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """What the algorithm asked for, where foredraft recorded it."""
        return as_mapping(self.made.get("spec"))

    def integer(self, name: str) -> int | None:
        """A size, count or id of the draft's config."""
        return as_integer(self.fields.get(name))

    def shape(self, name: str) -> Shape | None:
        """Of the tensor called so in our format."""
        return self.draft.tensors[self.names[name]].shape if name in self.names else None

    def load(self, name: str) -> "Tensor | None":
        """The tensor called so in our format; None if it is not there or cannot be read."""
        try:
            return self.draft.tensor(self.names[name]) if name in self.names else None
        except ForedraftError:
            return None

    def load_target(self, *ends: str) -> "Tensor | None":
        """The target's tensor whose name ends so, the first of these that there is; None if it is not there or cannot be read."""
        if self.target is None:
            return None
        found = next((name for end in ends for name in self.target.tensors if name.endswith(end)), None)
        try:
            return self.target.tensor(found) if found else None
        except ForedraftError:
            return None

    # The draft's shape.

    @property
    def hidden_size(self) -> int | None:
        """The draft's width."""
        return self.integer("hidden_size")

    @property
    def target_hidden_size(self) -> int | None:
        """The width of an aux state."""
        return self.integer("target_hidden_size") or as_integer(self.target_fields.get("hidden_size")) or self.hidden_size

    @property
    def vocab_size(self) -> int | None:
        """The target's vocabulary, as the draft has it."""
        return self.integer("vocab_size")

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens that the draft can name."""
        return self.integer("draft_vocab_size") or self.vocab_size

    @property
    def reduced(self) -> bool:
        """Whether it names only a part of the target's vocabulary, by its config or by its head."""
        head, sizes = self.shape("lm_head.weight"), (self.draft_vocab_size, self.vocab_size)
        by_config = None not in sizes and sizes[0] != sizes[1]
        return by_config or bool(head and self.vocab_size and head[0] < self.vocab_size)

    @property
    def target_layers(self) -> int | None:
        """How many decoder layers the target has."""
        recorded = as_mapping(self.made.get("target")).get("num_hidden_layers")
        found = (self.target_fields.get("num_hidden_layers"), recorded, self.fields.get("num_target_layers"))
        return next((n for n in map(as_integer, found) if n), None)

    @cached_property
    def layers(self) -> list[int]:
        """The decoder layers whose tensors are in the file."""
        return sorted({int(match[1]) for name in self.names if (match := _LAYER.match(name))})

    @property
    def prefix(self) -> bool:
        """Whether the context comes as keys and values of every layer (DFlash), not beside the embedding (EAGLE)."""
        return "hidden_norm.weight" in self.names or "dflash_config" in self.fields or self.spec.get("wiring") == "prefix"

    @property
    def parallel(self) -> bool:
        """Whether masked slots are drafted at once (P-EAGLE), by the tensor or by the fields that engines look for."""
        named = any(self.fields.get(name) is not None for name in ("ptd_token_id", "pard_token"))
        return not self.prefix and ("mask_hidden" in self.names or named)

    @property
    def chunks(self) -> int | None:
        """How many aux states fc reads."""
        fc, width = self.shape("fc.weight"), self.target_hidden_size
        return fc[1] // width if fc and len(fc) == 2 and width and fc[1] % width == 0 else None

    @property
    def single_feature(self) -> bool:
        """Whether this is an EAGLE-1 draft: fc brings one feature and the embedding together, the layers are ordinary ones."""
        fc, q, hidden = self.shape("fc.weight"), self.shape("layers.0.self_attn.q_proj.weight"), self.hidden_size
        return bool(fc and q and hidden and fc[-1] == 2 * hidden and q[-1] == hidden) and not self.prefix

    @cached_property
    def aux_layers(self) -> Mapping[str, list[Any]]:
        """The aux layers by each field that states them, as HF `hidden_states` indices."""
        eagle, dflash = as_mapping(self.fields.get("eagle_config")), as_mapping(self.fields.get("dflash_config"))
        stated = {
            "eagle_aux_hidden_state_layer_ids": (self.fields.get("eagle_aux_hidden_state_layer_ids"), 0),
            "aux_hidden_state_layer_ids": (self.fields.get("aux_hidden_state_layer_ids"), 0),
            "eagle_config.eagle_aux_hidden_state_layer_ids": (eagle.get("eagle_aux_hidden_state_layer_ids"), 1),
            "dflash_config.target_layer_ids": (dflash.get("target_layer_ids"), 1),
            "target_layer_ids": (self.fields.get("target_layer_ids"), 1),
        }
        return {
            name: [i + offset if as_integer(i, low=-1) is not None else i for i in ids]
            for name, (ids, offset) in stated.items()
            if isinstance(ids, list) and ids
        }

    @cached_property
    def mask_tokens(self) -> Mapping[str, Any]:
        """The mask token by each field that states it."""
        dflash = as_mapping(self.fields.get("dflash_config"))
        stated = {name: self.fields.get(name) for name in ("mask_token_id", "ptd_token_id", "pard_token")}
        return {name: v for name, v in {**stated, "dflash_config.mask_token_id": dflash.get("mask_token_id")}.items() if v is not None}


def canonical(name: str) -> str:
    """A tensor's name in our format: without `model.`, and with `layers.0.` for SafeAILab's and SpecForge's `midlayer.`."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_integer(value: Any, low: int = 0) -> int | None:
    """`value` if it is an integer of a sane size."""
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_INTEGER else None
