"""Checks of a draft against its target: widths, vocabulary, embedding, head, tokenizer."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.finding import Finding, error, note, warning
from .opened import as_integer, as_mapping
from .origin import named_share, nearest
from .subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 4096
"""Rows of an embedding or head that are compared."""


def shapes(s: Subject) -> Iterator[Finding]:
    """The widths and counts that both configs state."""
    theirs, recorded = s.target_fields, as_mapping(s.made.get("target"))
    if not theirs:
        return
    pairs = {
        "hidden_size": ("target_hidden_size", s.target_hidden_size, "fc reads states of that width"),
        "vocab_size": ("vocab_size", s.whole, "logits and tokens are the target's"),
    }
    for name, (mine, value, why) in pairs.items():
        other = as_integer(theirs.get(name))
        if value and other and value != other:
            yield error(
                f"target-{name.split('_')[0]}",
                f"the draft's {mine} is {value}, the target's {name} {other}",
                f"{why}: the draft is of another target, or its config is wrong",
                "serve it with the target it was trained for",
            )
    if recorded and (count := recorded.get("num_hidden_layers")) != theirs.get("num_hidden_layers"):
        yield error(
            "target-layers",
            f"the draft was made for a target of {str(count)[:20]} layers, this one has {str(theirs.get('num_hidden_layers'))[:20]}",
            "its aux layers are other layers here",
            "serve it with the target it was trained for",
        )


def streams(s: Subject) -> Iterator[Finding]:
    """A target whose layers hand on several streams per token (hyper-connections), of which engines give a draft the mean."""
    count, width, fc = as_integer(s.target_fields.get("hc_mult")), as_integer(s.target_fields.get("hidden_size")), s.shape("fc.weight")
    ids = next(iter(s.aux_layers.values()), None)
    if fc and len(fc) == 2 and ids and count and width and count > 1 and fc[1] == len(ids) * count * width:
        yield error(
            "aux-streams",
            f"fc reads {fc[1]} features: all {count} streams of {width} of each of {len(ids)} aux layers",
            "engines give a draft the mean of a layer's streams, one vector per token: they fail while they load, or feed half of a state",
            "train it on the mean of the streams",
        )


def weights(s: Subject) -> Iterator[Finding]:
    """A target of the draft's shape with other weights than the one it was made for, or one that is fine-tuned from it."""
    from ..target.pairing import differences
    from ..target.sample import TABLES, numbers_of, sample_of_files

    made = as_mapping(s.made.get("target"))
    if s.target is None or s.target_fields.get("quantization_config"):
        return
    embedding, head = tables = s.target_embedding(), s.target_head()
    found = {name: numbers_of(name, t) for name, t in zip(TABLES, tables, strict=True) if t is not None and t.ndim == 2}
    try:
        files, adapted = sample_of_files(s.target.path)
        other, tuned = differences(made, {**files, **found}, adapted)
    except (TypeError, ValueError, IndexError):  # the record is malformed
        other, tuned = [], False
    if other or _alien(s, embedding, head):
        why = f"its {' and '.join(other)} are not that one's" if other else "the draft's embedding and head are both unlike its own"
        yield warning(
            "target-other",
            f"this is another target than the draft's: {why}",
            "it drafts for another model's text: fewer tokens are accepted",
            "serve it with its own target, or train it on for this one",
        )
    elif tuned:
        what = "an adapter (LoRA) lies on its layers" if adapted else "its layers are others"
        yield warning(
            "target-finetuned",
            f"embedding and head are those of the draft's target, but {what}: one of the two is fine-tuned from the other",
            "the draft reads other states and drafts for another model's text: fewer tokens are accepted",
            "train it on for this target (draft: in a run), or serve it with its own",
        )


def _alien(s: Subject, embedding: "Tensor | None", head: "Tensor | None") -> bool:
    """Whether a draft's embedding and head are both there and both unlike the target's: a single one may be damaged, or never was its."""
    mine, rows, ids = s.load("embed_tokens.weight"), s.load("lm_head.weight"), s.draft_ids()
    if mine is None or rows is None or ids is None or embedding is None or head is None or s.prefix:
        return False
    if mine.shape != embedding.shape or mine.ndim != 2 or rows.ndim != 2 or rows.shape[1:] != head.shape[1:] or int(ids.max()) >= len(head):
        return False
    return likeness(mine, embedding) < 0.1 and likeness(rows, head[ids]) < 0.1 and named_share(rows, head, ids) < 0.1


def embedding(s: Subject) -> Iterator[Finding]:
    """An embedding that is not the target's, or one that was never set."""
    mine = s.load("embed_tokens.weight")
    if mine is None or mine.ndim != 2:
        return
    theirs = s.target_embedding()
    if theirs is not None and theirs.shape == mine.shape and (close := likeness(mine, theirs)) < 0.5:
        yield (error if looks_fresh(mine) or close < 0.1 else warning)(
            "embedding-random",
            f"embed_tokens is not the target's: the rows' mean cosine is {close:.2f}"
            + (", and it looks random" if looks_fresh(mine) else ""),
            "unless the draft trained its own, it cannot tell tokens apart: engines keep an embedding that is in the file",
            "take the target's embedding, or leave it out of the file",
        )


