"""A real vLLM server on the CPU: asked for states, for answers, and measured with and without a draft.

Needs `FOREDRAFT_VLLM_PYTHON`, as test_vllm.py does; a minute or two each.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_vllm import IN_VLLM, PYTHON
from tiny import TOKENS, chat, tiny_batch, tiny_draft, tiny_target, tiny_tokenizer
from typer.testing import CliRunner
from vllm_on_cpu import install

from foredraft import auto_draft, save_draft
from foredraft.cli import app
from foredraft.target import load_target, load_tokenizer
from foredraft.training import CachedTarget
from foredraft.training.capture import capture
from foredraft.training.run import packed_rows
from foredraft.training.settings import RunConfig

pytestmark = IN_VLLM
SMALL = "--enforce-eager --max-model-len 256 --max-num-seqs 4"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target in a directory, and conversations."""
    directory = tmp_path_factory.mktemp("served")
    tiny_target(layers=8, vocab=TOKENS, hidden=128, head_dim=32, eos_token_id=2, pad_token_id=0).save_pretrained(directory / "target")
    tiny_tokenizer().save_pretrained(directory / "target")
    said = [chat(f"what is {i}?", "an answer " * (i + 1), "and then?", "more") for i in range(6)]
    (directory / "data.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in said))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in install(directory / "vllm", PYTHON).items():
            patch.setenv(name, value)
        yield directory


def test_states_are_those_of_transformers(work: Path) -> None:
    """Aux and final, of every document; the run that captured by vLLM is the one that trains by transformers: the same fingerprint."""
    fields = {
        "target": str(work / "target"),
        "output_dir": str(work / "run"),
        "data": {"train": str(work / "data.jsonl"), "max_length": 128},
    }
    config = RunConfig.check({**fields, "hidden_states_cache": str(work / "states"), "target_dtype": "float32"})
    wanted = capture(config, engine="vllm", engine_arguments=SMALL)
    assert wanted.documents > 3
    model, tokenizer = load_target(config.target, "float32"), load_tokenizer(config.target)
    tokenizer, rows, _ = packed_rows(config)
    noted = json.loads((work / "states" / "states.json").read_text())["of"]
    theirs, ours = (CachedTarget(model, tuple(noted["aux_layers"]), work / name, tokenizer=tokenizer) for name in ("states", "ours"))
    assert theirs.store.wanted([rows]).missing == 0
    ours.fill(rows)
    batch = tiny_batch(tiny_draft(tiny_target()).algorithm, list(rows))
    for name, states in ours.store.states(batch).items():
        found = theirs.store.states(batch)[name]
        assert torch.equal(found.isnan(), states.isnan())
        each, true = (s.nan_to_num().unflatten(-1, (-1, 128)) for s in (found, states))
        apart = (each - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=1e-6)
        print(f"{name}: apart by up to {float(apart.max()):.2g} of a state")
        assert apart.max() < 1e-3


def test_answers_are_those_of_transformers(work: Path) -> None:
    """Greedy, two turns each: the server's text is the one that the target writes here."""
    for name, more in (("vllm", ["--engine", "vllm", "--engine-arguments", SMALL]), ("here", [])):
        command = ["regenerate", str(work / "data.jsonl"), "--target", str(work / "target"), "--out", str(work / f"{name}.jsonl")]
        result = CliRunner().invoke(app, [*command, "--max-new-tokens", "12", "--dtype", "float32", *more], catch_exceptions=False)
        assert "6 conversations answered" in result.output
    ours, theirs = (
        {row["index"]: row for row in map(json.loads, (work / f"{name}.jsonl").read_text().splitlines())} for name in ("here", "vllm")
    )
    assert {i: row["finish"] for i, row in theirs.items()} == {i: row["finish"] for i, row in ours.items()}
    same = sum(theirs[i]["messages"] == ours[i]["messages"] for i in ours)
    assert same >= 5, "random weights decode to bytes, of which a server's detokenizer may show halves otherwise"


def test_measured_with_and_without_a_draft(work: Path) -> None:
    """Greedy in float32: the same texts; the engine's acceptance is ours, but for what each counts at a text's end."""
    model = load_target(str(work / "target"), "float32")
    draft = auto_draft(model.config, ttt_steps=2)
    draft.start_from(model)
    save_draft(draft, work / "draft")
    command = ["eval", "--target", str(work / "target"), "--draft", str(work / "draft"), "--prompts", str(work / "data.jsonl")]
    more = [
        "--engine",
        "vllm",
        "--engine-arguments",
        SMALL,
        "--num-draft-tokens",
        "2",
        "--dtype",
        "float32",
        "--out",
        str(work / "eval.json"),
    ]
    result = CliRunner().invoke(app, [*command, *more, "--max-new-tokens", "24", "--concurrency", "1,4"], catch_exceptions=False)
    print(result.output)
    found = json.loads((work / "eval.json").read_text())["data"]
    assert [load["concurrency"] for load in found["plain"]] == [load["concurrency"] for load in found["drafted"]] == [1, 4]
    assert found["identical"] == 6
    assert len(found["speedups"]) == 2
    assert all(load["tau"] is None for load in found["plain"])
    for load in found["drafted"]:
        assert load["acceptance"] == pytest.approx(found["ours"]["acceptance"], abs=0.15)
