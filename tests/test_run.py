"""A run file's numbers, and what resuming a run with other settings says."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import CHATML, tiny_draft, tiny_target, tiny_tokenizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from foredraft import ForedraftError, auto_draft, save_draft
from foredraft.cli import main
from foredraft.cli.describe import describe
from foredraft.draft.model import BaseDraft
from foredraft.errors import nearest
from foredraft.formats import export_draft
from foredraft.training import resume
from foredraft.training.checks import check_run
from foredraft.training.resume import alone_in
from foredraft.training.run import train
from foredraft.training.settings import RunConfig


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """A run of two steps on a tiny target."""
    tokenizer = tiny_tokenizer()
    tiny_target(vocab=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    line = {"messages": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer in a sentence"}]}
    (tmp_path / "data.jsonl").write_text((json.dumps(line) + "\n") * 6)
    return {
        "target": str(tmp_path / "target"),
        "output_dir": str(tmp_path / "out"),
        "options": {"ttt_steps": 2},
        "data": {"train": str(tmp_path / "data.jsonl"), "max_length": 64},
        "training": {"max_steps": 2, "save_steps": 1, "save_strategy": "steps"},
    }


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", ".1e-3"])
def test_numbers_as_people_write_them(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads 1e-4 as text; here it is a number, in files and overrides."""
    run = f"{{target: t, output_dir: o, data: {{train: d}}, training: {{learning_rate: {text}}}}}"
    (tmp_path / "run.yaml").write_text(run)
    assert RunConfig.load(tmp_path / "run.yaml").training == {"learning_rate": 1e-4}
    assert RunConfig.load(tmp_path / "run.yaml", [f"training.weight_decay={text}"]).training["weight_decay"] == 1e-4


def test_rows_of_a_step_are_compared_whoever_trains_them(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks go on with what one has trained in two micro-batches; alone, they are told."""

    def asked(ranks: int, **training: Any) -> RunConfig:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return RunConfig.check({**fields, "training": {**fields["training"], **training}})

    def noted(finished: bool) -> None:
        output.mkdir(exist_ok=True)
        (output / "run.json").write_text(json.dumps({**json.loads(first.model_dump_json()), "finished": finished, "ranks": 1}))

    first, output = asked(1, per_device_train_batch_size=1, gradient_accumulation_steps=2), Path(fields["output_dir"])
    noted(finished=False)
    monkeypatch.setattr(resume, "latest_complete", lambda _: output)
    assert resume.earlier_run(asked(2, per_device_train_batch_size=1))["length"] == []
    with pytest.raises(ForedraftError, match=r"rows per step: 2 then, 4 now .* 2 ranks, 1 then"):
        resume.earlier_run(asked(2, per_device_train_batch_size=1, gradient_accumulation_steps=2))
    noted(finished=True)
    assert resume.earlier_run(asked(2, per_device_train_batch_size=1, gradient_accumulation_steps=2))["finished"]


def test_no_layers_to_checkpoint(fields: dict[str, Any]) -> None:
    run = {**fields, "algorithm": "medusa", "options": {}, "training": {"gradient_checkpointing": True}}
    with pytest.raises(ForedraftError, match="a draft by algorithm 'medusa' has no layers to compute again: leave it out"):
        check_run(RunConfig.check(run))


def test_resume_or_say_what_changed(fields: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run does nothing but say so; longer, it goes on; with another result it is refused, unless it starts anew."""

    def steps(longer: dict[str, Any], **other: Any) -> int:
        train(RunConfig.check({**fields, **other, "training": {**fields["training"], **longer}}))
        history = json.loads((Path(fields["output_dir"]) / "training.json").read_text())["history"]
        return max(log["step"] for log in history)

    output = Path(fields["output_dir"])
    assert steps({}) == 2
    finished = {file.name: file.stat().st_mtime_ns for file in output.rglob("*")}
    capsys.readouterr()
    for same in ({}, {"logging_steps": 1}, {"save_steps": 7, "save_total_limit": 3}):
        assert steps(same) == 2
        assert f"'{output}' is finished" in capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in output.rglob("*")}.items() >= finished.items() - {(output.name, 0)}
    with pytest.raises(ForedraftError) as refused:
        steps({"learning_rate": 0.5, "max_steps": 9}, options={"ttt_steps": 3}, data={**fields["data"], "strict": True})
    assert f"'{output}' belongs to a run with other settings:\n  options.ttt_steps: 2 then, 3 now\n  training.learning_rate: None" in str(
        refused.value
    )
    assert not any(key in str(refused.value) for key in ("max_steps", "strict"))
    with pytest.raises(ForedraftError, match="torch_compile: set compile, one level up"):
        steps({"torch_compile": True})
    compiled: list[Any] = []
    monkeypatch.setattr(BaseDraft, "compile", lambda draft: compiled.append(draft))
    assert steps({"max_steps": 4, "logging_steps": 1}, compile=True) == 4
    assert len(compiled) == 1
    out = capsys.readouterr().out
    assert f"resuming from {output}/checkpoint-2" in out
    assert "training.max_steps was 2, is 4: from here the learning rate is that of a run of this length" in out
    rates = [log["learning_rate"] for log in json.loads((output / "training.json").read_text())["history"] if "learning_rate" in log]
    assert rates[-2:] == pytest.approx([4e-4 * 2 / 4, 4e-4 * 1 / 4])
    data = Path(fields["data"]["train"])
    data.write_text(data.read_text().replace("a question", "another one"))
    with pytest.raises(ForedraftError, match="the data packs to other rows than those"):
        steps({"max_steps": 6})
    assert steps({"learning_rate": 0.5}, resume=False) == 2


