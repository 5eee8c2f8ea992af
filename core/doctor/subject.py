"""What the checks look at: one view of a draft in any format, told by its content, and of its target."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..contracts.options import MOST
from ..errors import ForedraftError
from ..files.raw import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from ..draft.model import BaseDraft

MAX_INTEGER = 2**24
"""More than any size, count or token id of a real model."""
MAX_LAYERS = 1024
EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""Ends of its name in the files of targets."""
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

    @cached_property
    def saved(self) -> Mapping[str, Any]:
        """Fields as they were when foredraft wrote the draft, of those that its tensors do not tell."""
        return as_mapping(self.made.get("fields"))

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

    def load_target(self, end: str) -> "Tensor | None":
        """The target's tensor whose name ends so; None if it is not there or cannot be read."""
        names = self.target.tensors if self.target else ()
        return self._load_target(next((name for name in names if name.endswith(end)), None))

    def target_embedding(self) -> "Tensor | None":
        """[V, T], whatever the target calls it; None if it is not there."""
        return self._load_target(self._target_tables[0])

    def target_head(self) -> "Tensor | None":
        """[V, T], whatever the target calls it, its embedding where they are tied; None if it is not there."""
        return self._load_target(self._target_tables[1])

    def _load_target(self, name: str | None) -> "Tensor | None":
        try:
            return self.target.tensor(name) if self.target and name else None
        except ForedraftError:
            return None

    @cached_property
    def _target_tables(self) -> tuple[str | None, str | None]:
        """The names of the target's embedding and head: matrices of a row per token that belong to no layer."""
        rows, width = (as_integer(self.target_fields.get(name)) for name in ("vocab_size", "hidden_size"))
        if self.target is None or not rows or not width:
            return None, None
        shapes = {name: info.shape for name, info in self.target.tensors.items() if not re.search(r"\.\d+\.", name)}
        tables = [name for name, shape in shapes.items() if len(shape) == 2 and shape[1] == width and shape[0] >= rows]
        embedding = next((name for end in EMBEDDING for name in tables if name.endswith(end)), None)
        heads = [name for name in tables if name != embedding]
        if not heads and self.target_fields.get("tie_word_embeddings") is not False:
            heads = [embedding] if embedding else []
        return embedding, heads[0] if len(heads) == 1 else None

    @cached_property
    def built(self) -> "BaseDraft | None":
        """Of a draft made by foredraft, the model that its config describes, without memory; None if it cannot be built."""
        import torch

        from ..auto import auto_draft

        options = as_mapping(self.made.get("options"))
        sizes = [*self.fields.values(), *options.values()]
        counts = [self.fields.get(name) for name in ("num_hidden_layers", "num_aux_hidden_states")]
        counts += [n for n in options.values() if n not in self.mask_tokens.values()]
        absurd = any(isinstance(n, int) and n > most for most, found in ((MAX_INTEGER, sizes), (MOST, counts)) for n in found)
        if not self.made or absurd or self.integer("num_hidden_layers") is None:
            return None
        try:
            with torch.device("meta"):
                return auto_draft(self.draft.config)
        except Exception:  # whatever a config by someone else makes a constructor raise; other checks say what is wrong with it
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

    @cached_property
    def remade(self) -> Mapping[str, Any]:
        """Of a draft made by foredraft, the fields that saving it would write; empty if that cannot be told."""
        if self.built is None or self.built.algorithm is None:
            return {}
        try:
            return {**self.built.config.to_dict(), **self.built.algorithm.engine_fields(self.built.config)}
        except Exception:  # an algorithm may stumble over malformed fields
            return {}

    @property
    def whole(self) -> int | None:
        """Tokens of the target: as many as the embedding has rows, or t2d entries; by the config where the file has neither."""
        return (self.shape("embed_tokens.weight") or self.shape("t2d") or (self.vocab_size,))[0]

    @property
    def reduced(self) -> bool:
        """Whether it names only a part of the target's vocabulary, by its config or by its head."""
        head, sizes = self.shape("lm_head.weight"), (self.draft_vocab_size, self.whole)
        by_config = None not in sizes and sizes[0] != sizes[1]
        return by_config or bool(head and self.whole and head[0] < self.whole)

    def draft_ids(self) -> "Tensor | None":
        """[W] the target id of each row of the head, by d2t; None where it is missing or leads out of the vocabulary."""
        import torch

        head, d2t = self.shape("lm_head.weight"), self.load("d2t")
        if not head or (d2t is None and self.reduced):
            return None
        ids = torch.arange(head[0])
        if d2t is not None and self.reduced:
            if d2t.shape != (head[0],) or d2t.is_floating_point():
                return None
            ids = ids + d2t.long()
        return ids if len(ids) and int(ids.min()) >= 0 and int(ids.max()) < (self.whole or 0) else None

    @property
    def target_layers(self) -> int | None:
        """How many decoder layers the target has."""
        recorded = as_mapping(self.made.get("target")).get("num_hidden_layers")
        found = (self.target_fields.get("num_hidden_layers"), recorded, self.fields.get("num_target_layers"))
        return next((n for n in map(as_integer, found) if n), None)

    @cached_property
    def layers(self) -> list[int]:
        """The decoder layers whose tensors are in the file."""
        return sorted({i for name in self.names if (i := layer_of(name)) is not None})

    @property
    def prefix(self) -> bool:
        """Whether the context comes as keys and values of every layer (DFlash), not beside the embedding (EAGLE)."""
        return "hidden_norm.weight" in self.names or "dflash_config" in self.fields or self.spec.get("wiring") == "prefix"

    @property
    def parallel(self) -> bool:
        """Whether masked slots are drafted at once (P-EAGLE), by the tensor or by the fields that engines look for."""
        named = any(self.fields.get(name) is not None for name in ("ptd_token_id", "pard_token"))
        return not self.prefix and ("mask_hidden" in self.names or named)

    @cached_property
    def quantised(self) -> str | None:
        """What says that its weights are integers that stand for others; None if they are what they seem."""
        whole = [n for n, file in self.names.items() if "int" in self.draft.tensors[file].dtype and n not in ("d2t", "t2d")]
        weights = sorted(n for n in whole if n.endswith((".weight", "mask_hidden")))
        if weights:
            return f"{', '.join(weights[:3])}: integers ({self.draft.tensors[self.names[weights[0]]].dtype}), not weights"
        method = as_mapping(self.fields.get("quantization_config"))
        return f"quantization_config, quant_method={str(method.get('quant_method'))[:40]}" if method else None

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

    @property
    def mask_token(self) -> int | None:
        """The mask token that the draft was made with, where foredraft recorded it."""
        found = (self.saved.get("mask_token_id"), self.spec.get("mask_token_id"))
        return next((token for token in found if as_integer(token) is not None), None)

    @property
    def miscounted(self) -> bool:
        """Whether the config counts other layers than the file holds, which may be all there are."""
        stated = self.integer("num_hidden_layers")
        odd = stated is not None and (stated != len(self.layers) or self.layers != list(range(stated)))
        return odd and bool(self.draft.tensors) and self.spec.get("num_layers") != stated

    @cached_property
    def mask_tokens(self) -> Mapping[str, Any]:
        """The mask token by each field that states it."""
        dflash = as_mapping(self.fields.get("dflash_config"))
        stated = {name: self.fields.get(name) for name in ("mask_token_id", "ptd_token_id", "pard_token")}
        return {name: v for name, v in {**stated, "dflash_config.mask_token_id": dflash.get("mask_token_id")}.items() if v is not None}


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor, by its name in our format, belongs to."""
    return int(match[1]) if (match := _LAYER.match(name)) else None


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
