"""What is certain of a broken draft: from another field, from the tensors, from what was recorded, or from the target."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contracts.engine import architecture_of
from ..files.spellings import AUX_LAYERS, NESTED, set_value
from .opened import as_mapping, readable
from .origin import named_share, nearest
from .record import as_made
from .rope import draft_rope, scaling, target_rope
from .subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = "original_max_position_embeddings"


@dataclass
class Copy:
    """A draft being mended: what changes of its config and its tensors."""

    subject: Subject
    config: dict[str, Any]
    tensors: "dict[str, Tensor | None]" = field(default_factory=dict)
    """By the name in the file; None leaves it out."""

    def set(self, name: str, value: Any) -> None:
        """A field, `object.field` for one inside an object; in the decoder's own config where it stands there."""
        inner = self.config.get("transformer_layer_config")
        place = inner if isinstance(inner, dict) and name in inner and name not in self.config else self.config
        set_value(place, name, value)

    def put(self, name: str, tensor: "Tensor | None") -> None:
        """A tensor by its name in our format."""
        self.tensors[self.subject.names.get(name, name)] = tensor


Mend = Callable[[Subject, Copy], str | None]
"""Changes the copy and says how; None where what is right is not certain."""
MENDS: dict[str, Mend] = {}
"""By the id of the finding."""


def mends(*ids: str) -> Callable[[Mend], Mend]:
    """Register a mend for findings of these ids."""

    def register(function: Mend) -> Mend:
        MENDS.update(dict.fromkeys(ids, function))
        return function

    return register


@mends("draft-layers")
def _layers(s: Subject, made: Copy) -> str | None:
    count, stated = len(s.layers), s.integer("num_hidden_layers")
    certain = s.spec["num_layers"] == count if "num_layers" in s.spec else stated == s.target_layers
    if not count or not certain or s.layers != list(range(count)):
        return None  # layers may be missing from the file
    made.set("num_hidden_layers", count)
    return f"num_hidden_layers is {count} now, as many as the file holds"


def _name(s: Subject, made: Copy, ids: "Tensor") -> None:
    """Let the rows of the head be these tokens, by `d2t` and by `t2d`."""
    import torch

    made.put("d2t", ids - torch.arange(len(ids)))
    made.put("t2d", torch.zeros(s.whole or int(ids.max()) + 1, dtype=torch.bool).index_fill(0, ids, True))


@mends("d2t-absolute")
def _absolute(s: Subject, made: Copy) -> str | None:
    ids = s.load("d2t")
    assert ids is not None
    _name(s, made, ids.long())
    return "d2t holds offsets now, t2d is built from it"


@mends("d2t-other", "d2t-range", "d2t-duplicates", "d2t-t2d", "d2t-zero")
def _renamed(s: Subject, made: Copy) -> str | None:
    """Of the vocabularies that the file or a shift suggests, the one whose tokens the head's rows are."""
    import torch

    d2t, t2d, head, theirs = s.load("d2t"), s.load("t2d"), s.load("lm_head.weight"), s.target_head()
    if d2t is None or head is None or theirs is None or head.shape[1:] != theirs.shape[1:] or d2t.shape != head.shape[:1]:
        return None
    count = torch.arange(len(head))
    ids, (at, found, clear) = d2t.long() + count, nearest(head, theirs)
    tried = {"d2t holds offsets now": d2t.long(), "d2t ascends now": ids.sort().values}
    if t2d is not None:
        tried["d2t is built from t2d"] = t2d.bool().nonzero()[:, 0]
    if bool(clear.any()):
        shift = int((found - ids[at])[clear].mode().values)
        tried[f"d2t is moved by {shift}"] = ids + shift
    for how, named in {"t2d is built from d2t": ids, **tried}.items():
        if len(named) == len(head) and bool(((named >= 0) & (named < len(theirs))).all()) and named_share(head, theirs, named) > 0.8:
            _name(s, made, named)
            return f"{how}, as the rows of lm_head say"
    return None


@mends("d2t-missing")
def _from_t2d(s: Subject, made: Copy) -> str | None:
    t2d, head = s.load("t2d"), s.shape("lm_head.weight")
    if t2d is None or not head or int(t2d.bool().sum()) != head[0]:
        return None
    _name(s, made, t2d.bool().nonzero()[:, 0])
    return "d2t is built from t2d"


@mends("t2d-shape")
def _t2d(s: Subject, made: Copy) -> str | None:
    if (ids := s.draft_ids()) is None:
        return None
    _name(s, made, ids)
    return "t2d is built from d2t"


@mends("d2t-full")
def _full(s: Subject, made: Copy) -> str | None:
    for name in ("d2t", "t2d"):
        made.put(name, None)
    return "d2t and t2d are left out"


@mends("d2t-dtype")
def _integers(s: Subject, made: Copy) -> str | None:
    d2t = s.load("d2t")
    if d2t is None or not bool((d2t == d2t.round()).all()):
        return None
    made.put("d2t", d2t.long())
    return "d2t is int64 now"


@mends("aux-one-convention", "aux-disagree", "aux-range", "aux-other")
def _aux_layers(s: Subject, made: Copy) -> str | None:
    saved = s.saved.get("eagle_aux_hidden_state_layer_ids")
    sound = {
        tuple(ids)
        for ids in ([saved] if isinstance(saved, list) else s.aux_layers.values())
        if s.chunks in (None, len(ids)) and readable(ids, s.target_layers)
    }
    if len(sound) != 1:
        return None
    ids = list(sound.pop())
    made.set("eagle_aux_hidden_state_layer_ids", ids)
    for name in s.aux_layers:
        made.set(name, [i - AUX_LAYERS[name] for i in ids])
    return f"aux layers are {ids} now, by each engine's way of counting"


