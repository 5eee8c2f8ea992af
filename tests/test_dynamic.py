"""Drafts that end where they are no longer sure: the output stays the target's, and what is drafted is less."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from foredraft import ForedraftError, TreeShape, generate
from foredraft.decoding import DraftingStats, choose_in_turn
from foredraft.decoding.loop import Chooser, DecodingLoop
from foredraft.decoding.tree import DraftTree

TARGET = tiny_target(layers=4, vocab=30, eos_token_id=None)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
TREE = TreeShape(depth=3, top_k=3, num_nodes=8)


@cache
def draft_of(name: str) -> Any:
    """Untrained; now surer, now less."""
    draft = tiny_draft(
        TARGET, name, **{"eagle3": {}, "dspark": {"block_size": 4, "markov_rank": 8}}[name], num_aux=2, aux_layers=(1, 3)
    ).eval()
    with torch.no_grad():
        draft.lm_head.weight.mul_(3 if name == "eagle3" else 1)
    return draft


CASES: list[tuple[str, Any, dict[str, Any]]] = [("eagle3", None, {}), ("eagle3", TREE, {}), ("dspark", None, {"repetition_penalty": 1.1})]


@pytest.mark.parametrize(("name", "shape", "more"), CASES)
def test_greedy_text_is_the_targets(name: str, shape: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; the surer a draft must be the fewer tokens are verified."""
    sizes: list[int] = []
    follow, ids = DecodingLoop._follow, torch.tensor([[1, 5]])
    monkeypatch.setattr(DecodingLoop, "_follow", lambda loop, tree, out: (sizes.append(len(tree.tokens)), follow(loop, tree, out))[1])
    verified, expected = [], TARGET.generate(ids, **GREEDY, **more)
    for least in (0.0, 0.2, 0.999):
        sizes.clear()
        assert torch.equal(generate(TARGET, draft_of(name), ids, tree=shape, min_confidence=least, **GREEDY, **more), expected)
        verified.append(sum(sizes))
    assert verified[0] > verified[1] > verified[2]


def test_the_confidence_head_is_asked() -> None:
    """Where the draft says how sure it is, that counts, and not its probabilities."""
    draft, ids = draft_of("dspark"), torch.tensor([[1, 5]])
    bias = draft.confidence_head.proj.bias
    for value, expected in ((-20.0, 0), (20.0, 4)):
        with torch.no_grad():
            before, stats = bias.clone(), DraftingStats()
            bias.fill_(value)
            generate(TARGET, draft, ids, num_draft_tokens=4, stats=stats, min_confidence=0.9, **GREEDY)
            bias.copy_(before)
        assert len(stats.drafted) == expected


P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
Q = torch.tensor([[0.2, 0.5, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1], [0.34, 0.33, 0.2, 0.13], [0.9, 0.05, 0.03, 0.02]])
"""What target and draft say after each of four tokens: the draft's surest word is 0.34 to 0.9."""


def played(least: float, rounds: int) -> tuple[Tensor, float]:
    """How often each pair of tokens followed token 0, [4, 4], by rounds of the loop itself; tokens drafted per round."""
    loop: Any = object.__new__(DecodingLoop)
    loop.processors, loop.criteria, loop.kept, loop.streamer = LogitsProcessorList(), StoppingCriteriaList(), {}, None
    loop.criteria = lambda ids, scores: torch.tensor([ids.shape[1] >= 3])
    loop.config, loop.lossy = SimpleNamespace(do_sample=True), None
    counts, drafted, made = torch.zeros(4, 4), 0, 0
    for _ in range(rounds):
        loop.ids, finished = torch.tensor([[0]]), False
        while not finished:
            chooser, newest = Chooser(loop.ids, loop.processors, True, torch.arange(4), 4, least), int(loop.ids[0, -1])

            def turn(token: int = newest) -> Any:
                for _ in range(2):
                    token = yield Q[token].log()

            tokens, logits = choose_in_turn(turn(), chooser.choose)
            drafted, made = drafted + len(tokens), made + 1
            outputs = SimpleNamespace(logits=P[[newest, *tokens]].log()[None])
            finished = loop._follow(DraftTree(tokens, list(range(len(tokens))), logits), outputs)[1]
        counts[tuple(loop.ids[0, 1:3].tolist())] += 1
    return counts, drafted / made


@pytest.mark.parametrize("least", [0.3, 0.45])
def test_samples_have_the_targets_distribution(least: float) -> None:
    """Two tokens, in rounds that draft two, one or none: χ² against the exact chances, 15 degrees of freedom."""
    torch.manual_seed(0)
    rounds = 1200
    counts, drafted = played(least, rounds)
    expected = rounds * P[0][:, None] * P
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert float(torch.special.gammaincc(torch.tensor(7.5), torch.tensor(chi_square / 2))) > 1e-3
    assert 0.2 < drafted < 1.8


def test_no_probability() -> None:
    with pytest.raises(ForedraftError, match=r"min_confidence=1\.5: a probability"):
        generate(TARGET, "prompt_lookup", torch.tensor([[1, 2]]), min_confidence=1.5, **GREEDY)
