"""Checks of what `config.json` says: types and sizes, layers, aux layers, mask token, sliding window."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..contracts.aux_layers import BEFORE_NORM, check_aux_layers
from ..contracts.finding import Finding, error, note, warning
from ..contracts.options import MOST
from ..errors import ForedraftError
from ..files.raw import DTYPES
from ..files.spellings import NESTED, flat
from .described import LARGE, spec_of
from .opened import as_integer, as_mapping
from .subject import Subject

INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
)
FLAGS = (
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "norm_before_fc",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "rope_interleave",
)
OBJECTS = (*NESTED, "rope_parameters", "rope_scaling", "transformer_layer_config", "foredraft")
TYPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(INTEGERS, lambda v: as_integer(v, 1) is not None),
    "num_hidden_layers": lambda v: as_integer(v) is not None,
    **dict.fromkeys(FLAGS, lambda v: isinstance(v, bool)),
    **dict.fromkeys(OBJECTS, lambda v: isinstance(v, Mapping)),
    **dict.fromkeys(("hidden_act", "model_type"), lambda v: isinstance(v, str)),
    **dict.fromkeys(("dtype", "torch_dtype"), lambda v: isinstance(v, str) and v.removeprefix("torch.") in DTYPES.values()),
    "rms_norm_eps": lambda v: isinstance(v, float) and 0 < v < 1,
    "architectures": lambda v: isinstance(v, list) and bool(v) and all(isinstance(name, str) for name in v),
}
"""What each field has to be where it is stated."""
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def types(s: Subject) -> Iterator[Finding]:
    """Fields of the wrong type, and sizes that no model has."""
    stated = {name: s.fields[name] for name in TYPES if s.fields.get(name) is not None}
    if wrong := [f"{name}={str(value)[:40]!r}" for name, value in stated.items() if not TYPES[name](value)]:
        yield error(
            "config-types",
            f"{', '.join(wrong)}: sizes are integers up to {LARGE}, flags true or false, names text",
            "engines fail while they load, or read them as something else",
            "write what the draft was trained with",
        )
    if missing := [name for name in NEEDED if s.fields.get(name) is None and s.draft.config]:
        yield error(
            "config-fields",
            f"config.json does not state {', '.join(missing)}",
            "loaders fill in defaults of the model family, which are another model's",
            "write what the draft was trained with",
        )


def layers(s: Subject) -> Iterator[Finding]:
    """The draft's own layer count."""
    stated, held = s.integer("num_hidden_layers"), len(s.layers)
    if not s.miscounted:
        return
    targets = f", which is the target's count, {s.target_layers}" if stated == s.target_layers else ""
    yield error(
        "draft-layers",
        f"num_hidden_layers={stated}{targets}; the file holds layers {s.layers}",
        "engines build layers without weights and run them, or drop layers: no token is accepted",
        f"set num_hidden_layers to {held}",
    )


def aux_layers(s: Subject) -> Iterator[Finding]:
    """Which target layers are read: in range, ascending, distinct, as many as fc reads, the same by every field."""
    shown = "; ".join(f"{name} means {ids}" for name, ids in s.aux_layers.items())
    if len({str(ids) for ids in s.aux_layers.values()}) > 1:
        yield error(
            "aux-disagree",
            f"as hidden_states indices, {shown}",
            f"engines read different fields (those inside {' and '.join(NESTED)} count layer outputs from 0, one less): one of them "
            "feeds the draft other layers than it was trained on",
            "write the layers of the training in both conventions",
        )
    made = s.saved.get("eagle_aux_hidden_state_layer_ids")
    for name, ids in list(s.aux_layers.items())[:1]:
        found = list(_aux_layers(s, name, ids))
        yield from found
        if made and all(others == ids != made for others in s.aux_layers.values()) and not found:
            yield error(
                "aux-other",
                f"as hidden_states indices, {shown}; the draft was saved with {str(made)[:80]}",
                "the draft reads other layers of the target than it was trained on",
                f"write {str(made)[:80]}, and one less each inside {' and '.join(NESTED)}",
            )
    if not s.aux_layers and s.chunks is not None and not s.single_feature:
        report = error if s.chunks != 3 else note
        yield report(
            "aux-unstated",
            f"the config states no aux layers, fc reads {s.chunks}",
            "engines take their default, (2, L//2, L-3)",
            "write eagle_aux_hidden_state_layer_ids",
        )
    elif not s.prefix and list(s.aux_layers) == ["eagle_config.eagle_aux_hidden_state_layer_ids"]:
        yield note(
            "aux-one-convention",
            "aux layers are stated inside eagle_config only",
            "SGLang counts layer outputs from 0 there; vLLM's V1 runner takes them as hidden_states indices, one layer too early",
            f"add eagle_aux_hidden_state_layer_ids: {next(iter(s.aux_layers.values()))}",
        )


