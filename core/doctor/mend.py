"""Mends a copy of a draft where what it should be is certain: from another field, from the tensors, or from the target."""

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import WEIGHTS
from ..config import check_aux_layers
from ..errors import ForedraftError
from ..layouts import architecture_of
from ..writing import check_new, replacing
from .checkpoint import SIDE_FILE
from .finding import Finding
from .pair import EMBEDDING
from .rope import draft_rope, scaling, target_rope
from .subject import Subject, as_mapping
from .tensors import architecture_by_content

if TYPE_CHECKING:
    from torch import Tensor

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


@dataclass
class Copy:
    """A draft being mended: what changes of its config and its tensors."""

    subject: Subject
    config: dict[str, Any]
    tensors: "dict[str, Tensor | None]" = field(default_factory=dict)
    """By the name in the file; None leaves it out."""

    def set(self, name: str, value: Any) -> None:
        """A field, in the decoder's own config where it stands there."""
        inner = self.config.get("transformer_layer_config")
        place = inner if isinstance(inner, dict) and name in inner and name not in self.config else self.config
        place[name] = value

    def put(self, name: str, tensor: "Tensor | None") -> None:
        """A tensor by its name in our format."""
        self.tensors[self.subject.names.get(name, name)] = tensor


Mend = Callable[[Subject, Copy], str | None]
"""Changes the copy and says how; None where what is right is not certain."""
MENDS: dict[str, Mend] = {}
"""By the id of the finding."""


