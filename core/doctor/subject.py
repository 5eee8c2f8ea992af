"""What the checks look at: a draft in any format, what its content tells of it, and its target."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..contracts.algorithm import AlgorithmBase
from ..contracts.engine import architecture_of
from ..errors import ForedraftError
from ..files.spellings import AUX_LAYERS, MASK_TOKEN, value
from ..formats.content import algorithm_of
from .described import as_ours, build, spec_of
from .opened import Opened, as_integer, as_mapping

if TYPE_CHECKING:
    from torch import Tensor

    from ..draft.model import BaseDraft

_LAYER = re.compile(r"layers\.(\d{1,4})\.")


@dataclass(frozen=True)
class Subject(Opened):
    """A draft and, where known, its target. Fields and tensors that are not what they should be read as absent."""

    @cached_property
    def algorithm(self) -> type[AlgorithmBase] | None:
        """The algorithm that foredraft recorded, else the one that its tensors or its architecture tell."""
        known = {name: cls for name, cls in self.registry.algorithms().items() if issubclass(cls, AlgorithmBase)}
        names = [self.made.get("algorithm")]
        with suppress(ForedraftError):  # two claim it
            names.append(algorithm_of(self.names, self.registry))
        names += [name for name, cls in known.items() if spec_of(cls).architecture == architecture_of(self.fields)]
        return next((known[name] for name in names if isinstance(name, str) and name in known), None)

    @cached_property
    def built(self) -> "BaseDraft | None":
        """Of a draft made by foredraft, the model that its config describes, without memory; None if it cannot be built."""
        return build(self.draft.config, self.registry) if self.made else None

    @cached_property
    def model(self) -> "BaseDraft | None":
        """The same of any draft: of a peer's, the model that foredraft would make of it."""
        if self.built is not None or self.hidden_size is None:
            return self.built
        heads, shapes = any(n.endswith("q_norm.weight") for n in self.names), (self.chunks, self.target_hidden_size or self.hidden_size)
        return build(as_ours(self.fields, self.algorithm, self.registry, *shapes, qk_norm=heads), self.registry)

    @property
    def architecture(self) -> str | None:
        """The engines' name for what lies in the file."""
        return self.architecture_with(any(n.endswith("q_norm.weight") for n in self.names))

    def architecture_with(self, qk_norm: bool) -> str | None:
        """The same, had it norms on queries and keys, or none."""
        if self.model is None:
            return None
        return type(self.model).architecture_for(self.model.config.spec.model_copy(update={"qk_norm": qk_norm}))

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
        """Of a draft made by foredraft, what saving it writes for engines, but for aux layers and mask tokens; empty where that is open."""
        draft, named = self.built, ("architectures", "model_type")
        if draft is None:
            return {}
        try:
            written, native = draft.algorithm.engine_fields(draft.config), draft.config.to_dict()
        except Exception:  # it may stumble over malformed fields
            return {}
        plain = {name: field for name, field in written.items() if isinstance(field, int | str) and name not in MASK_TOKEN}
        return {name: native[name] for name in named} | plain

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
        """Whether the context comes as keys and values of every layer, not beside the embedding: it then has a norm of its own."""
        return "hidden_norm.weight" in {*self.names, *(self.algorithm.told_by if self.algorithm else ())}

    @cached_property
    def quantised(self) -> str | None:
        """What says that its weights are integers that stand for others; None if they are what they seem."""
        whole = [n for n, file in self.names.items() if "int" in self.draft.tensors[file].dtype and n not in ("d2t", "t2d")]
        weights = sorted(n for n in whole if n.endswith("weight") or "." not in n)
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
        fc, hidden = self.shape("fc.weight"), self.hidden_size
        first = next(filter(None, (self.shape(f"layers.0.self_attn.{name}_proj.weight") for name in ("q", "q_a"))), None)
        return bool(fc and first and hidden and fc[-1] == 2 * hidden and first[-1] == hidden) and not self.prefix

    @cached_property
    def aux_layers(self) -> Mapping[str, list[Any]]:
        """The aux layers by each field that states them, as HF `hidden_states` indices."""
        stated = {name: (value(self.fields, name), offset) for name, offset in AUX_LAYERS.items()}
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
        return {name: token for name in MASK_TOKEN if (token := value(self.fields, name)) is not None}


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor, by its name in our format, belongs to."""
    return int(match[1]) if (match := _LAYER.match(name)) else None
