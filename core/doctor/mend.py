"""Mends a copy of a draft where what it should be is certain: from another field, from the tensors, or from the target."""

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..contracts.aux_layers import check_aux_layers
from ..contracts.engine import architecture_of
from ..contracts.finding import Finding
from ..errors import ForedraftError
from ..files.ours import WEIGHTS
from ..files.raw import SIDE_FILE, Checkpoint
from ..files.spellings import AUX_LAYERS, NESTED, set_value
from ..files.writing import check_new, replacing
from .config import recorded
from .examine import ORDER, examine_subject
from .origin import named_share, nearest
from .rope import draft_rope, scaling, target_rope
from .subject import Subject, as_mapping

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = "original_max_position_embeddings"
NOISE = 0.002
"""Of the share of accepted tokens."""
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


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


def mend(
    subject: Subject, findings: Iterable[Finding], out: str | Path, accepted: Callable[[Subject], float | None] | None = None
) -> list[str]:
    """Write a copy of the draft to the new directory `out`, mended where `findings` say; what was mended, a line each.

    Each mend is judged alone: it is kept if the copy then examines better, with nothing new, and no fewer of its tokens are
    `accepted`, where that measures a draft (None where it cannot be run). All tensors go into one
    `model.safetensors` under the names they had; small files beside them are copied. Raises `ForedraftError` if nothing can be
    mended with certainty, if the draft cannot be read, or if `out` is there already.
    """
    out = Path(out)
    check_new(out)
    if unread := [f.found for f in subject.draft.findings]:
        raise ForedraftError(f"'{subject.draft.path}' cannot be mended, as it could not be read: {unread[0]}")
    asked, tried = {f.id for f in findings} & set(MENDS), set[str]()
    found, done, dropped = examine_subject(subject), list[str](), list[str]()
    before = accepted(subject) if accepted else None
    while id := next((f.id for f in found if f.id in asked - tried), None):
        tried.add(id)
        made = Copy(subject, copy.deepcopy(dict(subject.draft.config)))
        if not (how := MENDS[id](subject, made)):
            continue
        changed = replace(subject, draft=subject.draft.changed(made.config, made.tensors))
        if not _better(then := examine_subject(changed), found):
            dropped.append(f"{id}: {how}; other findings came with it")
            continue
        if accepted:
            now = _measured(changed, accepted)
            if before is not None and (now is None or now < before - NOISE):
                dropped.append(f"{id}: {how}; fewer drafted tokens are accepted")
                continue
            before = now
        subject, found, tried = changed, then, set()  # what did not help before may help now
        done.append(f"{id}: {how}")
    if not done:
        tries = "".join(f"\n  tried and dropped: {line}" for line in dict.fromkeys(dropped))
        raise ForedraftError(f"nothing of '{subject.draft.path}' can be mended with certainty; nothing was written{tries}")
    with replacing(out) as temporary:
        _write(subject.draft, temporary)
    return done


def _better(now: list[Finding], before: list[Finding]) -> bool:
    """Whether there are fewer findings or lesser ones, and none is new but notes."""
    new = Counter(f.id for f in now if f.severity != "note") - Counter(f.id for f in before)
    counts = [[sum(f.severity == kind for f in found) for kind in ORDER] for found in (now, before)]
    return not new and counts[0] < counts[1]


def _measured(changed: Subject, accepted: Callable[[Subject], float | None]) -> float | None:
    with TemporaryDirectory() as folder:
        _write(changed.draft, Path(folder))
        return accepted(replace(changed, draft=Checkpoint.open(folder)))


def _write(draft: Checkpoint, folder: Path) -> None:
    from safetensors.torch import save_file

    for file in draft.path.iterdir():
        if file.is_file() and (file.name == SIDE_FILE or not file.name.endswith(NOT_COPIED)) and file.stat().st_size < 2**28:
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(draft.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file({name: draft.tensor(name).contiguous().clone() for name in draft.tensors}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)


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
    made.put("t2d", _named(ids.long(), s.whole or 0))
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
            made.put("d2t", named - count)
            made.put("t2d", _named(named, s.whole or len(theirs)))
            return f"{how}, as the rows of lm_head say"
    return None


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

    d2t, whole = s.load("d2t"), s.whole or 0
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


@mends("aux-one-convention", "aux-disagree", "aux-range", "aux-other")
def _aux_layers(s: Subject, made: Copy) -> str | None:
    saved = s.saved.get("eagle_aux_hidden_state_layer_ids")
    sound = {tuple(ids) for ids in ([saved] if isinstance(saved, list) else s.aux_layers.values()) if _fits(s, ids)}
    if len(sound) != 1:
        return None
    ids = list(sound.pop())
    made.set("eagle_aux_hidden_state_layer_ids", ids)
    for name in s.aux_layers:
        made.set(name, [i - AUX_LAYERS[name] for i in ids])
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
    wanted = recorded(s)
    for name, held in (("num_hidden_layers", len(s.layers)), ("num_aux_hidden_states", s.chunks)):
        if wanted.get(name) != held:
            wanted.pop(name, None)  # the file is not what was made, either
    for name, value in wanted.items():
        if name in s.fields or value:
            made.set(name, value)
    return "flags and counts are those it was made with" if made.config != s.draft.config else None


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
