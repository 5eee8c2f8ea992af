"""What drafting gains, from how often drafts are accepted and what a round costs; and so how many tokens are best drafted."""

from collections.abc import Sequence

from ..errors import ForedraftError


def speedup(tokens: float, plain: float, verify: float, draft: float) -> float:
    """Of rounds that emit so many `tokens` on average, over passes of one token that cost `plain`: as in `speedups`.

    Of a tree they are 1 + Σ acceptance at each depth, and `verify` is a pass over its nodes and the newest token.
    """
    return tokens * plain / (verify + draft)


def speedups(acceptance: Sequence[float], verify: Sequence[float], draft: Sequence[float]) -> list[float]:
    """Tokens per time with 0, 1, ..., K drafted tokens per pass of the target, over those without a draft: [K + 1], the first one 1.

    `acceptance` [K] is how often the tokens up to position 1, 2, ... are all accepted (`Evaluation.acceptance`), `verify` [K + 1] what a
    pass of the target costs over one token, two, ..., and `draft` [K] what drafting one, two, ... costs; both in one unit, at the
    same batch size. A round with k drafted tokens emits 1 + Σ_{i≤k} acceptance_i tokens on average (the mean of a count is the sum of
    the chances that it is at least 1, 2, ...), so

        speed-up(k) = (1 + Σ_{i≤k} acceptance_i) · verify(1) / (verify(k + 1) + draft(k)).

    With acceptance_i = α^i, draft(k) = c·k and passes that cost the same whatever they hold this is theorem 3.8 of arXiv:2211.17192;
    the cost of verification by its width stands in the same place in arXiv:2408.11049, section 3. What goes on between the two (samplers,
    launches) belongs into one of the costs. Raises `ForedraftError` for lists that do not go together, shares and costs that are none.
    """
    steps = len(acceptance)
    if len(verify) != steps + 1 or len(draft) != steps:
        raise ForedraftError(
            f"acceptance at {steps} positions goes with {steps + 1} costs of verification and {steps} of drafting, "
            f"found {len(verify)} and {len(draft)}"
        )
    if not all(0 <= a <= 1 for a in acceptance) or not all(cost > 0 for cost in verify) or not all(cost >= 0 for cost in draft):
        raise ForedraftError(
            "acceptance is a share from 0 to 1, verification costs more than 0, drafting no less than 0: "
            f"found {list(acceptance)}, {list(verify)}, {list(draft)}"
        )
    found, tokens = [1.0], 1.0
    for accepted, width, drafting in zip(acceptance, verify[1:], draft, strict=True):
        tokens += accepted
        found.append(speedup(tokens, verify[0], width, drafting))
    return found


def best_length(acceptance: Sequence[float], verify: Sequence[float], draft: Sequence[float]) -> tuple[int, float]:
    """How many tokens to draft, and the speed-up with them (see `speedups`); 0 where any number of them makes it slower."""
    found = speedups(acceptance, verify, draft)
    length = max(range(len(found)), key=found.__getitem__)
    return length, found[length]
