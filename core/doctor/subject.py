"""What the checks look at: one view of a draft in any format, told by its content, and of its target."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..contracts.algorithm import AlgorithmBase
from ..contracts.engine import architecture_of
from ..contracts.format import FormatBase
from ..errors import ForedraftError
from ..files.raw import Checkpoint
from ..files.spellings import AUX_LAYERS, MASK_TOKEN, value
from ..formats.content import algorithm_of, known_by
from ..registry import Registry, default_registry
from .described import as_ours, build, spec_of

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
    plugins: Registry | None = None
    """None: all that is installed."""

    @property
    def registry(self) -> Registry:
        """The plugins that are asked."""
        return self.plugins or default_registry()

    @cached_property
    def forms(self) -> list[FormatBase]:
        """The formats in which it is written, the surest first."""
        found = []
        for cls in self.registry.formats().values():
            with suppress(Exception):  # a format is a plugin, and may stumble over what it did not expect
                found += known_by([cls()], self.draft.tensors, self.draft.config)
        return sorted(found, key=lambda form: -form.priority)

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The draft's config, a peer's in the words that engines know, as far as it can be read."""
        for form in self.forms if not self.made else ():
            with suppress(Exception):
                return form.flatten(self.draft.config)
        return self.draft.config

    @cached_property
    def target_fields(self) -> Mapping[str, Any]:
        """The target's config, of a multimodal one that of its text model; empty without a target."""
        config = self.target.config if self.target else {}
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, Mapping) else config

    @cached_property
    def ours(self) -> Mapping[str, str]:
        """The name in our format of each tensor that a draft reads, by the name in the file."""
        named: dict[str, str | None] = {name: name for name in self.draft.tensors}
        for form in self.forms:
            named = {theirs: form.rename(ours) if ours else None for theirs, ours in named.items()}
        return {theirs: ours for theirs, ours in named.items() if ours}

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The name in the file of each tensor, by the name in our format."""
        return {ours: theirs for theirs, ours in self.ours.items()}

    @cached_property
    def made(self) -> Mapping[str, Any]:
        """What foredraft recorded when it made the draft; empty for a peer's."""
        return as_mapping(self.draft.config.get("foredraft"))

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """What the algorithm asked for and what it was told, where foredraft recorded it."""
        return {**as_mapping(self.made.get("options")), **as_mapping(self.made.get("spec"))}

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
    def written(self) -> Mapping[str, Any]:
        """Of a draft made by foredraft, the plain fields that its algorithm writes for engines, but for mask tokens."""
        try:
            fields = self.built.algorithm.engine_fields(self.built.config) if self.built and self.built.algorithm else {}
        except Exception:  # it may stumble over malformed fields
            return {}
        return {name: v for name, v in fields.items() if isinstance(v, int | str) and name not in MASK_TOKEN}

    @cached_property
    def remade(self) -> Mapping[str, Any]:
        """Of a draft made by foredraft, the fields that saving it would write; empty if that cannot be told."""
        try:
            return {**self.built.config.to_dict(), **self.written} if self.built else {}
        except Exception:  # as above
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
        fc, q, hidden = self.shape("fc.weight"), self.shape("layers.0.self_attn.q_proj.weight"), self.hidden_size
        return bool(fc and q and hidden and fc[-1] == 2 * hidden and q[-1] == hidden) and not self.prefix

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


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_integer(value: Any, low: int = 0) -> int | None:
    """`value` if it is an integer of a sane size."""
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_INTEGER else None
