"""Checks of the rotary embedding: its two spellings, and the target's."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..contracts.finding import Finding, error, warning
from ..formats.fields import SCALINGS
from .opened import as_mapping
from .subject import Subject

UNSCALED = ("llama3", "yarn", "longrope")
"""Kinds of scaling that start from the length of the target's first training."""
CONTEXT = "the draft turns its queries and keys otherwise than in training: acceptance falls with the length of the text"


def spellings(s: Subject) -> Iterator[Finding]:
    """`rope_parameters` (transformers 5) against `rope_theta` and `rope_scaling` (transformers 4)."""
    new, theta = as_mapping(s.fields.get("rope_parameters")), s.fields.get("rope_theta")
    old = as_mapping(s.fields.get("rope_scaling"))
    if not s.layers:
        return
    if not new and theta is None and not s.saved:
        yield warning(
            "rope-missing",
            "the config states no rope_theta",
            f"loaders take 10000: unless training did, {CONTEXT}",
            "write the theta of the training",
        )
    numbers = [v for v in (theta, new.get("rope_theta")) if v is not None]
    if any(not isinstance(v, int | float) or isinstance(v, bool) or not 0 < v < 1e15 for v in numbers):
        yield error("rope-theta", f"rope_theta={str(numbers[0])[:40]!r} is no positive number", "loaders fail", "write the training's")
    elif len(numbers) == 2 and float(numbers[0]) != float(numbers[1]):
        yield error(
            "rope-spellings",
            f"rope_theta={theta}, and rope_parameters.rope_theta={new['rope_theta']}",
            f"engines on transformers 4 and 5 read different ones: in some, {CONTEXT}",
            "write the theta of the training in both",
        )
    if new and "rope_scaling" in s.fields and scaling(new) != scaling(old):
        yield error(
            "rope-spellings",
            f"rope_scaling={_short(old or None)}, and rope_parameters={_short(new)}",
            f"engines on transformers 4 and 5 read different ones: in some, {CONTEXT}",
            "write the scaling of the training in both",
        )


def scaled(s: Subject) -> Iterator[Finding]:
    """What a scaling needs; above all the length that it scales from, which readers look for in different places."""
    rope = draft_rope(s)
    kind, name = rope.get("rope_type"), "original_max_position_embeddings"
    if not s.layers or not isinstance(kind, str) or kind == "default":
        return
    if lacking := [field for field in SCALINGS.get(kind, ()) if rope.get(field) is None and field != name]:
        yield error("rope-fields", f"rope_type={kind} without {', '.join(lacking)}", "loaders fail", "write the scaling of the training")
    if kind not in UNSCALED:
        return
    entries = {where: as_mapping(s.fields.get(where)) for where in ("rope_parameters", "rope_scaling")}
    stated = {**{where: entry.get(name) for where, entry in entries.items() if entry}, "the top level": s.fields.get(name)}
    said = {str(length) for length in stated.values() if length is not None}
    outside = kind == "longrope" and bool(said)  # older configs have it at the top level alone
    lacking = [where for where, length in stated.items() if length is None and where != "the top level"]
    theirs = _merged(s.target_fields).get(name) or s.target_fields.get(name)
    alike = target_rope(s).get("rope_type") == kind
    wanted = as_mapping(s.saved.get("rope_parameters")).get(name) or (theirs if alike else None)
    if not said and not wanted and (alike or (s.saved and not altered(s))):  # the target's own config does not say, either
        return
    if (lacking and not outside) or len(said | ({str(wanted)} if wanted else set())) > 1:
        shown = ", ".join(f"{where}: {length}" for where, length in stated.items())
        yield error(
            "rope-original",
            f"{name} of a {kind} RoPE: {shown}" + (f"; it was {wanted}" if wanted else ""),
            f"loaders fail, or scale from another length: {CONTEXT}",
            f"write {wanted or 'the length of the training'} in rope_parameters, in rope_scaling and beside them",
        )