def test_one_run_in_a_directory(fields: dict[str, Any]) -> None:
    """The other is named; a trainer of one's own is no exception, and a killed run leaves no lock."""
    lines = (
        "import sys, time",
        "from foredraft.training.resume import alone_in",
        "with alone_in(sys.argv[1]):",
        "  print('in', flush=True)",
    )
    program = "\n".join([*lines, "  time.sleep(99)"])
    other = subprocess.Popen([sys.executable, "-c", program, fields["output_dir"]], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    with pytest.raises(ForedraftError, match=rf"in '.*out' trains process {other.pid} on {socket.gethostname()}, since 20\d\d-"):
        train(RunConfig.check(fields))
    other.kill()
    other.wait()
    with alone_in(fields["output_dir"]), alone_in(fields["output_dir"]):
        pass


@pytest.mark.parametrize(
    ("asked", "meant"), [("eagle", "eagle3"), ("EAGLE-3", "eagle3"), ("eagel3", "eagle3"), ("P-EAGLE", "peagle"), ("d-flash", "dflash")]
)
def test_near_misses(asked: str, meant: str) -> None:
    assert nearest(asked, ["dflash", "eagle3", "medusa", "peagle"]) == f"; did you mean '{meant}'?"
    assert not nearest("zebra", ["dflash", "eagle3", "medusa", "peagle"])


def test_a_target_in_two_forms() -> None:
    """By name, or a mapping that says how it is loaded, too."""
    others = {"output_dir": "o", "data": {"train": "d"}}
    placed = {"tp_plan": "auto", "quantization": {"quant_method": "hqq"}, "revision": "main"}
    whole = RunConfig.check({**others, "target": {"name": "t", "dtype": "bfloat16", **placed}})
    assert whole == RunConfig.check({**others, "target": "t", "target_dtype": "bfloat16", **placed})
    with pytest.raises(ForedraftError, match=r"target.device_mop'; did you mean 'target.device_map'"):
        RunConfig.check({**others, "target": {"name": "t", "device_mop": "auto"}})
    with pytest.raises(ForedraftError, match="device_map is said beside the target, and in it"):
        RunConfig.check({**others, "target": {"name": "t", "device_map": "auto"}, "device_map": "auto"})


def test_a_key_is_set_back(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{target: t, output_dir: o, data: {train: d}, draft_vocab_size: 100}")
    assert RunConfig.load(tmp_path / "run.yaml", ["draft_vocab_size=null"]).draft_vocab_size is None


def test_resume_is_set_in_one_place(fields: dict[str, Any]) -> None:
    """Trainer's own switch would be ignored, so it is refused."""
    with pytest.raises(ForedraftError, match=r"training.resume_from_checkpoint: set resume, one level up"):
        RunConfig.check({**fields, "training": {"resume_from_checkpoint": "x"}})


@pytest.mark.parametrize("wanted", [False, True])
def test_the_embedding_is_trained_if_asked(fields: dict[str, Any], wanted: bool) -> None:
    """`train_embedding: true` really trains it; otherwise it stays the target's, bit for bit."""
    draft = auto_draft(train(RunConfig.check({**fields, "train_embedding": wanted})))
    target = AutoModelForCausalLM.from_pretrained(fields["target"])
    assert torch.equal(draft.embed_tokens.weight, target.get_input_embeddings().weight) is not wanted


@pytest.mark.parametrize(("algorithm", "why"), [("dflash", "it uses its target's"), ("medusa", "reads no embedding")])
def test_an_embedding_that_is_not_read_cannot_be_trained(fields: dict[str, Any], algorithm: str, why: str) -> None:
    small = {"num_layers": 1} if algorithm == "dflash" else {}
    with pytest.raises(ForedraftError, match=f"train_embedding: a draft by algorithm '{algorithm}' .*{why}"):
        train(RunConfig.check({**fields, "train_embedding": True, "algorithm": algorithm, "options": small}))


def test_data_as_people_have_it(
    fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad line among good ones, a tokenizer without a chat template; and nothing to learn is told before the target is loaded."""
    tiny_tokenizer(None).save_pretrained(tmp_path / "target")
    fields |= {"chat_template": "{% if thinking is false %}{{ ' ' * 3 }}{% endif %}" + CHATML, "template_kwargs": {"thinking": False}}
    data = tmp_path / "data.jsonl"
    data.write_text("null\n" + data.read_text())
    with caplog.at_level("WARNING", "foredraft"):
        train(RunConfig.check(fields))
    assert [m for m in caplog.messages if "skipped" in m] == [f"1 skipped, the first is {data}, line 1: a record that is no object: None"]
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())
    assert recorded["chat_template"] == fields["chat_template"]
    assert recorded["template_kwargs"] == {"thinking": False}
    monkeypatch.setattr("foredraft.training.run.load_target", None)
    other = {**fields, "output_dir": str(tmp_path / "other")}
    with pytest.raises(ForedraftError, match=r"data.jsonl, line 1: a record that is no object"):
        train(RunConfig.check({**other, "data": {**fields["data"], "strict": True}}))
    data.write_text(data.read_text().replace("an answer in a sentence", " "))
    with pytest.raises(ForedraftError, match="nothing to train on: none of the 6 conversations"):
        train(RunConfig.check(other))


@pytest.mark.parametrize("form", ["ours", "speculators"])
def test_a_run_starts_from_a_draft(fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """In any format that is imported; at a learning rate of nothing it ends as it began, but for the vocabulary that was asked for."""
    first = train(RunConfig.check({**fields, "draft_vocab_size": 100}))
    start = first if form == "ours" else export_draft(first, tmp_path / "theirs", form)
    still = {"max_steps": 1, "learning_rate": 0.0, "save_strategy": "no"}
    run = {**fields, "draft": str(start), "draft_vocab_size": 80, "output_dir": str(tmp_path / "tuned"), "training": still}
    before, after = auto_draft(first), auto_draft(train(RunConfig.check(run)))
    assert "draft: from a trained draft: its layers; " in capsys.readouterr().out
    assert after.config.draft_vocab_size == 80
    assert after.algorithm.options.ttt_steps == 2
    kept = {name: t for name, t in before.state_dict().items() if name not in ("lm_head.weight", "d2t", "t2d")}
    assert_close({name: t for name, t in after.state_dict().items() if name in kept}, kept)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"adapter": "llama", "aux_layers": [1, 2, 3]},
            "(?s)adapter: the draft to start from, '.*', has its own.*aux_layers: the draft",
        ),
        ({"algorithm": "peagle"}, "made by algorithm 'eagle3', asked for 'peagle'"),
        ({"options": {"num_layers": 2}}, "change the draft's shape"),
        ({"train_embedding": True, "draft": "dflash"}, "train_embedding: a draft by algorithm 'dflash' has no embedding of its own"),
        ({"target": "narrow"}, "hidden_size: the draft expects 32, the target has 16"),
        ({"draft": "target"}, "the draft to start from, '.*/target'"),
        ({"draft": "nowhere"}, "the draft to start from, '.*/nowhere': '.*/nowhere' holds no config.json"),
    ],
)
def test_what_a_draft_has_settled(fields: dict[str, Any], tmp_path: Path, asked: dict[str, Any], why: str) -> None:
    """Told before the target's weights are loaded."""
    model = AutoModelForCausalLM.from_pretrained(fields["target"])
    tiny_target(vocab=model.config.vocab_size, hidden=16).save_pretrained(tmp_path / "narrow")
    tiny_tokenizer().save_pretrained(tmp_path / "narrow")
    save_draft(tiny_draft(model), tmp_path / "eagle3")
    save_draft(tiny_draft(model, "dflash", num_layers=1), tmp_path / "dflash")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"")
    places = {name: str(tmp_path / asked[name]) for name in ("target", "draft") if name in asked}
    run = {"options": {}, "draft": str(tmp_path / "eagle3"), **asked, **places}
    with pytest.raises(ForedraftError, match=why):
        train(RunConfig.check({**fields, **run}))


def test_eval_data(fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is evaluated on is not trained on, told by content; it takes the place of held-out conversations."""
    lines = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "an answer in a sentence"}]}
        for n in range(6)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, lines[:2])))
    fields["eval_data"] = str(tmp_path / "eval.jsonl")
    with pytest.raises(ForedraftError, match=r"eval_data and data.held_out both say what to evaluate on"):
        train(RunConfig.check({**fields, "data": {**fields["data"], "held_out": 1}}))
    draft = train(RunConfig.check(fields))
    assert "training data: 4 conversations in" in capsys.readouterr().out
    assert "eval_loss" in json.loads((draft.parent / "training.json").read_text())["history"][-1]


@pytest.mark.usefixtures("uncounted")
def test_an_untrained_draft(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`foredraft init` writes what a run of the same settings starts from."""

    def init(*asked: str) -> str:
        monkeypatch.setattr("sys.argv", ["foredraft", "init", fields["target"], str(tmp_path / "fresh"), *asked])
        with pytest.raises(SystemExit):
            main()
        return "".join(capsys.readouterr())

    data = ("--data", fields["data"]["train"], "--max-length", "64")
    out = init("ttt_steps=2", "draft_vocab_size=100", "aux_layers=[1,2,3]", *data)
    told = "from the target: embedding, head, final norm, 9 of 10 layer tensors; the draft vocabulary of 100 tokens covers 100.0%"
    assert told in out
    assert "vocabulary 100, 100.0% of the supervised tokens" in describe(str(tmp_path / "fresh"))["draft"]
    still = {"max_steps": 1, "learning_rate": 0.0, "save_strategy": "no"}
    run = {**fields, "draft_vocab_size": 100, "aux_layers": [1, 2, 3], "training": still}
    ours, theirs = (auto_draft(path).state_dict() for path in (tmp_path / "fresh", train(RunConfig.check(run))))
    assert_close(ours, theirs, rtol=0, atol=0)
    assert told in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "training.json").read_text())["start"].startswith(told)
    refused = init("draft_vocab_size=100", "ttt_stps=3")
    for why in ("is there already", "name some (--data)", "did you mean 'ttt_steps'"):
        assert why in refused


def test_ranks_part_when_they_are_done(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that outlives its process's interpreter may take it down."""
    (tmp_path / "run.yaml").write_text(json.dumps(fields))
    monkeypatch.setattr("foredraft.training.run.train", lambda config: Path(config.output_dir) / "draft")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("sys.argv", ["foredraft", "train", str(tmp_path / "run.yaml")])
    with pytest.raises(SystemExit):
        main()
    assert not dist.is_initialized()
