"""What the drafters of parallel algorithms share: their logits are there at once, or do not depend on what was chosen before."""

from collections.abc import Iterable

from torch import Tensor

from ..contracts.algorithm import Choose


def choose_in_turn(logits: Iterable[Tensor], choose: Choose) -> tuple[list[int], list[Tensor]]:
    """A token from each of `logits` [W], until none may follow: what `Drafter.propose` returns."""
    tokens: list[int] = []
    scores: list[Tensor] = []
    for logits_W in logits:
        chosen = choose(logits_W, tokens)
        if chosen is None:
            break
        tokens.append(chosen[0])
        scores += [chosen[1]] if chosen[1] is not None else []
    return tokens, scores
