"""`foredraft compare`: drafts that are trained or there, and lookup; what is wrong is told first, what is done is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rigged import letter_tokenizer, predictable_target
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import foredraft.decoding
from foredraft import ForedraftError, evaluate
from foredraft.cli import app
from foredraft.cli.common import load_draft_for
from foredraft.decoding import load_prompts
from foredraft.decoding.evaluate import encode
from foredraft.decoding.replay import answers, evaluate_replayed
from foredraft.training.run import train
from foredraft.training.settings import RunConfig


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target, what it answers, prompts and two runs; commands run in it."""
    monkeypatch.chdir(tmp_path)
    target = predictable_target(wobble=0.3)
    target.save_pretrained("target")
    letter_tokenizer().save_pretrained("target")
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "ovCJQbipwD"}]} for q in ("ho", "v", "hov", "o")
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for name, asked in (("first", ("ho", "ovCJQbipwDKRcjqx")), ("second", ("pw",))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    for algorithm, options in (("eagle3", {"ttt_steps": 2}), ("medusa", {"num_heads": 2})):
        training = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        run = {"target": "target", "algorithm": algorithm, "options": options, "output_dir": f"runs/{algorithm}", "training": training}
        Path(f"{algorithm}.yaml").write_text(yaml.safe_dump({**run, "data": {"train": "chat.jsonl", "max_length": 64}}))
    return tmp_path


def compare(*words: Any) -> Any:
    found = CliRunner().invoke(app, ["compare", *map(str, words), "--prompts", "first.jsonl", "--prompts", "second.jsonl"])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.output


def test_an_interrupted_comparison_goes_on(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def ending(target: Any, draft: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(getattr(draft, "algorithm", draft).name)
        if len(calls) == 4:
            raise InterruptedError
        return evaluate(target, draft, *args, **kwargs)

    monkeypatch.setattr(foredraft.decoding, "evaluate", ending)
    monkeypatch.setattr("foredraft.training.run.plot_training", lambda *_: None)
    named = ("eagle3.yaml", "medusa.yaml", "prompt_lookup", "--max-new-tokens", 12, "--dtype", "float32")
    with pytest.raises(InterruptedError):
        compare(*named)
    before = json.loads(Path("comparison/comparison.json").read_text())["rows"]
    assert {name: list(row["results"]) for name, row in before.items()} == {"eagle3": ["first", "second"], "medusa": ["first"]}

    told = compare(*named)
    assert calls == ["eagle3", "eagle3", "medusa", "medusa", "medusa", "prompt_lookup", "prompt_lookup"]
    assert told.count("is finished: train longer") == 2
    assert told.count("measured before") == 3
    rows = json.loads(Path("comparison/comparison.json").read_text())["rows"]
    assert rows["eagle3"] == before["eagle3"]
    assert rows["eagle3"]["training"]["steps"] == 2
    assert rows["eagle3"]["training"]["seconds"] > 0
    assert rows["eagle3"]["parameters"] > rows["prompt_lookup"]["parameters"] == 0
    for row in rows.values():
        for result in row["results"].values():
            assert result["identical"] == result["prompts"]
            assert 0 < result["draft_ms"] < 1000
            assert 0 < result["pass_ms"] < 1000
            assert result["speedup"] > 0
    table = Path("comparison/comparison.md").read_text()
    assert table in told.replace("\r", "")
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[2:]] == ["| eagle3", "| medusa", "| prompt_lookup"]
    assert {len(line) for line in lines} == {14 - 1}
    assert lines[4][-1] == "3/3 |"
    assert Path("comparison/comparison.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(ForedraftError, match=r"(?s)another comparison.*max_new_tokens: 12 then, 8 now.*medusa: is there, and not"):
        compare("eagle3.yaml", "prompt_lookup", "--max-new-tokens", 8)
    monkeypatch.setattr("foredraft.decoding.report.plot_comparison", lambda *_: None)
    # A draft that is there, by its run's directory; it is the same as in the run above.
    assert "| eagle3 | eagle3 | 4 |" in compare(
        "runs/eagle3", "--target", "target", "--out", "other", "--max-new-tokens", 4, "--no-baseline"
    )


def test_replayed_drafts_have_the_counts_of_decoding(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.training.run.plot_training", lambda *_: None)
    for file in map(Path, ("eagle3.yaml", "medusa.yaml")):
        run = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**run, "training": {**run["training"], "max_steps": 40, "learning_rate": 3.0e-3}}))
    named = ("eagle3.yaml", "medusa.yaml", "suffix", "--max-new-tokens", 12, "--dtype", "float32", "--num-draft-tokens", 2)
    decoded, replayed = ("--out", "decoded", "--no-baseline"), ("--out", "replayed", "--replay")
    compare(*named, *decoded)
    told = compare(*named, *replayed)
    assert "nothing was decoded" in told
    results = [json.loads(Path(out, "comparison.json").read_text())["rows"] for out in ("decoded", "replayed")]
    for name, row in results[0].items():
        for file, ours in row["results"].items():
            theirs = results[1][name]["results"][file]
            assert {key: ours[key] for key in ("tau", "acceptance", "emitted", "drafted", "prompts")} == {
                key: theirs[key] for key in ("tau", "acceptance", "emitted", "drafted", "prompts")
            }
            assert theirs["speedup"] is theirs["tokens_per_second"] is None
    for name in results[0]:  # else nothing of a draft would have been compared
        assert any(result["tau"] > 1 for result in results[0][name]["results"].values()), name
    Path("replayed/comparison.json").unlink()  # the texts are kept
    monkeypatch.setattr("foredraft.decoding.replay.answers", None)
    compare(*named, *replayed)
    with pytest.raises(ForedraftError, match=r"--replay --temperature 1: .* leave one of them out"):
        compare(*named, *replayed, "--temperature", 1)


def test_lengths_that_are_chosen_step_by_step_are_replayed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.training.run.plot_training", lambda *_: None)
    run = yaml.safe_load(Path("eagle3.yaml").read_text())
    Path("eagle3.yaml").write_text(yaml.safe_dump({**run, "training": {**run["training"], "max_steps": 40, "learning_rate": 3.0e-3}}))
    train(RunConfig.load("eagle3.yaml"))
    target, reader = AutoModelForCausalLM.from_pretrained("target"), AutoTokenizer.from_pretrained("target")
    draft = load_draft_for(Path("runs/eagle3/draft"), target)
    prompts = load_prompts("first.jsonl")
    texts = answers(target, [encode(reader, prompt)["input_ids"][0] for prompt in prompts], 24)
    found = []
    for how in ({}, {"min_confidence": 0.2}, {"min_acceptance": 0.6}, {"first": "prompt_lookup"}):
        ours = evaluate_replayed(target, draft, texts, num_draft_tokens=3, max_new_tokens=24, **how)
        decoded = evaluate(target, draft, reader, prompts, num_draft_tokens=3, max_new_tokens=24, baseline=False, **how)
        assert ours.settings == decoded.settings
        assert (ours.tau, ours.acceptance, ours.drafted) == (decoded.tau, decoded.acceptance, decoded.drafted), how
        found.append((ours.tau, ours.drafted))
    assert len(set(found)) == 4  # else one of the ways changed nothing


@pytest.mark.parametrize("end", [None, 0, 10, [3, 0]])
def test_answers_are_those_to_each_prompt_alone(end: Any) -> None:
    target = predictable_target(wobble=0.3)
    target.generation_config.eos_token_id = end
    prompts = [torch.tensor(ids) for ids in ([5], [0, 7, 0], [3, 9, 10, 4, 1], *([i, i + 1] for i in range(11, 20)))]
    found = answers(target, prompts, 30, show=False)
    for ids_L, (text_L, known) in zip(prompts, found, strict=True):
        alone = target.generate(
            ids_L[None], attention_mask=torch.ones_like(ids_L)[None], max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert (text_L.tolist(), known) == (alone[0].tolist(), len(ids_L))
    assert (len({len(text_L) - known for text_L, known in found}) > 1) == (end is not None)


def test_the_run_that_reads_most_fills_what_is_shared(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def noting(run: Any) -> None:
        trained.append(run.algorithm)
        if len(trained) == 2:
            raise InterruptedError

    monkeypatch.setattr("foredraft.training.run.train", noting)
    run = yaml.safe_load(Path("medusa.yaml").read_text())
    for algorithm in ("dflash", "dspark"):
        own = {"algorithm": algorithm, "options": {"block_size": 3, "num_layers": 2}, "output_dir": f"runs/{algorithm}"}
        Path(f"{algorithm}.yaml").write_text(yaml.safe_dump({**run, **own, "hidden_states_cache": "states"}))
    with pytest.raises(InterruptedError):
        compare("dflash.yaml", "dspark.yaml")
    assert trained == ["dspark", "dflash"]


def test_all_that_is_wrong_is_told_first(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.training.run.train", None)
    run = yaml.safe_load(Path("medusa.yaml").read_text())
    for name, more in {
        "bad": {"trainign": {}},
        "nodata": {"data": {"train": "none.jsonl"}, "hidden_states_cache": "states", "output_dir": "runs/nodata"},
        "stored": {"algorithm": "eagle3", "options": {}, "hidden_states_cache": "states", "output_dir": "runs/stored"},
        "elsewhere": {"target": "other", "output_dir": "runs/elsewhere"},
    }.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump({**run, **more}))
    Path("twice").mkdir()
    Path("twice/medusa.yaml").write_text(Path("medusa.yaml").read_text())
    Path("runs").mkdir()
    named = (
        "medusa.yaml",
        "bad.yaml",
        "nodata.yaml",
        "stored.yaml",
        "elsewhere.yaml",
        "twice/medusa.yaml",
        "runs",
        "lookup",
        "prompt_lookup",
    )
    with pytest.raises(ForedraftError) as raised:
        compare(*named, "--num-draft-tokens", 5)
    for told in (
        "unknown option 'trainign'; did you mean 'training'?",
        "'none.jsonl': no such file",
        "drafts are compared with one target, found other, target",
        "two are called 'medusa'",
        "'runs' holds no config.json",
        "'lookup' is no run file (.yaml), no directory of a draft, and no algorithm",
        "medusa: 5 tokens were asked for; this draft makes 2 at once",
        "is shared by runs that read other states, give them their own",
    ):
        assert told in str(raised.value), told
    assert not list(Path("runs").iterdir())