def mend(subject: Subject, findings: Iterable[Finding], out: str | Path) -> list[str]:
    """Write a mended copy of the draft to the new directory `out`; what was mended, a line each.

    All tensors go into one `model.safetensors` under the names they had; small files beside them are copied. Raises
    `ForedraftError` if nothing can be mended with certainty, if the draft cannot be read, or if `out` is there already.
    """
    from safetensors.torch import save_file

    draft, out = subject.draft, Path(out)
    check_new(out)
    if unread := [f.found for f in draft.findings]:
        raise ForedraftError(f"'{draft.path}' cannot be mended, as it could not be read: {unread[0]}")
    mended = Copy(subject, copy.deepcopy(dict(draft.config)))
    ids = dict.fromkeys(f.id for f in findings)
    done = [f"{id}: {how}" for id in ids if id in MENDS and (how := MENDS[id](subject, mended))]
    if not done:
        raise ForedraftError(f"nothing of '{draft.path}' can be mended with certainty; nothing was written")
    kept = {name: draft.tensor(name) for name in draft.tensors if name not in mended.tensors}
    state = {**kept, **{name: t for name, t in mended.tensors.items() if t is not None}}
    with replacing(out) as temporary:
        for file in draft.path.iterdir():
            if file.is_file() and (file.name == SIDE_FILE or not file.name.endswith(NOT_COPIED)) and file.stat().st_size < 2**28:
                shutil.copyfile(file, temporary / file.name)
        (temporary / "config.json").write_text(json.dumps(mended.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file({name: t.contiguous().clone() for name, t in state.items()}, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / WEIGHTS).chmod(0o644)
    return done


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


@mends("d2t-absolute")
def _absolute(s: Subject, made: Copy) -> str | None:
    import torch

    ids = s.load("d2t")
    assert ids is not None
    made.put("d2t", ids.long() - torch.arange(len(ids)))
    made.put("t2d", _named(ids.long(), s.vocab_size or 0))
    return "d2t holds offsets now, t2d is built from it"


@mends("d2t-missing")
def _from_t2d(s: Subject, made: Copy) -> str | None:
    import torch

    t2d, head = s.load("t2d"), s.shape("lm_head.weight")
    if t2d is None or not head or int(t2d.bool().sum()) != head[0]:
        return None
    made.put("d2t", t2d.bool().nonzero()[:, 0] - torch.arange(head[0]))
    return "d2t is built from t2d"


@mends("t2d-shape")
def _t2d(s: Subject, made: Copy) -> str | None:
    import torch

    d2t, whole = s.load("d2t"), s.vocab_size or 0
    if d2t is None:
        return None
    ids = d2t.long() + torch.arange(len(d2t))
    if not bool(((ids >= 0) & (ids < whole)).all()):
        return None
    made.put("t2d", _named(ids, whole))
    return "t2d is built from d2t"


def _named(ids: "Tensor", whole: int) -> "Tensor":
    import torch

    t2d = torch.zeros(whole, dtype=torch.bool)
    t2d[ids] = True
    return t2d


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


@mends("aux-one-convention", "aux-disagree", "aux-range")
def _aux_layers(s: Subject, made: Copy) -> str | None:
    sound = {tuple(ids) for ids in s.aux_layers.values() if _fits(s, ids)}
    if len(sound) != 1:
        return None
    ids = list(sound.pop())
    made.set("eagle_aux_hidden_state_layer_ids", ids)
    for name in s.aux_layers:
        *where, key = name.split(".")
        shown = [i - 1 for i in ids] if where or key == "target_layer_ids" else ids
        if where:
            made.config[where[0]][key] = shown
        else:
            made.set(key, shown)
    return f"aux layers are {ids} now, by each engine's way of counting"


def _fits(s: Subject, ids: list[Any]) -> bool:
    try:
        check_aux_layers(tuple(ids), s.target_layers or max(*ids, 1) + 1)
    except (ForedraftError, TypeError):
        return False
    return s.chunks is None or len(ids) == s.chunks


@mends("norm-twin")
def _twins(s: Subject, made: Copy) -> str | None:
    for i in s.layers[1:]:
        names = [f"layers.{i}.{norm}.weight" for norm in ("input_layernorm", "hidden_norm")]
        for lacking, there in (names, names[::-1]):
            if lacking not in s.names and (norm := s.load(there)) is not None:
                made.put(lacking, norm)
    return "layers above the first carry their norm under both names"


@mends("rope-spellings")
def _rope(s: Subject, made: Copy) -> str | None:
    old = {**as_mapping(s.fields.get("rope_scaling")), "rope_theta": s.fields.get("rope_theta")}
    wanted, spelt = target_rope(s), (as_mapping(s.fields.get("rope_parameters")), old)
    sound = [r for r in spelt if r.get("rope_theta") == wanted.get("rope_theta") and scaling(r) == scaling(wanted)]
    if wanted and sound:
        rope = dict(sound[0])
    elif s.made:
        rope = draft_rope(s)  # training reads rope_parameters
    else:
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    made.set("rope_parameters", {"rope_type": kind, **rope})
    made.set("rope_theta", rope.get("rope_theta"))
    made.set("rope_scaling", {k: v for k, v in rope.items() if k != "rope_theta"} if scaling(rope) else None)
    return "RoPE is spelt alike for transformers 4 and 5"


@mends("embedding-random")
def _embedding(s: Subject, made: Copy) -> str | None:
    theirs = s.load_target(*EMBEDDING)
    mine = s.load("embed_tokens.weight")
    if theirs is None or mine is None or theirs.shape != mine.shape:
        return None
    made.put("embed_tokens.weight", theirs.to(mine.dtype))
    return "embed_tokens is the target's"


@mends("fc-norm-flag")
def _fc_norm(s: Subject, made: Copy) -> str | None:
    made.set("fc_norm", True)
    return "fc_norm is set"


@mends("norm-before-fc-flag")
def _norm_before_fc(s: Subject, made: Copy) -> str | None:
    made.set("norm_before_fc", True)
    return "norm_before_fc is set"


@mends("record-disagrees")
def _record(s: Subject, made: Copy) -> str | None:
    for name in ("fc_norm", "norm_output", "norm_before_residual"):
        if isinstance(s.spec.get(name), bool):
            made.set(name, s.spec[name])
    for name, recorded, held in (("num_hidden_layers", "num_layers", len(s.layers)), ("num_aux_hidden_states", "num_aux", s.chunks)):
        if s.spec.get(recorded) == held is not None:  # else the file is not what was made, either
            made.set(name, held)
    if made.config == s.draft.config:
        return None
    return "flags and counts are those it was made with"


@mends("tied-embeddings")
def _untie(s: Subject, made: Copy) -> str | None:
    made.set("tie_word_embeddings", False)
    return "tie_word_embeddings is false now"


@mends("draft-vocab-size")
def _draft_vocabulary(s: Subject, made: Copy) -> str | None:
    head, d2t = s.shape("lm_head.weight"), s.shape("d2t")
    if not head or (d2t != head[:1] and head[0] != s.vocab_size):
        return None
    made.set("draft_vocab_size", head[0])
    return f"draft_vocab_size is {head[0]} now, the rows of lm_head"


@mends("vocab-size")
def _vocabulary(s: Subject, made: Copy) -> str | None:
    rows = s.shape("embed_tokens.weight")
    if not rows or rows[0] != s.target_fields.get("vocab_size"):
        return None
    made.set("vocab_size", rows[0])
    return f"vocab_size is {rows[0]} now, the target's"


@mends("eagle1-flag")
def _several(s: Subject, made: Copy) -> str | None:
    eagle = made.config.get("eagle_config")
    for place in (made.config, eagle if isinstance(eagle, dict) else {}):
        if "use_aux_hidden_state" in place:
            place["use_aux_hidden_state"] = True
    if "Eagle3" not in architecture_of(made.config):
        made.config["architectures"] = [architecture_by_content(s)]
    return "the config says EAGLE-3 now"


@mends("mask-token-other", "mask-token-disagree")
def _mask_token(s: Subject, made: Copy) -> str | None:
    wanted = s.spec.get("mask_token_id")
    if not isinstance(wanted, int):
        return None
    for name in s.mask_tokens:
        if name.startswith("dflash_config."):
            made.config["dflash_config"]["mask_token_id"] = wanted
        else:
            made.set(name, wanted)
    return f"the mask token is {wanted} by every name"
