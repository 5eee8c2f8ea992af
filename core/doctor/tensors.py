"""Checks of the tensors: which are there, their shapes, and what stands in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..contracts.engine import architecture_of
from ..contracts.finding import Finding, error, note, warning
from ..errors import ForedraftError, few
from ..files.raw import read_tensor
from ..files.spellings import TARGET_HEAD, flat
from .opened import Shape
from .plugins import algorithms
from .subject import Subject, layer_of

if TYPE_CHECKING:
    from torch import Tensor

HARMLESS = "rotary_emb.inv_freq"
"""End of names that loaders skip on purpose."""
NORMED = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
"""Rows are tokens: told with the sizes of the vocabulary."""
BIAS = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+\.bias")
FLAGGED = ("fc_norm.", "input_norm.")
"""Beginnings of names that a flag asks for: told with the flag."""


def names(s: Subject) -> Iterator[Finding]:
    """Tensors that are missing, unexpected or of another shape than the config asks for."""
    if not s.draft.tensors or (s.single_feature and s.built is None):
        return
    needed, allowed = _expected(s)
    both = {*s.names, *needed, *allowed}
    elsewhere = {*TABLES[1:], *(n for n in s.names if any(qk_norms(s)) and n.endswith(NORMED))} | {
        n for n in both if n.startswith(FLAGGED) or BIAS.fullmatch(n)
    }
    told = " ".join(f.found for f in algorithms(s))
    elsewhere |= {n for n in both if "." not in n and n in told}
    if s.miscounted:
        stated = s.integer("num_hidden_layers") or 0
        elsewhere |= {n for n in both if (i := layer_of(n)) is not None and (i not in s.layers or i >= stated)}
    if missing := sorted(set(needed) - set(s.names) - elsewhere):
        yield error(
            "tensors-missing",
            few(missing),
            "vLLM loads the draft without a word and runs it on uninitialised memory; so does SGLang",
            "copy the file of the training anew, or clear the flags in config.json that ask for them",
        )
    if needed and (extra := sorted(n for n in set(s.names) - set(needed) - set(allowed) - elsewhere if not n.endswith(HARMLESS))):
        yield warning(
            "tensors-unexpected",
            few([s.names[name] for name in extra]),
            "vLLM refuses the draft, SGLang skips them without a word",
            "set the flags in config.json that ask for them, or leave them out of the file",
        )
    wanted = {n: (None, *asked[1:]) if n in TABLES else asked for n, asked in {**allowed, **needed}.items() if asked}
    if shapes := [
        (n, s.shape(n), wanted[n]) for n in s.names if n in wanted and n not in elsewhere - {*TABLES} and not _fits(s.shape(n), wanted[n])
    ]:
        yield error(
            "tensors-shape",
            few(
                [
                    f"{name} {list(found or ())}, expected {['?' if n is None else n for n in asked]}"
                    for name, found, asked in sorted(shapes)
                ]
            ),
            "loaders refuse the draft, or cut and broadcast",
            "write the sizes of the training into config.json",
        )
    if len(s.names) < len(s.ours):
        yield error(
            "tensors-twice",
            f"{len(s.ours)} tensors have {len(s.names)} names once those of {' and '.join(f.name for f in s.forms)} are read as ours",
            "which one is loaded depends on their order",
            "leave one of each out of the file",
        )
    if differ := [n for n, file in s.draft.doubles.items() if not _equal(s.load(s.ours.get(n, n)), _read(file, n))]:
        files = sorted({file.name for file in s.draft.doubles.values()})
        yield error(
            "tensors-twice",
            f"{few(differ)} in {', '.join(files)} and, with other values, in another file; no index says which counts",
            "which one is loaded depends on the order in which files are read",
            "take the file out that is not the draft's",
        )


def _read(file: Path, name: str) -> "Tensor | None":
    try:
        return read_tensor(file, name)
    except ForedraftError:
        return None


def _fits(found: Shape | None, asked: tuple[int | None, ...]) -> bool:
    """Whether a shape is as asked, None standing for any size."""
    return found is not None and len(found) == len(asked) and all(a is None or a == f for f, a in zip(found, asked, strict=True))


Shapes = dict[str, "tuple[int | None, ...] | None"]


def _expected(s: Subject) -> tuple[Shapes, Shapes]:
    """Needed and allowed tensors with their shapes, where these are told: those of the model that the config describes."""
    draft = s.model
    if draft is None:
        return {}, {}
    left_out = set(draft._keys_to_ignore_on_save or ())
    shapes: Shapes = {name: tuple(t.shape) for name, t in draft.state_dict().items() if name not in left_out}
    fused = len(draft.layers) > 0 and hasattr(draft.layers[0], "hidden_norm")  # whose upper layers carry their norm twice
    upper = (f"layers.{i}.{{}}.weight" for i in range(1, len(draft.layers)) if fused)
    twins = {name.format("hidden_norm"): shapes[name.format("input_layernorm")] for name in upper}
    if s.built is not None:
        return shapes | twins, dict.fromkeys(TARGET_HEAD)
    # A peer's may be read in more than one way: layers above the first have one norm under either name, fc reads what was concatenated.
    told = all(s.integer(name) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"))
    needed = {name: shape if told else None for name, shape in shapes.items() if name not in TARGET_HEAD}
    if told:
        needed["fc.weight"] = (s.hidden_size, None)
    if s.fields.get("norm_before_fc") is True:
        needed["input_norm.weight"] = None
    return needed, {"lm_head.weight": shapes.get("lm_head.weight"), "embed_tokens.weight": None, **twins, "d2t": None, "t2d": None}


def flags(s: Subject) -> Iterator[Finding]:
    """Norm flags against the tensors that they ask for."""
    for flag, begin, what in (("fc_norm", "fc_norm.", "one norm per aux chunk"), ("norm_before_fc", "input_norm.", "a norm before fc")):
        there = sorted(name for name in s.names if name.startswith(begin))
        said = True in (s.fields.get(flag), flat(s.fields).get(flag))
        if there and not said and s.spec.get(flag) is not True:
            yield error(
                f"{flag.replace('_', '-')}-flag",
                f"the file holds {few(there)} ({what}), the config does not set {flag}",
                "vLLM refuses the draft, SGLang skips them: fc reads states of another size than in training",
                f"set {flag} to true",
            )
        if said and not there and s.spec.get(flag) is not False:
            yield error(
                f"{flag.replace('_', '-')}-tensors",
                f"the config sets {flag}, the file holds no {begin}*",
                "engines norm with weights of one: unless training did so, the draft reads other features",
                f"set {flag} to false if the draft was trained without, else copy the file anew",
            )


def biases(s: Subject) -> Iterator[Finding]:
    """Bias flags against the biases that they ask for; layers of the target's own kind follow its config, not these flags."""
    if s.model is not None and s.model.family is not None:
        return
    for flag, part, projections in (("attention_bias", "self_attn", "qkvo"), ("mlp_bias", "mlp", ("gate", "up", "down"))):
        there = sorted(name for name in s.names if (match := BIAS.fullmatch(name)) and match[1] == part)
        weights = [f"layers.{i}.{part}.{x}_proj" for i in s.layers for x in projections]
        lacking = [f"{name}.bias" for name in weights if f"{name}.weight" in s.names and f"{name}.bias" not in s.names]
        if s.fields.get(flag) is True and lacking:
            yield error(
                "bias-tensors",
                f"{flag}=true, and the file holds no {few(lacking)}",
                "engines make biases and leave them uninitialised, or refuse the draft",
                f"set {flag} to false, if the draft was trained without",
            )
        if s.saved.get(flag) is True and s.fields.get(flag) is not True and not there:
            yield error(
                "bias-lost",
                f"the draft was made with {flag}, and has neither the flag nor biases",
                "its layers add nothing where they added a trained bias",
                "copy config.json and the file of the training anew",
            )
        if there and s.fields.get(flag) is not True:
            yield error(
                "bias-flag",
                f"the file holds {few(there)}, the config does not set {flag}",
                "vLLM refuses the draft, others drop the biases",
                f"set {flag} to true",
            )


