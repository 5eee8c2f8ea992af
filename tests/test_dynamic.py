"""Drafts that end where they are no longer sure, that are as long as pays, or that another one makes: the output stays the target's."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from foredraft import ForedraftError, TreeShape, generate
from foredraft.decoding import AutoregressiveDrafter, DraftingStats, choose_in_turn
from foredraft.decoding.drafters import AskedFirst, Recent
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
    """Bit for bit; the surer a draft must be, or the more that was accepted, the fewer tokens are verified."""
    sizes: list[int] = []
    follow, ids = DecodingLoop._follow, torch.tensor([[1, 5]])
    monkeypatch.setattr(DecodingLoop, "_follow", lambda loop, tree, out: (sizes.append(len(tree.tokens)), follow(loop, tree, out))[1])
    verified, expected = [], TARGET.generate(ids, **GREEDY, **more)
    for how in ({}, {"min_confidence": 0.2}, {"min_confidence": 0.999}, {"min_acceptance": 0.3}):
        sizes.clear()
        assert torch.equal(generate(TARGET, draft_of(name), ids, tree=shape, **how, **GREEDY, **more), expected)
        verified.append(sum(sizes))
    assert verified[0] > verified[1] > verified[2]
    assert verified[3] < verified[0]


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


def played(least: float, rounds: int, lately: float = 0.0) -> tuple[Tensor, float]:
    """How often each pair of tokens followed token 0, [4, 4], by rounds of the loop itself; tokens drafted per round."""
    recent = Recent(lately)
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
                for _ in range(recent.length(2)):
                    token = yield Q[token].log()

            tokens, logits = choose_in_turn(turn(), chooser.choose)
            drafted, made = drafted + len(tokens), made + 1
            outputs = SimpleNamespace(logits=P[[newest, *tokens]].log()[None])
            rows, finished = loop._follow(DraftTree(tokens, list(range(len(tokens))), logits), outputs)
            recent.add(len(tokens), len(rows) - 1)
        counts[tuple(loop.ids[0, 1:3].tolist())] += 1
    return counts, drafted / made


@pytest.mark.parametrize(("least", "lately"), [(0.3, 0.0), (0.45, 0.0), (0.0, 0.35)])
def test_samples_have_the_targets_distribution(least: float, lately: float) -> None:
    """Two tokens, in rounds that draft two, one or none: χ² against the exact chances, 15 degrees of freedom."""
    torch.manual_seed(0)
    rounds = 1200
    counts, drafted = played(least, rounds, lately)
    expected = rounds * P[0][:, None] * P
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert float(torch.special.gammaincc(torch.tensor(7.5), torch.tensor(chi_square / 2))) > 1e-3
    assert 0.2 < drafted < 1.8


def test_the_length_follows_what_was_accepted() -> None:
    """As long as asked for until something is rejected; then by α = accepted / tested of about the last five rounds, never below one."""
    recent = Recent(0.3)
    recent.add(0, 0)
    assert recent.length(8) == 8
    recent.add(8, 2)  # α = 2.8 / 3.8, and α^3 = 0.4, α^4 = 0.29
    assert (recent.length(8), recent.length(2)) == (3, 2)
    for _ in range(40):
        recent.add(1, 0)
    assert recent.length(8) == 1
    for _ in range(40):
        recent.add(1, 1)
    assert recent.length(8) == 8


def test_who_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that lookup drafted are read by the draft later, all of them; the text is the target's."""
    asked, found = [], []
    own, first = AutoregressiveDrafter.propose, AskedFirst.propose

    def noted(drafter: Any, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Any) -> Any:
        proposed = own(drafter, ids, aux_1NA, limit, choose)
        asked.append((limit, aux_1NA.shape[1], drafter.confirmed == len(ids) - 1))
        return proposed

    monkeypatch.setattr(AutoregressiveDrafter, "propose", noted)
    monkeypatch.setattr(AskedFirst, "propose", lambda *args: (found.append(len((made := first(*args))[0])), made)[1])
    ids = torch.tensor([[1, 5, 3, 1]])
    out = generate(TARGET, draft_of("eagle3"), ids, num_draft_tokens=2, first="prompt_lookup", **GREEDY)
    assert torch.equal(out, TARGET.generate(ids, **GREEDY))
    assert len(found) > len(asked) > 0
    assert all(limit <= 2 and whole for limit, _, whole in asked)
    assert max(found) > 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"min_confidence": 1.5}, r"min_confidence=1\.5: a probability"),
        ({"min_acceptance": -1}, "min_acceptance=-1: a chance"),
        ({"first": draft_of("eagle3")}, "first is a draft by 'eagle3'"),
        ({"first": "eagle3"}, "drafts with a model"),
    ],
)
def test_what_cannot_be_asked(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        generate(TARGET, "prompt_lookup", torch.tensor([[1, 2]]), **how, **GREEDY)
    with pytest.raises(ForedraftError, match="leave tree out, or first"):
        generate(TARGET, draft_of("eagle3"), torch.tensor([[1, 2]]), tree=TREE, first="suffix", **GREEDY)
