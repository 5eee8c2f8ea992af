"""The command line, from training to decoding on a tiny target; what a user can mend is told without a traceback."""

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
import yaml
from pydantic import Field
from tiny import CHATML, TOKENS, tiny_draft, tiny_target, tiny_tokenizer
from transformers.utils import logging

import foredraft
from foredraft import Registry, auto_draft, hookimpl, registry
from foredraft.cli import main
from foredraft.files.ours import save_draft
from foredraft.files.reading import read_config
from foredraft.plugins import eagle3

PNG = b"\x89PNG"
REGENERATED = ("--max-new-tokens", "5", "--batch-size", "4")


@pytest.fixture(scope="module", autouse=True)
def as_it_was(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Commands set the verbosity of transformers, and data goes through the cache of datasets."""
    patch, verbosity = pytest.MonkeyPatch(), logging.get_verbosity()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets-cache"))
    patch.setenv("COLUMNS", "200")
    yield
    patch.undo()
    logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, another target, conversations, prompts and a run file."""
    folder = tmp_path_factory.mktemp("work")
    for name, layers in (("target", 8), ("other", 6)):
        tiny_target(layers=layers, vocab=TOKENS, eos_token_id=2, pad_token_id=0).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    conversations = [
        [{"role": "user", "content": f"question {i} — why?"}, {"role": "assistant", "content": f"the answer is {i} 😀"}] for i in range(12)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("hello", "what is it?", "a third one")))
    run = {
        "target": str(folder / "target"),
        "output_dir": str(folder / "run"),
        "data": {"train": str(folder / "chat.jsonl"), "held_out": 2, "max_length": 64},
        "options": {"ttt_steps": 2},
        "draft_vocab_size": 100,
        "training": {"max_steps": 50, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


class Command:
    """`foredraft ...` in this process: exit code, standard output and standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = self.capsys.readouterr()
        return end.value.code or 0, out, err

    def fails(self, *arguments: object) -> str:
        """The message of a command that must fail."""
        code, _, err = self(*arguments)
        assert code == 1, f"exit code {code}"
        assert "Traceback" not in err
        message = err[err.index("error: ") :]
        return message.strip()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def draft(work: Path) -> Path:
    """A draft for `target` as `foredraft train` would leave it, untrained."""
    model = tiny_target(vocab=TOKENS)
    return save_draft(tiny_draft(model, draft_vocab_size=100, ttt_steps=2), work / "draft")


def test_help(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert all(name in out for name in ("train", "eval", "generate", "preview", "regenerate", "info", "plugins"))


def test_version(command: Command) -> None:
    code, out, _ = command("--version")
    assert (code, out.split(" (torch")[0]) == (0, f"foredraft {foredraft.__version__}")


class TestKeys:
    """Told from the schemas, plugins of others included."""

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Guess(eagle3.Eagle3):
            name = "guess"

            class Options(eagle3.Eagle3.Options):
                luck: float | None = Field(None, ge=0, description="how much of it")

        installed = Registry()
        installed.register(SimpleNamespace(__name__="guess", foredraft_algorithms=hookimpl(lambda: [Guess])))
        monkeypatch.setattr(registry, "default_registry", lambda: installed)

    def test_the_page_is_current(self, command: Command, tmp_path: Path) -> None:
        assert command("plugins", "--write", tmp_path / "keys.md")[0] == 0
        page = (Path(__file__).parents[1] / "docs" / "reference" / "keys.md").read_text()
        assert (tmp_path / "keys.md").read_text() == page, "write it anew: foredraft plugins --write docs/reference/keys.md"
        keys = re.findall(r"^\| `([\w.]+)`", page.split("## Training")[0], flags=re.M)
        assert keys == sorted(keys)
        assert {"target", "data.train", "trust_remote_code", "device_map"} <= set(keys)

    def test_of_a_run(self, command: Command) -> None:
        code, out, err = command("train", "--keys")
        assert code == 0, err
        lines = [[cell.strip() for cell in line.split("│")[1:5]] for line in out.splitlines() if "│" in line]
        assert ["data.max_length", "int ≥ 8", "1024", "tokens per packed row; longer conversations are cut"] in lines
        assert ["training.learning_rate", "float", "0.0004", "peak learning rate"] in lines
        assert "options of algorithm guess" in out

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("guess", ["algorithm guess, from this process: autoregressive draft", "luck", "float ≥ 0", "how much of it"]),
            ("llama", ["adapter llama, from foredraft: Llama-shaped drafts", "(model_type llama, mistral", "it takes no options"]),
            ("vllm", ["engine vllm, from foredraft: vLLM's OpenAI server", "it takes no options"]),
        ],
    )
    def test_of_a_plugin(self, command: Command, name: str, told: list[str]) -> None:
        code, out, _ = command("info", name)
        assert code == 0
        assert all(part in out for part in told)


class TestInspect:
    def test_plugins(self, command: Command) -> None:
        code, out, _ = command("plugins")
        assert code == 0
        lines = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
        assert ["adapter", "llama", "foredraft"] in [line[1:4] for line in lines]
        assert ["algorithm", "eagle3", "foredraft"] in [line[1:4] for line in lines]

    def test_broken_and_doubled_plugins(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        def point(name: str, distribution: str, load: Any) -> SimpleNamespace:
            return SimpleNamespace(name=name, dist=SimpleNamespace(name=distribution), load=load)

        def claim() -> ModuleType:
            module = ModuleType("copy")
            vars(module)["foredraft_algorithms"] = eagle3.foredraft_algorithms
            return module

        points = [point("bad", "bad-package", lambda: import_module("no_such_module")), point("a", "one", claim), point("b", "two", claim)]
        monkeypatch.setattr(registry, "default_registry", lambda: Registry(entry_points=points))
        code, out, _ = command("plugins")
        assert code == 0
        assert "failed to load bad (from bad-package): ModuleNotFoundError: No module named 'no_such_module'" in out
        assert "the algorithm name 'eagle3' is claimed twice: by 'eagle3' of one and 'eagle3' of two" in out

    @pytest.mark.usefixtures("uncounted")
    def test_info_on_a_target(self, command: Command, work: Path) -> None:
        code, out, _ = command("info", work / "target", "--draft-vocab-size", 20, "--algorithm", "eagle3")
        assert "attention kernel" in out
        assert code == 0
        assert "a target; planned: a draft by eagle3" in out
        assert f"llama, 8 layers, hidden 32, vocabulary {TOKENS}" in out
        assert "vocabulary 20" in out
        assert "[2, 4, 5] (HF hidden_states indices)" in out

    def test_info_on_nothing(self, command: Command, work: Path) -> None:
        assert command.fails("info", work / "missing").startswith(f"error: no target or draft at '{work}/missing'")
        assert "unknown algorithm 'eagel3'; did you mean 'eagle3'?" in command.fails("info", work / "target", "--algorithm", "eagel3")


class TestPreview:
    def test_what_is_supervised_is_green(self, command: Command, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        code, out, _ = command("preview", work / "chat.jsonl", "--target", work / "target", "--index", 3, "--max-length", 64)
        assert code == 0
        green = "\x1b[1;32mthe answer is 3 😀<|im_end|>\x1b[0m"
        assert out.count("\x1b[1;32m") == 1
        assert green in out
        assert "question 3 — why?" in out.split(green)[0]

    def test_counts(self, command: Command, work: Path) -> None:
        _, out, _ = command("preview", work / "chat.jsonl", "--target", work / "target", "--max-length", 64)
        assert "tokens are supervised (spans from rendering prefixes)" in out
        assert "12 conversations in" in out

    def test_another_template_split_and_strict(self, command: Command, work: Path, tmp_path: Path) -> None:
        template = "{% if thinking is defined and not thinking %}NO THOUGHT{% endif %}" + CHATML
        (tmp_path / "bad.jsonl").write_text((work / "chat.jsonl").read_text() + "null\n")
        arguments = ("preview", tmp_path / "bad.jsonl", "--target", work / "target", "--chat-template", template)
        _, out, _ = command(*arguments, "--split", "train[:2]", "--template-kwargs", "{thinking: false}")
        assert "NO THOUGHT" in out
        assert "2 conversations in" in out
        assert "bad.jsonl, line 13: a record that is no object: None" in command.fails(*arguments, "--strict")
        assert "template_kwargs: expected a mapping, such as" in command.fails(*arguments, "--template-kwargs", "thinking")

    def test_errors(self, command: Command, work: Path, tmp_path: Path) -> None:
        target = ("--target", work / "target")
        assert command.fails("preview", "missing.jsonl", *target) == "error: data 'missing.jsonl': no such file"
        assert command.fails("preview", work / "chat.jsonl", *target, "--index", 12).endswith("has 12 conversations")
        (tmp_path / "bad.jsonl").write_text('{"text": "hi"}\n')
        assert "bad.jsonl, line 1: no turns: expected a list under 'messages'" in command.fails("preview", tmp_path / "bad.jsonl", *target)
        missing = command.fails("preview", work / "chat.jsonl", "--target", work / "missing")
        assert missing.startswith(f"error: the tokenizer of target '{work}/missing' could not be loaded")
        strip = CHATML.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}")
        tiny_tokenizer(strip).save_pretrained(tmp_path / "tokenizer")
        assert "no consistent assistant mask" in command.fails("preview", work / "chat.jsonl", "--target", tmp_path / "tokenizer")


class TestTrain:
    def test_a_few_steps(self, command: Command, work: Path, tmp_path: Path) -> None:
        """With overrides of top-level, nested and absent keys."""
        code, out, err = command(
            "train",
            work / "run.yaml",
            "training.max_steps=3",
            f"output_dir={tmp_path}",
            "options.num_layers=2",
            "training.learning_rate=1e-3",
        )
        assert code == 0, err
        assert "training data: 10 conversations in" in out
        assert "step 3 of 3: loss" in out
        assert f"draft: {tmp_path}/draft" in out
        assert (tmp_path / "training.png").read_bytes().startswith(PNG)
        written = json.loads((tmp_path / "training.json").read_text())
        assert written["run"]["training"]["learning_rate"] == 1e-3
        assert written["run"]["options"] == {"ttt_steps": 2, "num_layers": 2}
        assert any("eval_loss" in entry for entry in written["history"])
        trained = auto_draft(tmp_path / "draft")
        assert (len(trained.layers), trained.config.draft_vocab_size) == (2, 100)
        assert trained.config.foredraft["target"]["name"] == str(work / "target")
        supervised = set(tiny_tokenizer()("the answer is 3 😀<|im_end|>")["input_ids"])
        assert supervised <= set(trained.draft_ids.tolist())

    def test_all_that_is_wrong_at_once(self, command: Command, work: Path, tmp_path: Path) -> None:
        run = yaml.safe_load((work / "run.yaml").read_text())
        run["trainign"] = run.pop("training")
        run["data"]["max_lenght"] = 5
        run["data"]["held_out"] = -1
        run["training"] = {"learning_rat": 1e-4, "output_dir": "x", "weight_decay": "fast", "per_device_train_batch_size": 0}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        message = command.fails("train", tmp_path / "run.yaml")
        assert message.startswith(f"error: {tmp_path}/run.yaml:\n")
        for part in (
            "unknown option 'trainign'; did you mean 'training'?",
            "unknown option 'data.max_lenght'; did you mean 'data.max_length'?",
            "data.held_out=-1: Input should be greater than or equal to 0",
            "unknown training argument 'learning_rat'; did you mean 'learning_rate'?",
            "training.output_dir: set output_dir, one level up",
            "training.weight_decay='fast': Input should be a valid number",
            "training.per_device_train_batch_size=0: Input should be greater than or equal to 1",
        ):
            assert part in message

    def test_a_misspelt_key_is_told_before_torch_is_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("{target: t, output_dir: o, data: {train: d}, trainign: {}}")
        lines = ("import sys", "from foredraft.cli import main", "try:", "  main()", "finally:", "  assert 'torch' not in sys.modules")
        program = [sys.executable, "-c", "\n".join(lines), "train", str(tmp_path / "run.yaml")]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {tmp_path}/run.yaml:\n  unknown option 'trainign'; did you mean 'training'?")

    def test_what_keys_name_is_looked_at_together(self, command: Command, work: Path, tmp_path: Path) -> None:
        """Before the target's weights, which are missing here, are loaded."""
        shutil.copytree(work / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
        (tmp_path / "file").write_text("")
        message = command.fails(
            "train",
            work / "run.yaml",
            f"target={tmp_path}/target",
            f"output_dir={tmp_path}/file/run",
            "hidden_states_cache=/proc/cache",
            "data.train=[missing.jsonl, ./nor/this]",
            "aux_layers=[1, 2, 8]",
            "draft_vocab_size=301",
            "training.report_to=wandb",
        )
        assert message.startswith("error: this run cannot start:\n")
        for part in (
            f"output_dir: '{tmp_path}/file/run' cannot be written, for '{tmp_path}/file': it is no directory",
            "hidden_states_cache: '/proc/cache' cannot be written, for '/proc': ",
            "data 'missing.jsonl': no such file",
            "data './nor/this': no such file",
            "[8] lie outside 1..7",
            "draft_vocab_size=301 does not fit the target's vocabulary of 300",
            "requires wandb to be installed",
        ):
            assert part in message
        (tmp_path / "run/draft").mkdir(parents=True)
        (tmp_path / "run/draft/notes.txt").write_text("mine")
        message = command.fails(
            "train", work / "run.yaml", f"output_dir={tmp_path}/run", "target=./nope", "options.ttt_step=3", "adapter=lama"
        )
        assert f"'{tmp_path}/run/draft' holds more than a draft: notes.txt" in message
        for other in (message, command.fails("info", "./nope")):
            assert "no target or draft at './nope': no such directory\n" in f"{other}\n"
        assert "algorithm 'eagle3': unknown option 'ttt_step'; did you mean 'ttt_steps'?" in message
        assert not list(tmp_path.glob("file/*"))

    @pytest.mark.parametrize(
        ("override", "error"),
        [
            ("algorithm=eagel3", "unknown algorithm 'eagel3'; did you mean 'eagle3'?"),
            ("algorithm=3", "algorithm=3: Input should be a valid string"),
            ("training=3", "training=3: Input should be a valid dictionary"),
            ("options=3", "options=3: Input should be a valid dictionary"),
            ("target_dtype=float8", "target_dtype='float8': Input should be 'auto'"),
            ("data.train=[]", "List should have at least 1 item"),
            ("training.max_steps", "override 'training.max_steps': expected key=value, as in training.learning_rate=1e-4"),
            ("target.x=1", "override 'target.x=1': 'target' holds a value, no keys"),
            ("data.train=[", "override 'data.train=[': '[' is no YAML value"),
            ("training.eval_strategy=sometimes", "training arguments: sometimes is not a valid IntervalStrategy"),
            ("data.held_out=12", "cannot hold out 12 of the 12 conversations"),
        ],
    )
    def test_bad_overrides(self, command: Command, work: Path, tmp_path: Path, override: str, error: str) -> None:
        assert error in command.fails("train", work / "run.yaml", f"output_dir={tmp_path}", override)
        assert {file.name for file in tmp_path.iterdir()} <= {".training.lock"}

    def test_evaluating_on_nothing(self, command: Command, work: Path, tmp_path: Path) -> None:
        overrides = (f"output_dir={tmp_path}", "data.held_out=0", "training.eval_strategy=epoch")
        assert "set eval_data or data.held_out" in command.fails("train", work / "run.yaml", *overrides)

    def test_overrides_fill_an_empty_section(self, command: Command, work: Path, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_text("target: t\noutput_dir: o\ndata: {train: x}\ntraining:\n")
        assert "unknown training argument 'steps'" in command.fails("train", tmp_path / "run.yaml", "training.steps=3")

    @pytest.mark.parametrize(
        ("content", "error"),
        [
            (None, "No such file or directory"),
            ("a: [", "is no YAML"),
            ("hello", "holds str, expected keys: "),
            ("{}", "target: Field required"),
        ],
    )
    def test_bad_run_files(self, command: Command, tmp_path: Path, content: str | None, error: str) -> None:
        if content is not None:
            (tmp_path / "run.yaml").write_text(content)
        message = command.fails("train", tmp_path / "run.yaml")
        assert f"{tmp_path}/run.yaml" in message
        assert error in message


class TestDecode:
    @pytest.mark.usefixtures("uncounted")
    def test_eval(self, command: Command, work: Path, draft: Path, tmp_path: Path) -> None:
        pair = ("--target", work / "target", "--draft", draft)
        out_file = tmp_path / "result.json"
        arguments = ("--prompts", work / "prompts.jsonl", "--max-new-tokens", 12, "-k", 3, "--out", out_file, "--limit", 2, "--record")
        code, out, err = command("eval", *pair, *arguments)
        assert code == 0, err
        result = json.loads(out_file.read_text())["prompts"]
        assert result["prompts"] == result["identical"] == 2
        assert result["different"] == []
        assert 1.0 <= result["tau"] <= 4.0
        assert len(result["acceptance"]) == 3
        assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
        expected = {"shape": "chain", "num_draft_tokens": 3, "max_new_tokens": 12, "temperature": 0.0, "dtype": "float32"}
        assert {key: result["settings"][key] for key in expected} == expected
        assert (tmp_path / "result.png").read_bytes().startswith(PNG)
        assert "2/2" in out
        measured = read_config(draft)["foredraft"]["measured"]["prompts"]
        assert measured["tau"] == pytest.approx(result["tau"], abs=1e-3)
        assert measured["num_draft_tokens"] == 3
        assert f"prompts: τ {measured['tau']}" in command("info", draft)[1]

    def test_eval_without_baseline(self, command: Command, work: Path, draft: Path, tmp_path: Path) -> None:
        arguments = (
            "--prompts",
            work / "prompts.jsonl",
            "--max-new-tokens",
            4,
            "--limit",
            1,
            "--no-baseline",
            "--out",
            tmp_path / "r.json",
        )
        code, _, err = command("eval", "--target", work / "target", "--draft", draft, *arguments, "--temperature", 1)
        assert code == 0, err
        result = json.loads((tmp_path / "r.json").read_text())["prompts"]
        assert (result["identical"], result["plain_tokens_per_second"], result["speedup"]) == (None, None, None)

    def test_generate(self, command: Command, work: Path, draft: Path) -> None:
        code, out, err = command("generate", "hello", "--target", work / "target", "--draft", draft, "--max-new-tokens", 8, "-k", 2)
        assert code == 0, err
        assert "(chain of 2), accepted per position:" in out
        assert "tokens/s (torch.float32)" in out

    def test_without_a_draft(self, command: Command, work: Path, tmp_path: Path) -> None:
        """An algorithm without weights is run; whatever would need a draft says why there is none."""
        target, prompts, lookup = ("--target", work / "target"), ("--prompts", work / "prompts.jsonl"), ("--algorithm", "prompt_lookup")
        code, out, err = command("generate", "hello", "num_tokens=3", *target, *lookup, "--max-new-tokens", 12)
        assert code == 0, err
        assert "(chain of 3), accepted per position:" in out
        code, out, err = command("eval", *target, *prompts, *lookup, "--max-new-tokens", 12)
        assert code == 0, err
        assert "prompt_lookup, chain, 10 drafted tokens" in out
        assert "3/3" in out
        assert "max_ngram" in command("info", "prompt_lookup")[1]
        for arguments, expected in (
            (("train", work / "run.yaml", "algorithm=prompt_lookup", "options={}"), "algorithm 'prompt_lookup' has no weights"),
            (("init", work / "target", tmp_path / "draft", *lookup), "no draft to build, train or export"),
            (("info", work / "target", *lookup), "run it: foredraft generate (or eval) --algorithm prompt_lookup"),
            (("draw", "prompt_lookup"), "has no weights"),
            (("generate", "hi", "max_ngram=0", *target, *lookup), "max_ngram"),
            (("generate", "hi", *target, *lookup, "-k", 11), "11 tokens were asked for; this draft makes 10 at once"),
            (("generate", "hi", *target, *lookup, "--tree", "2,2,4"), "drafts by algorithm 'prompt_lookup' grow no trees"),
            (("generate", "hi", *target, "--algorithm", "eagle3"), "algorithm 'eagle3' drafts with a model"),
            (("generate", "hi", *target), "who drafts? Pass --draft DIRECTORY, or --algorithm NAME"),
            (("generate", "hi", *target, "--draft", work, "max_ngram=2"), "who drafts?"),
            (("eval", *target, *prompts, *lookup, "--record"), "there is none without --draft"),
        ):
            assert expected in command.fails(*arguments), arguments

    def test_errors(self, command: Command, work: Path, draft: Path, tmp_path: Path) -> None:
        prompts, target = ("--prompts", work / "prompts.jsonl"), ("--target", work / "target")
        other = command.fails("eval", "--target", work / "other", "--draft", draft, *prompts)
        assert "this draft was made for another target" in other
        assert "num_hidden_layers: the draft expects 8, the target has 6" in other
        assert "this draft was made for another target" in command.fails("generate", "hi", "--target", work / "other", "--draft", draft)
        assert "could not be loaded" in command.fails("generate", "hi", "--target", work / "missing", "--draft", draft)
        assert "holds no config.json: there is no such directory" in command.fails("generate", "hi", *target, "--draft", work / "missing")
        mistyped = command.fails("generate", "hi", *target, "--draft", draft.with_name(draft.name + "s"))
        assert f"there is no such directory; did you mean '{draft.name}'?" in mistyped
        assert "--dtype float8: choose auto" in command.fails("generate", "hi", *target, "--draft", draft, "--dtype", "float8")
        assert "no such file" in command.fails("eval", *target, "--draft", draft, "--prompts", work / "missing.jsonl")
        (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
        strict = ("--prompts", tmp_path / "bad.jsonl", "--strict")
        assert "bad.jsonl, line 2: no turns: expected a list" in command.fails("eval", *target, "--draft", draft, *strict)

    def test_a_target_in_place_of_the_draft(self, command: Command, work: Path) -> None:
        message = command.fails("generate", "hi", "--target", work / "target", "--draft", work / "target")
        assert message.endswith("target' is no draft: its config.json has no 'foredraft' entry")


class TestRegenerate:
    def test_answers_and_continues(self, command: Command, work: Path, tmp_path: Path) -> None:
        out_file = tmp_path / "new" / "answers.jsonl"
        arguments = ("regenerate", work / "chat.jsonl", "--target", work / "target", "--out", out_file, *REGENERATED)
        code, out, err = command(*arguments, "--limit", 3)
        assert code == 0, err
        assert f"3 conversations answered into {out_file}" in out
        assert "9 conversations answered" in command(*arguments)[1]
        rows = [json.loads(line) for line in out_file.read_text().split("\n")[:-1]]
        assert sorted(row["index"] for row in rows) == list(range(12))
        assert command("preview", out_file, "--target", work / "target")[0] == 0

    def test_errors(self, command: Command, work: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.jsonl").write_text("notes\n")
        where = ("--out", tmp_path / "notes.jsonl", *REGENERATED)
        message = command.fails("regenerate", work / "chat.jsonl", "--target", work / "target", *where)
        assert "notes.jsonl, line 1 was not written by `foredraft regenerate`" in message
        assert "could not be loaded" in command.fails("regenerate", work / "chat.jsonl", "--target", work / "missing", *where)
        assert "no such file" in command.fails("regenerate", work / "missing.jsonl", "--target", work / "target", *where)


def test_as_a_program(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "foredraft", "train", str(tmp_path / "missing.yaml")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"error: run file '{tmp_path}/missing.yaml': No such file or directory\n"
    assert done.stdout == ""
