"""Rules that accept more than the target would say: off unless asked for, what they promise, and that every report names them."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rigged import letter_tokenizer, predictable_target
from torch import Tensor
from torch.testing import assert_close
from typer.testing import CliRunner

from foredraft import ForedraftError, evaluate, generate
from foredraft.cli import app
from foredraft.decoding import DraftingStats
from foredraft.decoding.report import demand_identical, table
from foredraft.decoding.tree import Lossy, choose_token

P, Q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.6, 0.1, 0.2])


def drawn(offered: list[int] | None, lossy: Lossy | None, count: int = 4000) -> Tensor:
    """How often each token is chosen, where one is drawn from Q, or these are offered as they are."""
    torch.manual_seed(0)
    tokens = torch.multinomial(Q, count, replacement=True).tolist()
    found = [choose_token(P.log(), [t] if offered is None else offered, None if offered else Q, True, lossy) for t in tokens]
    return torch.bincount(torch.tensor(found), minlength=4) / count


@pytest.mark.parametrize("lenience", [None, 0.5])
def test_sampled_drafts(lenience: float | None) -> None:
    """Of arXiv:2211.17192, appendix A.5; without lenience the target's own distribution."""
    scale = lenience or 1.0
    taken, left = torch.minimum(Q, P / scale), (P - scale * Q).clamp(min=0)
    expected = taken + (1 - taken.sum()) * left / left.sum()
    assert_close(drawn(None, Lossy(lenience=lenience) if lenience else None), expected, atol=0.03, rtol=0)
    assert (expected <= P / scale + 1e-6).all()
    assert lenience or torch.allclose(expected, P)


def test_drafts_without_logits() -> None:
    """A tree's children in turn: each with min(1, p / l) of what remains; without lenience the target's own draw."""
    assert_close(drawn([1, 2], None), P, atol=0.03, rtol=0)
    found = drawn([1, 2], Lossy(lenience=0.5))
    rest = torch.tensor([0.5, 0.0, 0.15, 0.05]) / 0.7  # of the 0.3 nothing is left behind 0.5
    second = 0.4 * min(1.0, float(rest[2]) / 0.5)
    assert float(found[1]) == pytest.approx(0.6, abs=0.03)
    assert float(found[2]) == pytest.approx(second, abs=0.03)


@pytest.mark.parametrize(
    ("rule", "offered", "expected"),
    [
        ("lenience=0.59", [1], 1),  # 0.3 of 0.5 are 0.6
        ("lenience=0.61", [1], 0),
        ("lenience=0.25", [2, 1], 1),  # the likelier of both
        ("lenience=0.25", [], 0),
        ("typical=0.29,9", [1], 1),
        ("typical=0.31,9", [1], 0),
        ("typical=0.9,0.92", [1], 1),  # exp(-H) = 0.319
        ("typical=0.9,0.96", [1], 0),
    ],
)
def test_greedy(rule: str, offered: list[int], expected: int) -> None:
    assert choose_token(P.log(), offered, None, False, Lossy.parse(rule)) == expected
    assert choose_token(P.log(), offered, None, False) == 0


@pytest.mark.parametrize("rule", ["lenience=1", "lenience=0", "lenience=0.5,1", "typical=0.3", "typical=0,1", "lenient=0.5", "lenience="])
def test_no_such_rule(rule: str) -> None:
    with pytest.raises(ForedraftError, match=f"lossy rule '{rule}': expected lenience=L, with L between 0 and 1"):
        Lossy.parse(rule)


def test_more_is_accepted_and_every_report_says_so(tmp_path: Path) -> None:
    target, rule = predictable_target(layers=4), Lossy(lenience=1e-6)
    ids, settings = torch.tensor([[10, 9, 5, 3]]), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    exact, loose = DraftingStats(), DraftingStats()
    plain = target.generate(ids, **settings)
    assert torch.equal(generate(target, "prompt_lookup", ids, stats=exact, **settings), plain)
    assert not torch.equal(generate(target, "prompt_lookup", ids, stats=loose, lossy=rule, **settings), plain)
    assert loose.tau > exact.tau
    asked = [[{"role": "user", "content": "gagag"}]]
    found = evaluate(target, "prompt_lookup", letter_tokenizer(), asked, max_new_tokens=12, lossy=rule)
    assert found.different == [0]
    assert found.settings["lossy"] == "lenience 1e-06"
    demand_identical({"claims nothing": found})
    out = io.StringIO()
    Console(file=out, width=160).print(table({"some": found}))
    assert "LOSSY (lenience 1e-06): the output differs from the target's" in out.getvalue()
    words = ["eval", "--target", "t", "--draft", str(tmp_path), "--prompts", "p", "--record", "--lossy", "typical=0.1,0.3"]
    with pytest.raises(ForedraftError, match="leave out --lossy"):
        CliRunner().invoke(app, words, catch_exceptions=False)
