"""What usually is wrong with a draft that is not accepted, each as a change to try."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..draft.grouped_query import rope_of
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..files.spellings import AUX_LAYERS, MASK_TOKEN, value
from ..target.capture import depth_of
from .opened import readable


@dataclass(frozen=True)
class Variant:
    """A draft with something changed."""

    change: str
    """In words."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of its config, or options of its algorithm."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """Its tensors, by name."""

    def of(self, draft: BaseDraft) -> BaseDraft:
        """The changed draft. Whatever does not change is shared with `draft`, which stays as it is."""
        config, method = deepcopy(draft.config), draft.algorithm
        config.update(dict(self.fields))
        options = {name: field for name, field in self.fields.items() if name in type(method.options).model_fields}
        with torch.device("meta"):
            made: Any = type(draft)(config, type(method)(method.options.model_copy(update=options)))
        made.load_state_dict({**draft.state_dict(), **self.state}, strict=False, assign=True)  # fc_norm may be left out
        made.rotary_emb = made.rotary_class(config).to(draft.device)
        return made.eval()


@dataclass(frozen=True)
class Suspect:
    """One way to fail without a word."""

    id: str
    breaks: str
    mend: str
    variants: Callable[[BaseDraft, PreTrainedModel], Iterator[Variant]]
    """The changes that would undo it in this draft; none where it cannot be the cause."""
    named: tuple[str, ...] = ()
    """What the ids of findings in the files begin with that name the same cause."""
    tempting: bool = False
    """Whether sound drafts gain by it, too, somewhat: it must gain more."""