@mends("norm-twin")
def _twins(s: Subject, made: Copy) -> str | None:
    for i in s.layers[1:]:
        names = [f"layers.{i}.{norm}.weight" for norm in ("input_layernorm", "hidden_norm")]
        for lacking, there in (names, names[::-1]):
            if lacking not in s.names and (norm := s.load(there)) is not None:
                made.put(lacking, norm)
    return "layers above the first carry their norm under both names"


@mends("rope-spellings", "rope-original", "rope-other", "rope-missing")
def _rope(s: Subject, made: Copy) -> str | None:
    old = {**as_mapping(s.fields.get("rope_scaling")), "rope_theta": s.fields.get("rope_theta")}
    wanted, spelt = target_rope(s), (as_mapping(s.fields.get("rope_parameters")), old)
    sound = [r for r in spelt if r.get("rope_theta") == wanted.get("rope_theta") and scaling(r) == scaling(wanted)]
    if saved := as_mapping(s.saved.get("rope_parameters")):
        rope = dict(saved)
    elif wanted and sound:
        rope = {**sound[0], **{name: length for name, length in wanted.items() if name == LENGTH}}
    elif s.made and s.fields.get("rope_parameters"):
        rope = draft_rope(s)  # training reads rope_parameters
    else:
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    made.set("rope_parameters", {"rope_type": kind, **rope})
    made.set("rope_theta", rope.get("rope_theta"))
    made.set("rope_scaling", {k: v for k, v in rope.items() if k != "rope_theta"} if scaling(rope) else None)
    if LENGTH in rope:
        made.set(LENGTH, rope[LENGTH])
    return "RoPE is spelt alike for transformers 4 and 5"


@mends("embedding-random")
def _embedding(s: Subject, made: Copy) -> str | None:
    theirs, mine = s.target_embedding(), s.load("embed_tokens.weight")
    if theirs is None or mine is None or theirs.shape != mine.shape:
        return None
    head, whose, ids = s.load("lm_head.weight"), s.target_head(), s.draft_ids()
    if head is None or whose is None or ids is None or head.shape[1:] != whose.shape[1:] or named_share(head, whose, ids) < 0.8:
        return None  # nothing says that this is the draft's target
    made.put("embed_tokens.weight", theirs.to(mine.dtype))
    return "embed_tokens is the target's"


def _set(s: Subject, made: Copy, name: str, value: bool) -> str:
    made.set(name, value)
    return f"{name} is {str(value).lower()} now"


MENDS |= {
    "fc-norm-flag": partial(_set, name="fc_norm", value=True),
    "norm-before-fc-flag": partial(_set, name="norm_before_fc", value=True),
    "tied-embeddings": partial(_set, name="tie_word_embeddings", value=False),
}


@mends("record-disagrees")
def _record(s: Subject, made: Copy) -> str | None:
    wanted = as_made(s)
    for name, held in (("num_hidden_layers", len(s.layers)), ("num_aux_hidden_states", s.chunks)):
        if wanted.get(name) != held:
            wanted.pop(name, None)  # the file is not what was made, either
    for name, value in wanted.items():
        if name in s.fields or value:
            made.set(name, value)
    return "flags and counts are those it was made with" if made.config != s.draft.config else None


@mends("draft-vocab-size")
def _draft_vocabulary(s: Subject, made: Copy) -> str | None:
    head, d2t = s.shape("lm_head.weight"), s.shape("d2t")
    if not head or (d2t != head[:1] and head[0] != s.vocab_size):
        return None
    made.set("draft_vocab_size", head[0])
    return f"draft_vocab_size is {head[0]} now, the rows of lm_head"


@mends("vocab-size")
def _vocabulary(s: Subject, made: Copy) -> str | None:
    rows, t2d = s.shape("embed_tokens.weight"), s.shape("t2d")
    told = (s.target_fields.get("vocab_size"), as_mapping(s.made.get("target")).get("vocab_size"), *(t2d or ()))
    if not rows or rows[0] not in told:
        return None
    made.set("vocab_size", rows[0])
    return f"vocab_size is {rows[0]} now, the target's"


@mends("eagle1-flag")
def _several(s: Subject, made: Copy) -> str | None:
    for place in (made.config, *map(made.config.get, NESTED)):
        if isinstance(place, dict) and "use_aux_hidden_state" in place:
            place["use_aux_hidden_state"] = True
    if "Eagle3" not in architecture_of(made.config):
        made.config["architectures"] = [s.architecture]
    return "the config says EAGLE-3 now"


@mends("mask-token-other", "mask-token-disagree", "mask-token-range", "mask-token-missing")
def _mask_token(s: Subject, made: Copy) -> str | None:
    wanted = s.mask_token
    if wanted is None:
        return None
    for name in [*s.mask_tokens, *(["mask_token_id"] if s.made else [])]:
        made.set(name, wanted)
    return f"the mask token is {wanted} by every name"


@mends("qk-norm-architecture")
def _architecture(s: Subject, made: Copy) -> str | None:
    made.config["architectures"] = [s.architecture]
    made.set("model_type", "qwen3")
    return "the architecture is the one with norms on queries and keys"


@mends("bias-flag")
def _biases(s: Subject, made: Copy) -> str | None:
    parts = {"attention_bias": ".self_attn.", "mlp_bias": ".mlp."}
    flags = [flag for flag, part in parts.items() if any(part in name and name.endswith(".bias") for name in s.names)]
    for flag in flags:
        made.set(flag, True)
    return f"{' and '.join(flags)} set"
