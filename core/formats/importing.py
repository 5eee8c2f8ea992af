"""`foredraft import`: a peer's checkpoint becomes a draft of ours, tensor for tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..auto import make_algorithm
from ..contracts.algorithm import AlgorithmBase
from ..contracts.loading import PLAIN, Loading
from ..contracts.options import MOST
from ..draft.family import together
from ..draft.grouped_query import GroupedQueryDraft
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..files.hub import find_draft
from ..files.ours import save_draft
from ..files.raw import SIDE_FILE, Checkpoint
from ..files.spellings import TARGET_HEAD, flat
from ..files.writing import check_new
from ..registry import Registry, default_registry
from ..target.loading import load_config, load_target
from ..target.weights import matrix_of
from .content import Content, recognise
from .fields import DraftFields
from .vocabulary import read_ids

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Imported:
    """What became of a peer's checkpoint."""

    path: Path
    form: str
    """The format that it was written in."""
    algorithm: str
    notes: tuple[str, ...]
    """What was filled in, left out or taken in a sense of its own."""


def import_draft(source: str | Path, out: str | Path, target: str, registry: Registry | None = None, loading: Loading = PLAIN) -> Imported:
    """Write the draft in `source`, in any registered format, to `out` as a draft of ours for `target` (both directories or hub ids).

    `target` gives the draft its vocabulary and the width of what it reads, and the embedding and head where the file has none. Nothing
    of the checkpoint's author runs. Raises `ForedraftError` for what is not recognised, damaged, or beyond what a draft of ours computes.
    """
    check_new(out)
    registry = registry or default_registry()
    checkpoint = Checkpoint.open(find_draft(source), registry)
    if checkpoint.findings:
        raise ForedraftError(f"'{source}' cannot be read:\n" + "\n".join(f"  {f.found}; {f.mend}" for f in checkpoint.findings))
    if "foredraft" in checkpoint.config:
        raise ForedraftError(f"'{source}' is a draft of foredraft's already: use it as it is")
    if (checkpoint.path / SIDE_FILE).exists():
        raise ForedraftError(f"'{source}' holds {SIDE_FILE}: its mask token has an embedding of its own; ours is the target's")
    content = recognise(checkpoint.config, checkpoint.tensors, registry)
    work = _Import(checkpoint, content, target, registry, loading, content.form.notes(checkpoint.config))
    draft = work.draft()
    if "embed_tokens.weight" in work.names:
        draft.config.update({"foredraft": {**draft.config.foredraft, "own_embedding": True}})
    save_draft(draft, out, work.state(draft))
    return Imported(Path(out), content.form.name, content.algorithm, tuple(work.notes))


