"""Checks of where a draft comes from: its head is made of its target's rows, and often its layers of the target's last ones."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..contracts.finding import Finding, error
from .subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = 256
"""Rows of a matrix that are compared."""
CHUNK = 8192
"""Rows of the target's head in memory at a time, in float32."""
RELATED = 0.3
"""Cosine of two matrices of which one began as the other; unrelated ones are below 0.05."""


def head_rows(s: Subject) -> Iterator[Finding]:
    """A head whose rows are the target's rows of other tokens than `d2t` names, or, without it, than stand there."""
    mine, theirs, ids = s.load("lm_head.weight"), s.target_head(), s.draft_ids()
    if mine is None or theirs is None or ids is None or mine.shape[1:] != theirs.shape[1:] or not mine.is_floating_point():
        return
    at, found, clear = nearest(mine, theirs)
    other = clear & (found != ids[at])
    # A head that never was the target's has no clear neighbours, or all its rows the same one.
    share = len(found[other].unique()) / len(at)
    if share <= 0.2:
        return
    shift = (found - ids[at])[other].mode().values
    shifted = bool(((found - ids[at])[other] == shift).float().mean() > 0.8)
    named = float((found == ids[at]).float().mean())
    says = "d2t names" if s.reduced else "stands there"
    away = f", {int(shift):+d} away" if shifted else ""
    yield error(
        "d2t-other" if s.reduced else "head-order",
        f"of {len(at)} rows of lm_head looked at, {named:.0%} are most like the target's row of the token that {says}, "
        f"{share:.0%} like another token's{away}",
        "drafted tokens are taken for other tokens: nothing is accepted but by chance",
        "copy d2t and t2d from the training's checkpoint: these are of another vocabulary" if s.reduced else "copy lm_head anew",
    )