def aux_layers(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """All aux layers one up or one down, one of them alone, what other fields name, and the usual ones."""
    if draft.config.spec.final:
        return
    mine, count = draft.config.aux_layers, depth_of(target.config)
    tried = [tuple(i + shift for i in mine) for shift in (1, -1)]
    stated = draft.config.to_dict()
    tried += [tuple(i + shift for i in value(stated, name) or ()) for name, shift in AUX_LAYERS.items()]
    with suppress(ForedraftError):  # the target may be too shallow for the usual ones
        tried.append(draft.algorithm.aux_layers(count) or type(draft).aux_layers(target.config, len(mine)))
    tried += [(*mine[:at], mine[at] + shift, *mine[at + 1 :]) for at in range(len(mine)) for shift in (1, -1) if len(mine) > 1]
    for layers in dict.fromkeys(tried):
        if layers != mine and len(layers) == len(mine) and readable(layers, count):
            change = f"aux layers {list(layers)} in place of {list(mine)}"
            yield Variant(change, {"eagle_aux_hidden_state_layer_ids": list(layers)})


def norms(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The wiring's flags flipped, alone and in pairs, where that needs no tensor that is not there. Norms that changed places."""
    state, flags = draft.state_dict(), _flags(draft)
    for names in (*itertools.combinations(flags, 1), *itertools.combinations(flags, 2)):
        flipped = {name: flags[name] for name in names}
        yield Variant(" and ".join(f"{name}={value}" for name, value in flipped.items()), flipped)
    pairs = [("input_layernorm", "hidden_norm"), ("input_layernorm", "post_attention_layernorm"), ("self_attn.q_norm", "self_attn.k_norm")]
    yield from _swaps(pairs, state)
    less = {n: t for n, t in state.items() if n.endswith("norm.weight") or n.startswith("fc_norm.")}
    if any(float(t.lt(0).float().mean()) > 0.1 for t in less.values()):  # as norms that multiply seldom are
        yield Variant("one more in all weights of norms, which Gemma keeps less one", state={n: t + 1 for n, t in less.items()})
    if len(chunks := sorted(name for name in state if name.startswith("fc_norm."))) > 1:
        yield Variant("the norms before fc in the opposite order", state={n: state[m] for n, m in zip(chunks, chunks[::-1], strict=True)})


def _flags(draft: Any) -> dict[str, bool]:
    """The options of its algorithm that are on or off and change its computation alone, the other way round."""
    method, found = draft.algorithm, {}
    for name, on in method.options.model_dump().items():
        other = type(method)(method.options.model_copy(update={name: not on})) if isinstance(on, bool) else method
        if other.wiring != method.wiring and other.spec == method.spec:
            with torch.device("meta"):
                if type(draft)(draft.config, other).state_dict().keys() <= draft.state_dict().keys():
                    found[name] = not on
    return found


def swapped(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """Projections under each other's names."""
    yield from _swaps([("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")], draft.state_dict())


def _swaps(pairs: list[tuple[str, str]], state: Mapping[str, Tensor]) -> Iterator[Variant]:
    """Two modules of a layer swapped, in every layer that has both."""
    for one, other in pairs:
        twins = {name: name.replace(f".{one}.", f".{other}.") for name in state if f".{one}." in name}
        twins = {a: b for a, b in twins.items() if b in state and state[a].shape == state[b].shape}
        if twins:
            both = {**twins, **{b: a for a, b in twins.items()}}
            yield Variant(f"{one} and {other} swapped", state={name: state[twin] for name, twin in both.items()})


def vocabulary(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """`d2t` read as target ids, one up or down, and by the rows of the target's head that the draft's are like."""
    if not draft.config.has_reduced_vocabulary:
        return
    at = torch.arange(len(draft.d2t), device=draft.d2t.device)
    mine, size = draft.draft_ids, draft.config.vocab_size
    tried = {"read as target ids": draft.d2t, "plus one": mine + 1, "less one": mine - 1}
    if (nearest := _nearest(draft.lm_head.weight, target.get_output_embeddings().weight)) is not None:
        tried["by the target's rows that lm_head's are nearest to"] = nearest
    for words, ids in tried.items():
        if not torch.equal(ids, mine) and int(ids.min()) >= 0 and int(ids.max()) < size and len(ids.unique()) == len(ids):
            yield Variant(f"d2t {words}", state={"d2t": ids - at, "t2d": (at.new_zeros(size)).index_fill(0, ids, 1).bool()})


def _nearest(mine_WD: Tensor, theirs_VD: Tensor) -> Tensor | None:
    """[W] the row of the other matrix that each row has the highest cosine with."""
    if mine_WD.shape[1] != theirs_VD.shape[1]:
        return None
    theirs_VD = torch.nn.functional.normalize(theirs_VD.to(mine_WD.dtype), dim=-1)
    return torch.cat([(chunk @ theirs_VD.T).argmax(-1) for chunk in mine_WD.split(1024)])


def rope(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The target's rotary parameters, and the plainest ones."""
    text, config = target.config.get_text_config(), draft.config
    theirs = getattr(text, "rope_parameters", None)
    if not len(draft.layers) or not theirs:
        return
    theirs = dict(theirs) if hasattr(config, "kv_lora_rank") else rope_of(text, config.head_dim)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    for words, rope in (("the target's RoPE", theirs), *([("a plain RoPE", plain)] if theirs != plain else [])):
        if rope != dict(config.rope_parameters or {}):
            yield Variant(f"{words}, {str(rope)[:120]}", {"rope_parameters": rope})


def layout(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The other order of the dimensions that RoPE turns together."""
    config, state = draft.config, draft.state_dict()
    if hasattr(config, "rope_interleave"):
        yield Variant(f"rope_interleave={not config.rope_interleave}", {"rope_interleave": not config.rope_interleave})
        return
    rows = {name: t for name, t in state.items() if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))}
    for words, shape in (("pairs turned into halves", (-1, 2)), ("halves turned into pairs", (2, -1))):
        turned = {name: t.unflatten(0, (-1, config.head_dim)).unflatten(1, shape).transpose(1, 2).flatten(0, 2) for name, t in rows.items()}
        if turned:
            yield Variant(f"the rows of q_proj and k_proj, {words}", state=turned)


def shape(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """Heads, eps and activation of a draft for this target."""
    try:
        usual = type(draft).shape(target.config.get_text_config())
    except (AttributeError, TypeError, ForedraftError):  # a draft of another family
        return
    for names in (("num_attention_heads", "num_key_value_heads", "head_dim"), ("rms_norm_eps",), ("hidden_act",)):
        theirs = {name: usual[name] for name in names if name in usual and hasattr(draft.config, name)}
        if len(theirs) < len(names) or theirs == {name: getattr(draft.config, name) for name in names}:
            continue
        counts = names[:2] if "head_dim" in names else ()  # whose tensors must stay as wide
        same = all(getattr(draft.config, n) * draft.config.head_dim == theirs[n] * theirs["head_dim"] for n in counts)
        if same and not (counts and draft.config.spec.qk_norm):
            yield Variant(", ".join(f"{name}={value}" for name, value in theirs.items()), theirs)


def order(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The halves of the first layer's input swapped; the aux states in another order."""
    state, width, count = draft.state_dict(), draft.config.hidden_size, draft.config.num_aux_hidden_states
    wide = {n: t.roll(width, dims=1) for n, t in state.items() if n.startswith("layers.0.self_attn") and t.shape[1:] == (2 * width,)}
    if draft.config.spec.final and "fc.weight" in state:
        wide["fc.weight"] = state["fc.weight"].roll(width, dims=1)
    if wide:
        yield Variant("features before the embedding in the first layer's input", state=wide)
    chunks, same = draft.fc.weight.chunk(count, dim=1), tuple(range(count))
    for places in itertools.permutations(same) if count <= 3 else (same[::-1], same[1:] + same[:1], same[-1:] + same[:-1]):
        if places != same:
            moved = {f"fc_norm.{i}.weight": state[f"fc_norm.{p}.weight"] for i, p in enumerate(places) if "fc_norm.0.weight" in state}
            change = f"aux states concatenated in the order {[draft.config.aux_layers[i] for i in places]}"
            yield Variant(change, state={"fc.weight": torch.cat([chunks[i] for i in places], dim=1), **moved})


def embedding(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The target's embedding."""
    theirs, mine = target.get_input_embeddings().weight, draft.embed_tokens.weight
    if theirs.shape == mine.shape and not torch.equal(theirs.to(mine.dtype), mine):
        yield Variant("the target's embedding", state={"embed_tokens.weight": theirs.to(mine.dtype)})


def head(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The target's head."""
    theirs, mine, ids = target.get_output_embeddings().weight, draft.lm_head.weight, draft.draft_ids
    fits = int(ids.min()) >= 0 and int(ids.max()) < len(theirs) and theirs.shape[1] == mine.shape[1]
    if fits and not torch.equal(theirs[ids].to(mine.dtype), mine):
        yield Variant("the target's head", state={"lm_head.weight": theirs[ids].to(mine.dtype)})


def mask_token(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """The mask tokens that other fields name, those that stand for nothing, and the last ids."""
    config, text = draft.config, target.config.get_text_config()
    if config.mask_token_id is None:
        return
    others = [*(value(config.to_dict(), name) for name in MASK_TOKEN), config.spec.mask_token_id]
    others += [getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    others += range(config.vocab_size - 1, max(config.vocab_size - 5, 0), -1)
    for token in dict.fromkeys(t for t in others if isinstance(t, int)):
        if 0 <= token < config.vocab_size and token != config.mask_token_id:
            yield Variant(f"mask token {token} in place of {config.mask_token_id}", {"mask_token_id": token})


def noise(draft: Any, target: PreTrainedModel) -> Iterator[Variant]:
    """What a part of the draft passes on left out."""
    state = draft.state_dict()
    parts = {name: [name] for name in ("fc.weight", *(n for n in state if "." not in n and n not in ("d2t", "t2d")))}
    last = {"self_attn": "o_proj", "mlp": "down_proj"}
    parts |= {f"layers.{i}.{part}": [f"layers.{i}.{part}.{end}.weight"] for i in range(len(draft.layers)) for part, end in last.items()}
    for part, names in parts.items():
        if all(name in state for name in names):
            yield Variant(f"{part} left out", state={name: torch.zeros_like(state[name]) for name in names})
    width = draft.config.hidden_size
    if draft.config.target_hidden_size == width:
        through = torch.zeros_like(draft.fc.weight)
        through[:, -width:] = torch.eye(width, dtype=through.dtype, device=through.device)
        yield Variant("fc passing on the last aux state as it is", state={"fc.weight": through})


SUSPECTS = (
    Suspect(
        "aux", "the draft reads other layers than in training", "write these layers, in both conventions", aux_layers, ("aux-", "record-")
    ),
    Suspect(
        "norms",
        "the draft is normed otherwise than in training",
        "set the flags so, at the top level of config.json; where norms changed places or lost one, change them in the file",
        norms,
        ("fc-norm-", "norm-", "record-", "tensors-swapped"),
        tempting=True,  # more norms keep the states from growing as they are fed back
    ),
    Suspect("d2t", "drafted tokens are taken for others", "write this mapping into d2t and t2d", vocabulary, ("d2t-", "t2d-")),
    Suspect("rope", "the draft turns queries and keys otherwise than in training", "write these rope_parameters", rope, ("rope-",)),
    Suspect(
        "layout",
        "queries and keys are turned by other pairs of dimensions than in training",
        "put the rows, or the flag, as in training",
        layout,
        ("rows-order", "rope-interleave", "rope-other"),
    ),
    Suspect(
        "order",
        "weights meet the wrong part of their input",
        "reorder the columns, or name the layers in the other order",
        order,
        ("fc-order", "rows-order", "aux-"),
    ),
    Suspect("swapped", "weights do each other's work", "swap their names in the file", swapped, ("tensors-swapped",)),
    Suspect("shape", "the draft computes otherwise than in training", "write it so", shape, ("heads-", "epsilon-")),
    Suspect(
        "embedding", "the draft reads noise in place of tokens", "take the target's embedding, or leave it out", embedding, ("embedding-",)
    ),
    Suspect(
        "head",
        "the draft's states are read by a head that is not theirs",
        "take the target's rows, or train the head",
        head,
        ("head-", "d2t-other", "tensor-"),
    ),
    Suspect(
        "mask-token",
        "masked slots read a token that training did not use for them",
        "write this mask token by every name",
        mask_token,
        ("mask-token-",),
    ),
    Suspect(
        "noise",
        "these weights do more harm than none: training did not leave them so",
        "copy the file of the training anew",
        noise,
        ("tensor-", "rows-equal", "fc-random", "mask-hidden-"),
    ),
)