@dataclass
class _Import:
    """One import under way."""

    checkpoint: Checkpoint
    content: Content
    target: str
    registry: Registry
    loading: Loading
    notes: list[str]

    @property
    def names(self) -> Mapping[str, str]:
        """Its tensors' names by ours."""
        return self.content.names

    @cached_property
    def fields(self) -> DraftFields:
        return DraftFields.read(self.content.config, self.registry.algorithm(self.content.algorithm).Options.model_fields)

    @cached_property
    def target_config(self) -> PretrainedConfig:
        config = load_config(self.target, self.loading)
        if hasattr(config, "foredraft"):
            raise ForedraftError(f"'{self.target}' is a draft: --target names the model it drafts for")
        return config

    @cached_property
    def target_model(self) -> Any:
        """Loaded only where its embedding or head is needed."""
        return load_target(self.target, "auto", self.loading)

    @property
    def reads_context(self) -> bool:
        """Whether it has layers, or an fc at least, of a shape of its own: not heads on the target's state."""
        return "fc.weight" in self.names or any(name.startswith("layers.") for name in self.names)

    def shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a tensor of the file, by our name. Raises `ForedraftError` if it is not there, or no matrix."""
        found = self.checkpoint.tensors[self.names[name]].shape if name in self.names else None
        if found is None or len(found) != dimensions or 0 in found:
            raise ForedraftError(f"tensor '{name}': needed with {dimensions} dimensions, found {found or 'none'}")
        return found

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file, by our name."""
        return self.checkpoint.tensor(self.names[name]).detach()

    # The draft's shape.

    def draft(self) -> BaseDraft:
        """The empty draft, without storage, for what config and tensors say."""
        method, cls = self.algorithm(), self.adapter()
        aux_layers = self.fields.aux_layers
        config = cls.make_config(self.target_config, method, aux_layers, self.fields.draft_vocab_size)
        if aux_layers is None and not config.spec.final:
            self.notes.append(f"it names no aux layers: taken are the usual ones, {list(config.aux_layers)} (hidden_states indices)")
        if self.reads_context and not config.spec.layers_of:  # else the target's config says it
            config.update(self.geometry())
        config.update(method.engine_fields(config))
        try:
            with torch.device("meta"):
                draft: BaseDraft = cls(config, method)
            draft.to(self.dtype)
            frequencies = draft.make_rotary().inv_freq
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ForedraftError(f"no draft can be built from its config.json: {str(error)[:200]}") from error
        if not bool(torch.as_tensor(frequencies).isfinite().all()):
            raise ForedraftError(f"its rotary embedding has frequencies that are not finite: {config.rope_parameters}")
        return draft

    def algorithm(self) -> AlgorithmBase:
        """The algorithm with the options that the checkpoint settles. Raises `ForedraftError` where one is missing."""
        cls, fields = self.registry.algorithm(self.content.algorithm), self.fields
        layers = {name.split(".")[1] for name in self.names if name.startswith("layers.")}
        if len(layers) > MOST:
            raise ForedraftError(f"the file names {len(layers)} layers: no draft has so many")
        if fields.num_hidden_layers not in (None, len(layers)):
            self.notes.append(f"config.json says {fields.num_hidden_layers} layers, the file holds {len(layers)}: it is the draft's own")
        chunk = self.target_config.get_text_config().hidden_size
        width = self.shape("fc.weight")[1] if self.reads_context else chunk
        if width % chunk:
            raise ForedraftError(
                f"fc reads {width} features, no multiple of the {chunk} that a layer of '{self.target}' has: is it its draft?"
            )
        if fields.norm_before_residual and "norm_before_residual" not in cls.Options.model_fields:
            raise ForedraftError(f"norm_before_residual: its first layer adds to the normed state, ours of {cls.name} to the state")
        shape = {
            "num_layers": len(layers),
            "num_aux": width // chunk,
            "qk_norm": "layers.0.self_attn.q_norm.weight" in self.names,
            "mask_token_id": fields.mask_token,
        }
        settled = cls.options_from(flat(self.content.config)) | {name: v for name, v in shape.items() if name in cls.Options.model_fields}
        method = make_algorithm(cls.name, settled, self.registry)
        if method.spec.mask_token and fields.mask_token is None:
            raise ForedraftError("the draft's config.json names no mask_token_id: add what it was trained with")
        return method

    def adapter(self) -> Any:
        """The target's adapter where its drafts are Llama-shaped, as all that is read here but layers of the target's own kind; otherwise
        Llama's own."""
        cls = self.registry.adapter_for(self.target_config.get_text_config().model_type, self.target_config)
        own = self.algorithm().fitted(self.target_config).spec.layers_of
        return cls if own or issubclass(cls, GroupedQueryDraft) else self.registry.adapter_for("llama")

    def geometry(self) -> dict[str, Any]:
        """The native fields of the draft's config, by its file and config; tensors that do not fit are found in `state`."""
        fields, hidden = self.fields, self.shape("fc.weight")[0]
        if fields.num_attention_heads is None:
            raise ForedraftError("the draft's config.json names no num_attention_heads")
        head_dim = fields.head_dim or hidden // fields.num_attention_heads
        wide, layered = fields.num_attention_heads * head_dim, any(name.startswith("layers.0.") for name in self.names)
        if layered and wide != (rows := self.shape("layers.0.self_attn.q_proj.weight")[0]):
            raise ForedraftError(f"{fields.num_attention_heads} heads of {head_dim} in config.json, but the file's q_proj has {rows} rows")
        rope = fields.rope
        if rope.short_factor and len(rope.short_factor) != head_dim // 2:
            raise ForedraftError(
                f"rope_type 'longrope' has {len(rope.short_factor)} factors for heads of {head_dim}, expected {head_dim // 2}"
            )
        return {
            "hidden_size": hidden,
            **({"intermediate_size": self.shape("layers.0.mlp.gate_proj.weight")[0]} if layered else {}),
            "num_attention_heads": fields.num_attention_heads,
            "num_key_value_heads": fields.num_key_value_heads or fields.num_attention_heads,
            "head_dim": head_dim,
            "hidden_act": fields.hidden_act,
            "rms_norm_eps": fields.rms_norm_eps,
            "max_position_embeddings": fields.max_position_embeddings,
            "rope_parameters": rope.model_dump(exclude_none=True),
            "attention_bias": fields.attention_bias,
            "mlp_bias": fields.mlp_bias,
        }

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest that holds all its weights. Raises `ForedraftError` for quantised ones."""
        found = {info.dtype for ours, name in self.names.items() if ours not in ("d2t", "t2d") and (info := self.checkpoint.tensors[name])}
        kinds = {str(d).removeprefix("torch."): d for d in FLOATS}
        if other := sorted(found - set(kinds)):
            raise ForedraftError(f"weights of dtype {', '.join(other)}: foredraft reads {', '.join(kinds)}")
        return reduce(torch.promote_types, [kinds[name] for name in found])

    # The draft's tensors.

    def state(self, draft: BaseDraft) -> dict[str, Tensor]:
        """All its tensors by our names. Raises `ForedraftError` with the lists of missing, unexpected and mis-shaped ones."""
        config, spec, expected = draft.config, draft.config.spec, draft.state_dict()
        held = together({name: self.tensor(name) for name in self.names}) if spec.layers_of else {}
        found = {name: self.checkpoint.tensors[theirs].shape for name, theirs in self.names.items()}
        found = {name: tuple(tensor.shape) for name, tensor in held.items()} or found
        doubles = [n for n in found if n.startswith("layers.") and n.endswith(".hidden_norm.weight") and n not in expected]
        vocabulary = {"d2t", "t2d"} & set(found)
        shapes = {n: tuple(t.shape) for n, t in expected.items() if n not in ("d2t", "t2d")}
        given = {n: s for n, s in found.items() if n not in doubles and n not in vocabulary}
        given |= {n: shapes[n] for n, s in given.items() if n in shapes and _row(s) == _row(shapes[n])}
        problems = {
            "missing": sorted(shapes.keys() - given.keys() - {*TARGET_HEAD}),
            "unexpected": sorted(given.keys() - shapes.keys()),
            "mis-shaped (in the file, expected)": [
                f"{n} {s}, {shapes[n]}" for n, s in sorted(given.items()) if n in shapes and s != shapes[n]
            ],
        }
        if any(problems.values()):
            lists = "\n".join(f"  {kind}: {', '.join(n[:120] for n in names)}" for kind, names in problems.items() if names)
            raise ForedraftError(
                f"the {self.content.form.name} checkpoint does not hold what its config.json and '{self.target}' ask for:\n{lists}"
            )
        for name in doubles:
            self.check_double(name)
        ids_W = self.draft_ids(config.draft_vocab_size, config.vocab_size)
        own = [n for n in given if not (spec.target_head and n in TARGET_HEAD)]
        state = {n: (held[n] if held else self.tensor(n)).reshape(shapes[n]).to(self.dtype) for n in own}
        self.settle_head(state, shapes, ids_W, target_head=spec.target_head)
        if config.has_reduced_vocabulary:
            state["d2t"] = ids_W - torch.arange(len(ids_W))
            state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids_W, True)
        return {name: tensor.contiguous() for name, tensor in state.items()}

    def check_double(self, name: str) -> None:
        """Layers above the first have one norm, under two names in some files; nothing tells which is meant where they differ."""
        other = name.replace("hidden_norm", "input_layernorm")
        if other not in self.names or not torch.equal(self.tensor(name), self.tensor(other)):
            raise ForedraftError(f"'{name}' is not '{other}': layers above the first have one norm, whose value is not clear here")

    def settle_head(self, state: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]], ids_W: Tensor, target_head: bool) -> None:
        """Embedding and head that the file lacks come from the target; a draft that uses the target's own must bring no others."""
        for name in TARGET_HEAD:
            if name in state or (target_head and name not in self.names):
                continue
            embeds = name == "embed_tokens.weight"
            module = self.target_model.get_input_embeddings() if embeds else self.target_model.get_output_embeddings()
            theirs = matrix_of(module) if embeds else matrix_of(module, self.target_model.dtype)[ids_W]
            if tuple(theirs.shape) != shapes[name]:
                raise ForedraftError(f"the file has no {name}, and the target's is {tuple(theirs.shape)}, expected {shapes[name]}")
            if not target_head:
                state[name] = theirs.to(self.dtype)
                self.notes.append(f"the file has no {name}: taken from '{self.target}'")
            elif torch.equal(own := self.tensor(name), theirs.to(own.dtype)):
                self.notes.append(f"{name} left out: it is the target's, which a draft by {self.content.algorithm} uses")
            else:
                raise ForedraftError(f"{name} is not that of '{self.target}': a draft by {self.content.algorithm} uses the target's own")

    def draft_ids(self, size: int, vocab: int) -> Tensor:
        """[W] the target id of each draft id; see `read_ids`."""
        lengths = {"d2t": (torch.long, size), "t2d": (torch.bool, vocab)}
        ids_W, note = read_ids({name: self.vector(name, *of) for name, of in lengths.items() if name in self.names}, size, vocab)
        self.notes += [note] if note else []
        return ids_W

    def vector(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        """d2t or t2d, checked."""
        if self.shape(name, 1) != (length,):
            raise ForedraftError(f"'{name}' has {self.shape(name, 1)[0]} entries, expected {length}")
        found = self.tensor(name)
        if found.is_floating_point() or (dtype == torch.long and found.dtype == torch.bool):
            raise ForedraftError(f"'{name}' is {found.dtype}, expected {dtype}")
        return found.to(dtype)


def _row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading dimensions of one."""
    while shape[:-1] and shape[0] == 1:
        shape = shape[1:]
    return shape