def nearest(mine_WD: "Tensor", theirs_VD: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
    """Of some rows of a head: which they are, the target's row that is most like each, and whether by a clear margin, [N] each."""
    import torch

    at = torch.linspace(0, len(mine_WD) - 1, min(SAMPLE, len(mine_WD))).long()
    rows_ND = torch.nn.functional.normalize(mine_WD[at].float(), dim=-1)
    best_N2, ids_N2 = rows_ND.new_full((len(at), 2), -2.0), at.new_zeros(len(at), 2)
    for start in range(0, len(theirs_VD), CHUNK):
        chunk_CD = torch.nn.functional.normalize(theirs_VD[start : start + CHUNK].float(), dim=-1)
        close_NC = (rows_ND @ chunk_CD.T).nan_to_num(-2.0)
        values, indices = close_NC.topk(min(2, close_NC.shape[1]))
        best_N2, order = torch.cat([best_N2, values], dim=1).topk(2)
        ids_N2 = torch.cat([ids_N2, indices + start], dim=1).gather(1, order)
    # Cosines of unrelated rows vary by this much.
    margin = 2 / mine_WD.shape[1] ** 0.5
    return at, ids_N2[:, 0], best_N2[:, 0] - best_N2[:, 1] > margin


def named_share(mine_WD: "Tensor", theirs_VD: "Tensor", ids_W: "Tensor") -> float:
    """The share of the rows of a head that are most like the target's rows of the tokens `ids_W`."""
    at, found, _ = nearest(mine_WD, theirs_VD)
    return float((found == ids_W[at]).float().mean())


def layers(s: Subject) -> Iterator[Finding]:
    """A draft whose layers began as the target's last ones: tensors under each other's names, in another order, or filled anew."""
    pairs = _pairs(s)
    if not (own := {name: _alike(mine, theirs) for name, (mine, theirs) in pairs.items()}):
        return
    matrices = [name for name, (mine, _) in pairs.items() if mine.ndim == 2]
    for name in [n for n in own if own[n] < RELATED]:
        mine, theirs = pairs[name]
        others = [n for n, (other, _) in pairs.items() if n != name and other.shape == theirs.shape and other.ndim == mine.ndim]
        likeness = {n: _alike(pairs[n][0], theirs) for n in others}
        best = max(likeness, key=lambda n: likeness[n], default=None)
        needed = RELATED if mine.ndim == 2 else 0.9  # norms of one model are somewhat alike, all of them
        if best and likeness[best] > max(needed, own[name] + RELATED) and own[best] < likeness[best]:
            yield error(
                "tensors-swapped",
                f"{best} is the target's {name.rsplit('.', 2)[-2]} (cosine {likeness[best]:.2f}), {name} is not ({own[name]:.2f})",
                "the layer computes something else than in training",
                "give the tensors back their names",
            )
            own[name] = own[best] = 1.0
        elif order := _order(s, name, mine, theirs):
            yield error(
                "rows-order",
                f"{name} is the target's with {order}",
                "queries and keys are turned, or inputs read, otherwise than in training",
                "put them into the order of the training",
            )
            own[name] = 1.0
    related = [own[name] for name in matrices if own[name] > RELATED]
    if len(related) > len(matrices) / 2 and (fresh := [name for name in matrices if own[name] < 0.05]):
        yield error(
            "tensor-random",
            f"{', '.join(fresh[:5])}: unlike the target's, of which the layer's other matrices are made",
            "what passes through it is noise",
            "copy the file of the training anew",
        )
    if len(related) > len(matrices) / 2:
        yield from _features(s)


def _pairs(s: Subject) -> "dict[str, tuple[Tensor, Tensor]]":
    """Each tensor of the draft's layers with the target's that it may have begun as, rows that are compared of both.

    Of the first layer's doubled input, the half that reads the context; its `hidden_norm` began as the target's `input_layernorm`.
    """
    count, pairs = s.target_layers, {}
    for name in s.names:
        if not (name.startswith("layers.") and count):
            continue
        _, number, part = name.split(".", 2)
        first = number == "0" and not s.prefix
        if first and part == "input_layernorm.weight":
            continue
        counterpart = part.replace("hidden_norm", "input_layernorm") if first else part
        theirs = s.load_target(f"layers.{count - len(s.layers) + int(number)}.{counterpart}") if number.isdigit() else None
        mine = s.load(name)
        if mine is None or theirs is None or not (mine.is_floating_point() and theirs.is_floating_point()):
            continue
        if first and mine.ndim == 2 and mine.shape[1] == 2 * theirs.shape[-1]:
            mine = mine[:, theirs.shape[-1] :]
        if mine.shape == theirs.shape and mine.ndim in (1, 2):
            pairs[name] = mine, theirs
    return pairs


def _alike(mine: "Tensor", theirs: "Tensor") -> float:
    """The cosine of two matrices, over some of their rows, or the correlation of two vectors."""
    import torch

    at = torch.linspace(0, len(mine) - 1, min(SAMPLE, len(mine))).long() if mine.ndim == 2 else slice(None)
    a, b = mine[at].float().flatten(), theirs[at].float().flatten()
    if mine.ndim == 1:
        a, b = a - a.mean(), b - b.mean()
    return float(torch.nan_to_num(torch.cosine_similarity(a, b, dim=0)))


def _order(s: Subject, name: str, mine: "Tensor", theirs: "Tensor") -> str | None:
    """In which other order a matrix is the target's: its rows by pairs in place of halves, or its input's halves swapped."""
    import torch

    whole, head_dim = s.load(name), s.integer("head_dim") or 0
    assert whole is not None
    if whole.shape != mine.shape and _alike(whole[:, : mine.shape[1]], theirs) > RELATED:
        return "the halves of its input swapped"
    if name.endswith(("q_proj.weight", "k_proj.weight")) and head_dim > 1 and head_dim % 2 == 0 and len(mine) % head_dim == 0:
        rows = torch.arange(len(mine)).view(-1, head_dim)
        by_pairs, by_halves = rows.view(-1, 2, head_dim // 2).mT.reshape(-1), rows.view(-1, head_dim // 2, 2).mT.reshape(-1)
        if max(_alike(mine, theirs[by_pairs]), _alike(mine, theirs[by_halves])) > RELATED:
            return "its rows in the order of the other rotary layout (pairs, halves)"
    return None


def _features(s: Subject) -> Iterator[Finding]:
    """fc, which begins as the identity on the last aux state, or the one it reads, where the layers begin as the target's."""
    fc, width, count = s.load("fc.weight"), s.hidden_size, s.chunks
    if fc is None or not s.made or not count or width != len(fc) or fc.shape[1] != count * width:
        return
    passed = [float(chunk.float().diagonal().mean()) for chunk in fc.chunk(count, dim=1)]
    began = 0 if s.built is not None and getattr(s.built.algorithm.wiring, "state_first", False) else count - 1
    if passed[began] < 0.1:
        best = max(range(count), key=lambda i: passed[i])
        moved = passed[best] > 0.3
        yield error(
            "fc-order" if moved else "fc-random",
            f"fc passes on part {best + 1} of {count}, where it began with part {began + 1}"
            if moved
            else "fc looks as if it was filled anew",
            "features meet the weights of other features" if moved else "the draft sees noise in place of the target's features",
            "put its columns into the order of the training" if moved else "copy fc from the training's checkpoint",
        )


CHECKS = (head_rows, layers)