def _aux_layers(s: Subject, name: str, ids: list[int]) -> Iterator[Finding]:
    count = s.target_layers
    if any(as_integer(i, BEFORE_NORM) is None for i in ids):
        yield error("aux-range", f"{name} holds {str(ids)[:80]}", "they are no layers", "write the layers of the training")
        return
    try:
        final = s.single_feature or s.spec.get("final") is True
        check_aux_layers(tuple(ids), count or max(*ids, 1) + (not final), final)
    except ForedraftError as problem:
        yield error(
            "aux-range",
            str(problem).splitlines()[0],
            "engines sort them and drop doubles, or read a state that training did not (0 is the embedding, the last is not yet normed)",
            "write the layers of the training",
        )
    read = 1 if s.single_feature else s.chunks  # beside an embedding
    stated = s.integer("num_aux_hidden_states")
    if (read is not None and len(ids) != read) or (stated and read and stated != read):
        yield error(
            "aux-count",
            f"{name} states {len(ids)} aux layers, num_aux_hidden_states={stated}, and fc reads {read}",
            "fc does not fit what the engine concatenates",
            f"state {read} layers",
        )
    levels = as_mapping((s.target.config if s.target else {}).get("vision_config")).get("deepstack_visual_indexes")
    deep = len(levels) if isinstance(levels, list) else 0
    if deep and min((i for i in ids if i != BEFORE_NORM), default=deep + 1) <= deep:
        yield warning(
            "aux-before-deepstack",
            f"{name} means {ids}, and the target adds features of images behind each of its first {deep} layers",
            "transformers and SGLang hand on what a layer puts out, vLLM what is there after the addition: with images they differ",
            f"read layers from {deep + 1} on, where all say the same (aux_layers); for texts alone all is well",
        )
    if count and count > 7 and ids == [1, count // 2 - 1, count - 4] and not s.saved:
        yield warning(
            "aux-looks-zero-based",
            f"{name} means {ids} of {count} layers: each one less than the usual [2, {count // 2}, {count - 3}]",
            "if these are layer outputs counted from 0, every engine feeds the draft the layers before those it was trained on",
            "if so, add 1 to each; if it was trained on these layers, all is well",
        )


def features(s: Subject) -> Iterator[Finding]:
    """EAGLE-1's flags on a draft that reads several layers."""
    said = [as_mapping(place).get("use_aux_hidden_state") for place in (s.fields, *map(s.fields.get, NESTED))]
    names = s.fields.get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    by_name = first.startswith("Eagle") and not first.startswith("Eagle3") and "Eagle3" not in first
    several = "layers.0.hidden_norm.weight" in s.names or (s.chunks or 0) > 2
    if several and not s.single_feature and (False in said or by_name):
        yield error(
            "eagle1-flag",
            f"fc reads {s.chunks} aux states, but the config says EAGLE-1: "
            + (f"architectures {first}" if by_name else "use_aux_hidden_state is false"),
            "engines feed the draft the target's last hidden state alone",
            "set use_aux_hidden_state to true and name an EAGLE-3 architecture",
        )


def mask_token(s: Subject) -> Iterator[Finding]:
    """The token that stands for the unknown: there, one of the target's, the same by every name."""
    tokens, vocabulary = s.mask_tokens, s.vocab_size
    shown = ", ".join(f"{name}={str(v)[:20]}" for name, v in tokens.items())
    masks = spec_of(s.algorithm).mask_token if s.algorithm else False
    if s.spec.get("mask_token", masks) and not tokens:
        yield error(
            "mask-token-missing",
            "the draft reads a mask token, and the config names none",
            "engines refuse it, or feed a token that training used for text",
            "write mask_token_id as it was in training",
        )
    if outside := [v for v in tokens.values() if as_integer(v) is None or (vocabulary and v >= vocabulary)]:
        yield error(
            "mask-token-range",
            f"{shown}: {str(outside[0])[:20]} is no token below {vocabulary}",
            "it has no row in the embedding: engines crash or read another row",
            "write the mask token of the training",
        )
    elif len(set(tokens.values())) > 1:
        yield error(
            "mask-token-disagree",
            f"{shown}",
            "engines read the first name they know: some feed another token than training did, and nothing past the first is accepted",
            "write the mask token of the training under each name",
        )
    elif (wanted := s.mask_token) is not None and tokens and wanted not in tokens.values():
        yield error("mask-token-other", f"{shown}; the draft was made with {wanted}", "masked slots read another token", f"write {wanted}")


def sliding_window(s: Subject) -> Iterator[Finding]:
    """Windows that are stated in one place and missing in another; of our drafts, which have none, any."""
    kinds, window = s.fields.get("layer_types"), s.fields.get("sliding_window")
    windowed = flat(s.fields).get("use_swa")
    if s.made:
        whole = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
        asked = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": s.fields.get("use_sliding_window")}
        names = [name for name, value in asked.items() if value and not whole] + ["use_swa"] * bool(windowed)
        if names:
            yield error(
                "sliding-window",
                f"{', '.join(names)}: the draft was trained to see the whole text",
                "engines that read this hide what lies before the window: acceptance falls once the text is longer",
                "take them out of config.json",
            )
    else:
        yield from _windows(s, kinds, window)
    held = s.integer("num_hidden_layers")
    if isinstance(kinds, list) and held is not None and held <= MOST and len(kinds) != held:
        yield warning(
            "layer-types", f"layer_types names {len(kinds)} layers, the draft has {held}", "loaders disagree", "one name per layer"
        )


def _windows(s: Subject, kinds: Any, window: Any) -> Iterator[Finding]:
    sliding = isinstance(kinds, list) and "sliding_attention" in kinds
    off = ", use_sliding_window=false" if s.fields.get("use_sliding_window") is False else ""
    if sliding and (as_integer(window, 1) is None or off):
        yield error(
            "sliding-window",
            f"layer_types asks for sliding attention, but sliding_window={str(window)[:20]}{off}",
            "engines let every layer see the whole text: acceptance falls once it is longer than the window",
            "write sliding_window and use_sliding_window=true as in training",
        )
    elif as_integer(window, 1) and not sliding and s.fields.get("use_sliding_window") is True:
        yield warning(
            "sliding-window",
            f"sliding_window={window}, but no layer_types that say where",
            "loaders differ in which layers get the window; Llama-shaped drafts get none",
            "write layer_types",
        )
    if flat(s.fields).get("use_swa") and as_integer(flat(s.fields).get("swa_window_size"), 1) is None:
        yield error(
            "sliding-window",
            "use_swa without swa_window_size",
            "engines ignore the window",
            "write swa_window_size as in training",
        )


CHECKS = (types, layers, aux_layers, features, mask_token, sliding_window)