def head(s: Subject) -> Iterator[Finding]:
    """A head that looks as if it was never set."""
    mine, theirs, ids = s.load("lm_head.weight"), s.target_head(), s.draft_ids()
    if mine is None or theirs is None or ids is None or mine.ndim != 2 or not looks_fresh(mine):
        return
    fits = theirs.shape[1:] == mine.shape[1:] and int(ids.max()) < len(theirs)
    if fits and (close := likeness(mine, theirs[ids])) < 0.1 and not bool(nearest(mine, theirs)[2].float().mean() > 0.5):
        yield error(
            "head-random",
            f"lm_head looks random, and is not like the target's (mean cosine {close:.2f})",
            "it drafts noise",
            "copy lm_head from the training's checkpoint",
        )


def geometry(s: Subject) -> Iterator[Finding]:
    """What no tensor's shape tells: how a width is cut into heads, and the norms' epsilon, against the target's last layer."""
    from ..draft.grouped_query import GroupedQueryDraft

    if s.target is None or "kv_lora_rank" in s.fields or s.saved:  # what was saved is known better
        return
    try:
        theirs = GroupedQueryDraft.shape(target_config(s.target_fields))
    except Exception:  # whatever a config by someone else makes a loader raise
        return
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    mine = [s.integer(name) or 0 for name in names]
    mine[1], mine[2] = mine[1] or mine[0], mine[2] or (s.hidden_size or 0) // (mine[0] or 1)
    wanted = [as_integer(theirs[name]) or 0 for name in names]
    if all((*mine, *wanted)) and mine != wanted and all(mine[i] * mine[2] == wanted[i] * wanted[2] for i in (0, 1)):
        yield warning(
            "heads-target",
            f"the draft has {mine[0]} heads of {mine[2]} ({mine[1]} of keys), the target {wanted[0]} of {wanted[2]} ({wanted[1]})",
            "the same tensors are cut otherwise: unless it was trained so, queries meet the keys of other heads",
            "write the target's num_attention_heads, num_key_value_heads and head_dim",
        )
    epsilon = s.fields.get("rms_norm_eps")
    if isinstance(epsilon, float) and epsilon > 0 and not 0.05 < epsilon / theirs["rms_norm_eps"] < 20:
        yield warning(
            "epsilon-target",
            f"rms_norm_eps={epsilon:g}, the target's is {theirs['rms_norm_eps']:g}",
            "unless it was trained so, every norm scales otherwise",
            "write the target's",
        )


def target_config(fields: Mapping[str, Any]) -> Any:
    """A target's config from its fields. Raises whatever transformers raises for malformed ones."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**deepcopy(dict(fields))).get_text_config()


def likeness(a: "Tensor", b: "Tensor") -> float:
    """The mean cosine of the rows of two matrices of one shape, of at most `ROWS` of them."""
    import torch

    step = max(1, len(a) // ROWS)
    cosines = torch.cosine_similarity(a[::step].float(), b[::step].float(), dim=-1)
    return float(cosines.nan_to_num().mean())


def looks_fresh(matrix: "Tensor") -> bool:
    """Whether all rows are as long as those of independent normal numbers: their squares vary by sqrt(2 / width)."""
    rows = matrix[:: max(1, len(matrix) // ROWS)].float().square().mean(-1)
    rows = rows[rows > 0]  # a padding row is zero
    if len(rows) < 16:
        return False
    spread, mean = float(rows.std() / rows.mean()), float(matrix[: len(rows)].float().mean() / rows.mean().sqrt())
    return spread < 1.3 * (2 / matrix.shape[1]) ** 0.5 and abs(mean) < 0.1


def tokenizer(s: Subject) -> Iterator[Finding]:
    """The target's tokenizer and chat template, and a draft's own beside them."""
    if s.target is None:
        return
    folder, vocabulary = s.target.path, s.vocab_size
    tokens = _tokens(folder)
    if tokens and vocabulary and tokens > vocabulary:
        yield error(
            "tokenizer-vocab",
            f"the target's tokenizer goes to id {tokens - 1}, the draft's vocab_size is {vocabulary}",
            "tokens beyond it crash the draft",
            "serve it with the target it was trained for",
        )
    if tokens and not _has_template(folder):
        yield note(
            "chat-template",
            "the target's tokenizer has no chat template",
            "chats are rendered by whatever the server falls back to: text the draft may not have been trained on",
            "serve and train with one template",
        )


def _tokens(folder: Path) -> int | None:
    """One more than the highest token id of a tokenizer.json."""
    fields = _json(folder / "tokenizer.json")
    vocabulary = as_mapping(as_mapping(fields).get("model")).get("vocab")
    ids = [i for i in vocabulary.values() if as_integer(i) is not None] if isinstance(vocabulary, dict) else []
    added = as_mapping(fields).get("added_tokens")
    ids += [i for token in (added if isinstance(added, list) else []) if (i := as_integer(as_mapping(token).get("id"))) is not None]
    return max(ids) + 1 if ids else None


def _has_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").exists() or bool(as_mapping(_json(folder / "tokenizer_config.json")).get("chat_template"))


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() and file.stat().st_size < 2**28 else None
    except (OSError, ValueError, RecursionError):
        return None


CHECKS = (shapes, streams, weights, embedding, head, geometry, tokenizer)