def recorded(s: Subject) -> Iterator[Finding]:
    """The rotary parameters against those that the draft was saved with."""
    if s.layers and altered(s) and not any(f.severity == "error" for f in (*spellings(s), *scaled(s))):
        yield error(
            "rope-other",
            f"RoPE is {_short(draft_rope(s))}, saved with {_short(s.saved['rope_parameters'])}",
            CONTEXT,
            "write what it was saved with (the entry 'foredraft' of config.json), in rope_parameters, rope_theta and rope_scaling",
        )


def sections(s: Subject) -> Iterator[Finding]:
    """Multimodal RoPE, whose parts turn by time, height and width."""
    places = [n for n in ("rope_parameters", "rope_scaling") if as_mapping(s.fields.get(n)).get("mrope_section") is not None]
    if s.layers and places and not as_mapping(s.saved.get("rope_parameters")).get("mrope_section"):
        yield (error if s.saved else warning)(
            "rope-mrope",
            f"mrope_section={_short(as_mapping(s.fields[places[0]])['mrope_section'])} in {' and '.join(places)}",
            "vLLM then gives the draft three positions per token, in place of one: unless it was trained so, it sees images elsewhere",
            "take mrope_section out, if the draft was trained with one position per token",
        )


def altered(s: Subject) -> bool:
    """Whether theta or scaling are no longer what the draft was saved with."""
    then, now = as_mapping(s.saved.get("rope_parameters")), draft_rope(s)
    return bool(then) and (then.get("rope_theta") != now.get("rope_theta") or scaling(then) != scaling(now))


def against_target(s: Subject) -> Iterator[Finding]:
    """Theta and scaling of the draft against the target's."""
    wanted = target_rope(s)
    if not wanted or not s.layers or altered(s):
        return
    mine = draft_rope(s)
    if "rope_theta" in wanted and mine.get("rope_theta", 10000.0) != wanted["rope_theta"]:
        yield warning(
            "rope-target",
            f"the draft's rope_theta is {mine.get('rope_theta', 'not stated: 10000')}, the target's {wanted['rope_theta']}",
            f"unless it was trained with its own, {CONTEXT}",
            "write the target's theta",
        )
    if scaling(mine) != scaling(wanted):
        yield warning(
            "rope-scaling",
            f"the draft's RoPE scaling is {_short(scaling(mine) or None)}, the target's {_short(scaling(wanted) or None)}",
            f"unless it was trained with its own, {CONTEXT}",
            "write the target's rope_parameters and rope_scaling",
        )


def draft_rope(s: Subject) -> dict[str, Any]:
    """The draft's rotary parameters in the newer spelling."""
    return _merged(s.fields)


def target_rope(s: Subject) -> dict[str, Any]:
    """What a draft for this target has: the target's own, as far as a draft can share it; {} without a target."""
    from types import SimpleNamespace

    from ..draft.grouped_query import rope_of

    theirs, head_dim = _merged(s.target_fields), s.integer("head_dim")
    heads, hidden = s.integer("num_attention_heads"), s.hidden_size
    if not theirs:
        return {}
    if "kv_lora_rank" in s.fields:
        return theirs
    size = head_dim or (hidden // heads if hidden and heads else 0)
    try:
        partial = s.target_fields.get("partial_rotary_factor")
        return rope_of(SimpleNamespace(rope_parameters=theirs, partial_rotary_factor=partial), size)
    except (TypeError, ValueError, AttributeError, KeyError):  # the target's entry is malformed
        return {}


def _merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    new, old = as_mapping(fields.get("rope_parameters")), as_mapping(fields.get("rope_scaling"))
    new = as_mapping(new.get("full_attention")) or new  # by type of layer in some targets
    theta = fields.get("rope_theta")
    merged = {**old, **({"rope_theta": theta} if theta is not None else {}), **new}
    if "type" in merged and "rope_type" not in merged:
        merged["rope_type"] = merged["type"]
    return merged


def scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What scales the frequencies; {} where nothing does."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    ignored = ("rope_theta", "type", "rope_type", "original_max_position_embeddings")
    return {} if kind in ("default", None) else {"rope_type": kind, **{k: v for k, v in rope.items() if k not in ignored and v is not None}}


def _short(value: Any) -> str:
    return str(dict(value) if isinstance(value, Mapping) else value)[:160]


CHECKS = (spellings, scaled, sections, recorded, against_target)
