"""How much to draft: the arithmetic of speed-ups against rounds that are played, and what `foredraft tune` makes of measured costs."""

import pytest
import torch

from foredraft import ForedraftError
from foredraft.decoding.speedup import best_length, speedups

ALPHA = 0.7
CASES = {
    "chain": ([0.8, 0.5, 0.45, 0.1], [1.0, 1.1, 1.15, 1.3, 2.0], [0.1, 0.2, 0.3, 0.4]),
    "block": ([0.6, 0.3, 0.2], [2.0, 2.0, 2.5, 4.0], [0.3, 0.3, 0.3]),
    "a draft that is slower": ([0.2, 0.1], [1.0, 1.5, 2.0], [0.5, 1.0]),
    "nothing to draft": ([], [3.0], []),
}


@pytest.mark.parametrize("case", CASES)
def test_speedups_are_those_of_rounds_that_are_played(case: str) -> None:
    """Rounds drawn at random, token by token until one is refused; their tokens and their time added up."""
    acceptance, verify, draft = CASES[case]
    rounds, draws = 40_000, torch.Generator().manual_seed(0)
    chances = [a / before for before, a in zip([1.0, *acceptance], acceptance, strict=False)]
    reached = (torch.rand(rounds, len(chances), generator=draws) < torch.tensor(chances)).cumprod(-1)
    played = [1.0]
    for k in range(1, len(acceptance) + 1):
        emitted, seconds = rounds + int(reached[:, :k].sum()), rounds * (draft[k - 1] + verify[k])
        played.append(emitted / seconds * verify[0])
    assert speedups(acceptance, verify, draft) == pytest.approx(played, rel=0.01)
    length, gain = best_length(acceptance, verify, draft)
    assert length == max(range(len(played)), key=played.__getitem__)
    assert gain == pytest.approx(played[length], rel=0.01)


def test_theorem_3_8() -> None:
    """Of arXiv:2211.17192: tokens that are accepted alike, drafts that cost alike, passes that cost the same at any width."""
    found = speedups([ALPHA**i for i in range(1, 9)], [1.0] * 9, [0.05 * k for k in range(1, 9)])
    assert found == pytest.approx([(1 - ALPHA ** (k + 1)) / ((1 - ALPHA) * (0.05 * k + 1)) for k in range(9)])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (([0.5], [1.0], [0.1]), "2 costs of verification"),
        (([0.5], [1.0, 1.0], []), "and 1 of drafting"),
        (([1.5], [1.0, 1.0], [0.1]), "share from 0 to 1"),
        (([0.5], [0.0, 1.0], [0.1]), "more than 0"),
    ],
)
def test_costs_that_do_not_go_together(given: tuple[list[float], list[float], list[float]], told: str) -> None:
    with pytest.raises(ForedraftError, match=told):
        speedups(*given)
