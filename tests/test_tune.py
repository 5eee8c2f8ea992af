"""How much to draft: the arithmetic of speed-ups against rounds that are played, and what `foredraft tune` makes of measured costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigged import letter_tokenizer, predictable_target
from tiny import tiny_draft
from typer.testing import CliRunner

from foredraft import ForedraftError, save_draft
from foredraft.cli import app, tune
from foredraft.decoding import DraftingStats, costs
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and three drafts for it, untrained."""
    folder, target = tmp_path_factory.mktemp("pair"), predictable_target()
    target.save_pretrained(folder / "target")
    letter_tokenizer().save_pretrained(folder / "target")
    for name, options in {"eagle3": {}, "dflash": {"block_size": 4}, "medusa": {"num_heads": 2}}.items():
        save_draft(tiny_draft(target, name, **options), folder / name)
    (folder / "prompts.jsonl").write_text('{"prompt": "ho"}\n{"prompt": "v"}\n')
    return folder


@pytest.mark.parametrize("name", ["eagle3", "dflash", "medusa"])
def test_tune(name: str, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is looked at is shown with figures that go together; the batch is what the target and the draft's head work on."""
    monkeypatch.setenv("COLUMNS", "200")
    real, seen = costs.measure_costs, []

    def quick(target: Any, draft: Any, shapes: Any, size: int) -> Any:
        rows = set()
        target.model.register_forward_pre_hook(lambda m, args, kw: rows.add(tuple(kw["input_ids"].shape)), with_kwargs=True)
        draft.lm_head.register_forward_pre_hook(lambda m, args: rows.add(("head", args[0].shape[0])))
        found = real(target, draft, shapes, size, context=16, rounds=1)
        seen.append((size, rows, found))
        return replace(found, verify={w: 10.0 + w for w in found.verify}, draft=dict.fromkeys(found.draft, 0.5))

    monkeypatch.setattr(costs, "measure_costs", quick)
    monkeypatch.setattr(tune, "TREES", ("2,2,3",))
    accepted = {"eagle3": [0.9, 0.8, 0.1], "dflash": [0.5, 0.0, 0.0], "medusa": [0.0, 0.0]}[name]
    monkeypatch.setattr(DraftingStats, "acceptance", property(lambda stats: accepted[: len(stats.drafted)]))
    words = ["tune", pair / name, "--target", pair / "target", "--prompts", pair / "prompts.jsonl", "--batch-size", "1,3"]
    words += ["--max-new-tokens", 4, *(["-k", 3] if name == "eagle3" else [])]
    told = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False).output
    told = " ".join(told.split())
    for size, rows, found in seen:
        assert {(size, 1), (size, 3)} <= rows
        assert {r[1] for r in rows if r[0] == "head"} == {size} if size > 1 else True
        assert all(ms > 0 for ms in (*found.verify.values(), *found.draft.values()))
    assert [size for size, _, _ in seen] == [1, 3]
    if name == "eagle3":  # a tree whose depths are accepted like a chain's costs more
        assert "batch size 3: draft 2 tokens per pass" in told
        assert f"{2.7 * 11 / 13.5:.2f}" in told
        assert "tree 2,2,3" in told
        assert '"num_speculative_tokens": 2' in told
    elif name == "dflash":
        assert "no trees: drafts by algorithm 'dflash' grow no trees" in told
        assert "draft 1 token per pass" in told
    else:
        assert "serve the target without this draft" in told