def qk_norms(s: Subject) -> Iterator[Finding]:
    """Norms on queries and keys in a draft whose architecture has none."""
    architecture, (without, with_norms) = architecture_of(s.draft.config), (s.architecture_with(norms) for norms in (False, True))
    there = sorted(name for name in s.names if name.endswith(NORMED))
    if there and without != with_norms and (architecture == without or "Llama" in architecture):
        yield error(
            "qk-norm-architecture",
            f"the file holds {few(there)}, and {architecture} has no norms on queries and keys",
            "vLLM refuses the draft, SGLang runs it without these norms",
            f"name {with_norms}, and model_type qwen3",
        )


def upper_norms(s: Subject) -> Iterator[Finding]:
    """Layers above the first: engines differ in the name under which they look for the norm."""
    own = s.model.state_dict() if s.model is not None else {}  # a draft may have both norms in every layer
    norms = [
        (f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight")
        for i in s.layers
        if i > 0 and not (s.prefix or s.single_feature or (s.model is not None and s.model.family is not None))
    ]
    norms = [pair for pair in norms if pair[1] not in own]
    if single := [pair for pair in norms if (pair[0] in s.names) != (pair[1] in s.names)]:
        lacking = [name for pair in single for name in pair if name not in s.names]
        yield note(
            "norm-twin",
            f"no {few(lacking)}",
            "vLLM norms these layers by input_layernorm, SGLang by hidden_norm: the one that lacks its name runs without weights",
            "save the norm under both names",
        )
    both = [pair for pair in norms if pair[0] in s.names and pair[1] in s.names]
    if differ := [pair[1] for pair in both if not _equal(s.load(pair[0]), s.load(pair[1]))]:
        yield error(
            "norm-twin-differs",
            f"{few(differ)} differ from input_layernorm",
            "vLLM and SGLang apply different norms",
            "save the trained one under both names",
        )


def _equal(a: "Tensor | None", b: "Tensor | None") -> bool:
    import torch

    return a is not None and b is not None and torch.equal(a, b)


def values(s: Subject) -> Iterator[Finding]:
    """Numbers that are not finite, tensors of zeros, rows that are all the same; file by file, one tensor in memory at a time."""
    import torch

    broken, zero, same = [], [], []
    less_one = s.model is not None and s.model.family is not None  # norms of some families are kept so
    for name in s.names:
        tensor = s.load(name)
        if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if tensor.element_size() == 1:  # float8 has few operations
            tensor = tensor.to(torch.bfloat16)
        if not bool(tensor.isfinite().all()):
            broken.append(name)
        elif _trained(name) and not bool(tensor.any()) and not (tensor.ndim == 1 and less_one):
            zero.append(name)
        elif _trained(name) and tensor.ndim == 2 and len(tensor) > 1 and bool((tensor == tensor[0]).all()):
            same.append(name)
    if broken:
        yield error(
            "tensor-nan",
            f"{few(broken)}: NaN or infinite",
            "every logit is NaN: nothing is accepted, some engines crash",
            "use an earlier checkpoint; the training diverged, or a cast to float16 overflowed",
        )
    if zero:
        yield error("tensor-zero", f"{few(zero)}: all zeros", "what passes through it is lost", "copy the file of the training anew")
    if same:
        yield error(
            "rows-equal",
            f"{few(same)}: all rows are the same",
            "all tokens, or all features, look alike: the draft cannot tell them apart",
            "copy the file of the training anew; it was filled with a constant, or broadcast while it was exported",
        )


def _trained(name: str) -> bool:
    """Whether it is a weight that no method leaves at a constant."""
    known = r"(embed_tokens|lm_head|fc|norm|hidden_norm|layers\.\d+\.(self_attn|mlp|\w*norm)(\.\w+)*)\.weight"
    return bool(re.fullmatch(known, name)) or ("." not in name and name not in TABLES)


def dtypes(s: Subject) -> Iterator[Finding]:
    """Precisions that engines do not expect in a draft."""
    if s.quantised:
        yield error(
            "quantised",
            s.quantised,
            "a loader that takes integers or scales for weights drafts noise, others refuse; acceptance is not measured",
            "save the weights as they were before, as bfloat16",
        )
        return
    kinds = {s.draft.tensors[file].dtype for name, file in s.names.items() if name not in ("d2t", "t2d")}
    kinds = {kind for kind in kinds if "int" not in kind}
    odd = sorted(kinds - {"float32", "bfloat16", "float16", "bool"})
    if odd:
        yield warning("dtype", f"tensors of {', '.join(odd)}", "not every loader takes them", "save them as bfloat16")


def head(s: Subject) -> Iterator[Finding]:
    """An embedding or a head that is tied or left to the target."""
    if s.prefix:
        return
    if s.fields.get("tie_word_embeddings") is True and "lm_head.weight" in s.names:
        yield warning(
            "tied-embeddings",
            "tie_word_embeddings=true, and the file holds an lm_head",
            "loaders that tie put the embedding in the head's place",
            "set tie_word_embeddings to false",
        )


CHECKS = (names, flags, biases, qk_norms, upper_norms, values, dtypes, head)
