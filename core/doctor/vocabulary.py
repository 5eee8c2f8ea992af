"""Checks of the draft vocabulary: its size, `d2t` as offsets, `t2d`, the head."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..contracts.finding import Finding, error, warning
from .subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

SLICES = "draft token j is taken for another token of the target: nothing is accepted but by chance"


def sizes(s: Subject) -> Iterator[Finding]:
    """Vocabulary sizes by config, head, embedding and `d2t`."""
    whole, part = s.vocab_size, s.draft_vocab_size
    embedding, rows, d2t, t2d = (s.shape(name) for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"))
    if whole and part and part > whole:
        yield error("vocab-size", f"draft_vocab_size={part} exceeds vocab_size={whole}", "loaders fail", "write the sizes of the training")
    if whole and embedding and embedding[0] != whole:
        yield error(
            "vocab-size",
            f"vocab_size={whole}, and embed_tokens has {embedding[0]} rows",
            "vocab_size must be the target's: logits are scattered into that many",
            f"set vocab_size to {embedding[0]}, if that is the target's",
        )
    if t2d and s.whole and t2d != (s.whole,):
        yield warning("t2d-shape", f"t2d has {list(t2d)} entries for {s.whole} tokens", "SGLang and training read it", "build it from d2t")
    if part and rows and rows[0] != part:
        yield error(
            "draft-vocab-size",
            f"draft_vocab_size={s.fields.get('draft_vocab_size')}, and lm_head has {rows[0]} rows",
            "engines make a head of another size, or read draft tokens as the target's",
            f"set draft_vocab_size to {rows[0]}",
        )
    if not s.reduced:
        if d2t:
            yield warning(
                "d2t-full",
                "the file holds d2t, but the draft names every token of the target",
                "vLLM refuses it: there is no such parameter",
                "leave d2t and t2d out",
            )
        return
    if rows is None and s.draft.tensors:
        yield error(
            "lm-head-missing",
            f"a draft vocabulary of {part} out of {whole}, and no lm_head",
            "vLLM cuts the first rows of the target's head instead, without a word",
            "copy lm_head from the training's checkpoint, or take the target's rows",
        )
    if d2t is None and s.draft.tensors:
        yield error(
            "d2t-missing",
            f"a draft vocabulary of {rows[0] if rows else part} out of {whole}, and no d2t",
            f"vLLM fills it with zeros: {SLICES}",
            "copy d2t from the training's checkpoint" + (", or rebuild it from t2d" if t2d else ""),
        )
    elif d2t and rows and d2t != (rows[0],):
        yield error("d2t-shape", f"d2t is {list(d2t)}, lm_head has {rows[0]} rows", "loaders fail", "copy both from one checkpoint")


def mapping(s: Subject) -> Iterator[Finding]:
    """`d2t` holds offsets, target id - draft id: in range, distinct, ascending, and as `t2d` says."""
    import torch

    d2t, t2d, whole = s.load("d2t"), s.load("t2d"), s.whole
    if d2t is None or whole is None or d2t.ndim != 1 or not len(d2t) or not s.reduced:
        return
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        yield error("d2t-dtype", f"d2t is {str(d2t.dtype).removeprefix('torch.')}", "rounded ids", "save it as int64")
        return
    d2t = d2t.long()
    ids = d2t + torch.arange(len(d2t))
    named = t2d.bool() if t2d is not None and t2d.shape == (whole,) else None
    if not _sound(ids, whole, named) and _sound(d2t, whole, named):
        yield error(
            "d2t-absolute",
            f"d2t holds target ids ({d2t[:4].tolist()} ... {int(d2t[-1])}), engines add them to the draft id",
            f"{SLICES}; ids beyond the vocabulary crash",
            "subtract 0, 1, 2, ... from d2t",
        )
        return
    if outside := int(((ids < 0) | (ids >= whole)).sum()):
        yield error(
            "d2t-range",
            f"{outside} of {len(ids)} draft tokens stand for ids outside 0..{whole - 1}",
            "engines crash or write elsewhere",
            "copy d2t from the training's checkpoint",
        )
    elif doubles := len(ids) - len(ids.unique()):
        yield error(
            "d2t-duplicates",
            f"{doubles} of {len(ids)} draft tokens stand for an id that another one has",
            "one overwrites the other",
            "copy d2t from the training's checkpoint",
        )
    elif named is not None and not _agree(ids, named):
        yield error(
            "d2t-t2d",
            f"t2d names {int(named.sum())} ids, of which d2t has {int(named[ids].sum())}",
            "one of them is of another training: training reads t2d, engines read d2t",
            "copy both from one checkpoint",
        )
    if not bool(d2t.any()):
        yield warning(
            "d2t-zero",
            f"d2t is all zeros: the draft names the ids 0 to {len(ids) - 1} and no others",
            "the mapping was never set, unless the draft vocabulary was meant to be these",
            "copy d2t from the training's checkpoint",
        )


def _sound(ids: "Tensor", whole: int, named: "Tensor | None") -> bool:
    """Whether they are distinct ids of the vocabulary, and those that t2d names."""
    valid = bool(((ids >= 0) & (ids < whole)).all()) and len(ids.unique()) == len(ids)
    return valid and (named is None or _agree(ids, named))


def _agree(ids: "Tensor", named: "Tensor") -> bool:
    return int(named.sum()) == len(ids) and bool(((ids >= 0) & (ids < len(named))).all()) and bool(named[ids].all())


CHECKS = (sizes, mapping)
