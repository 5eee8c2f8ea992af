"""`auto_draft` from all it takes, and drafts on disk: what is written, that it comes back bit for bit, and what is refused."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_batch, tiny_config, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.testing import assert_close

from foredraft import BaseDraft, ForedraftError, auto_draft
from foredraft.cli.describe import describe
from foredraft.files.ours import record, save_draft
from foredraft.files.reading import read_config
from foredraft.files.writing import finish, replacing, write_text

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FILES = {"config.json", "model.safetensors", "README.md", "custom_generate"}
"""What is in a draft's directory."""


class TestFromATarget:
    def test_config_object_dict_and_directory_agree(self, tmp_path: Path) -> None:
        config = tiny_config()
        config.save_pretrained(tmp_path)
        drafts = [auto_draft(c, draft_vocab_size=20) for c in (config, config.to_dict(), tmp_path, str(tmp_path))]
        fields = [draft.config.to_dict() for draft in drafts]
        for f in fields:
            f["foredraft"]["target"].pop("name")  # where it came from
        assert all(f == fields[0] for f in fields)
        assert drafts[2].config.foredraft["target"]["name"] == str(tmp_path)

    def test_defaults(self) -> None:
        draft = auto_draft(tiny_config())
        assert draft.algorithm.name == "eagle3"
        assert draft.config.aux_layers == (2, 4, 5)
        assert draft.config.draft_vocab_size == draft.config.vocab_size == 50
        assert not draft.config.has_reduced_vocabulary

    def test_options(self) -> None:
        draft = auto_draft(
            tiny_config(),
            "eagle3",
            aux_layers=(1, 7),
            draft_vocab_size=9,
            num_aux=2,
            num_layers=2,
            fc_norm=True,
            norm_output=True,
            ttt_steps=3,
        )
        assert draft.config.aux_layers == (1, 7)
        assert draft.fc.weight.shape == (32, 64)
        assert len(draft.fc_norm) == len(draft.layers) == 2
        assert draft.lm_head.weight.shape == (9, 32)
        assert draft.algorithm.options.ttt_steps == 3
        assert draft.config.foredraft["options"]["ttt_steps"] == 3

    def test_adapter_by_name(self) -> None:
        assert auto_draft(tiny_config(model_type="unheard-of"), adapter="llama").name == "llama"

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
    def test_default_layers_of_any_number(self, count: int) -> None:
        assert len(auto_draft(tiny_config(layers=12), num_aux=count).config.aux_layers) == count

    @pytest.mark.parametrize("layers", [2, 3, 4, 5, 6])
    def test_shallow_targets_get_a_choice_that_works(self, layers: int) -> None:
        config = tiny_config(layers=layers)
        with pytest.raises(ForedraftError, match=f"do not fit a target of {layers} layers: .*\n  A choice that works:") as raised:
            auto_draft(config)
        choice = re.search(r"aux_layers=\[([\d, ]+)\](?:, with num_aux=(\d+))?$", str(raised.value))
        assert choice is not None
        chosen = tuple(int(i) for i in choice[1].split(","))
        assert auto_draft(config, aux_layers=chosen, num_aux=int(choice[2] or 3)).config.aux_layers == chosen

    def test_a_target_of_one_layer(self) -> None:
        with pytest.raises(ForedraftError, match="no hidden state that a draft could read: at least 2 layers"):
            auto_draft(tiny_config(layers=1))

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"algorithm": "eagel3"}, "unknown algorithm 'eagel3'; did you mean 'eagle3'"),
            ({"adapter": "lama"}, "unknown adapter 'lama'; did you mean 'llama'"),
            ({"ttt_step": 3}, r"algorithm 'eagle3': unknown option 'ttt_step'; did you mean 'ttt_steps'\? \(known: fc_norm"),
            ({"ttt_steps": 0, "step_decay": "x", "foo": 1}, r"(?s)ttt_steps=0: .*step_decay='x': .*unknown option 'foo' \("),
            ({"draft_vocab_size": 51}, "draft_vocab_size=51 does not fit the target's vocabulary of 50: choose 1 to 50"),
            ({"draft_vocab_size": -1}, "draft_vocab_size=-1 does not fit"),
            ({"aux_layers": (2, 4)}, r"aux_layers=\[2, 4\] are 2 layers, but num_aux=3: make them agree"),
            ({"aux_layers": (2, 4, 8)}, r"aux layers \[2, 4, 8\] do not fit a target of 8 layers: \[8\] lie outside 1..7"),
            ({"aux_layers": (0, 4, 4)}, r"they must be distinct and ascending and \[0\] lie outside"),
            ({"aux_layers": (5, 4, 2)}, "they must be distinct and ascending"),
        ],
    )
    def test_what_does_not_fit(self, arguments: dict[str, Any], error: str) -> None:
        with pytest.raises(ForedraftError, match=error):
            auto_draft(tiny_config(), **arguments)

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            ({"model_type": "llamma"}, r"(?s)no adapter for targets of model_type 'llamma'; did you mean 'llama'.*to add one"),
            (
                {"model_type": "bart"},
                r"(?s)no adapter for targets of model_type 'bart'.*adapter 'generic' cannot take it: it is an encoder with a decoder",
            ),
            ({"hidden_size": 3}, r"needs a model_type, found the fields \['hidden_size'\]"),
        ],
    )
    def test_unknown_architecture(self, fields: dict[str, Any], error: str) -> None:
        with pytest.raises(ForedraftError, match=error):
            auto_draft(fields)

    def test_no_such_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ForedraftError, match=r"no target or draft at '.*missing'"):
            auto_draft(tmp_path / "missing")


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2, "draft_vocab_size": 20},
}


def logits(draft: BaseDraft) -> list[Tensor]:
    """What the draft says of a packed row, step by step."""
    model = tiny_target()
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaauubbb", "uuaaaa"]]))
    states = draft.algorithm.unroll(draft, batch, tiny_signal(model, draft, batch).aux_BSA)
    return [draft.compute_logits(state) for state in states]


class TestRoundTrip:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("how", ["save_draft", "save_pretrained", "trainer"])
    def test_bit_for_bit(self, tmp_path: Path, shape: str, how: str) -> None:
        draft = tiny_draft(tiny_target(rope_parameters=LLAMA3), ttt_steps=2, **SHAPES[shape])
        if how == "save_draft":
            assert save_draft(draft, tmp_path / "draft") == tmp_path / "draft"
        elif how == "save_pretrained":
            draft.save_pretrained(tmp_path / "draft")
        else:
            draft.save_pretrained(tmp_path / "draft", state_dict=draft.state_dict())
        torch.manual_seed(1)  # what is random on loading would differ
        loaded = auto_draft(tmp_path / "draft")
        assert type(loaded) is type(draft)
        assert not loaded.training
        state, expected = loaded.state_dict(), draft.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert_close(dict(loaded.named_buffers()), dict(draft.named_buffers()), rtol=0, atol=0)  # rotary frequencies are not in the file
        assert loaded.config.to_diff_dict() == draft.config.to_diff_dict()
        assert loaded.algorithm.options == draft.algorithm.options
        assert_close(logits(loaded), logits(draft), rtol=0, atol=0)

    def test_over_an_older_draft(self, tmp_path: Path) -> None:
        model = tiny_target()
        save_draft(tiny_draft(model, num_layers=2), tmp_path / "draft")
        for stale in ("generation_config.json", "model-00001-of-00002.safetensors", ".config.json.123"):
            (tmp_path / "draft" / stale).write_text("old")
        save_draft(tiny_draft(model), tmp_path / "draft")
        assert auto_draft(tmp_path / "draft").config.num_hidden_layers == 1
        assert [p.name for p in tmp_path.iterdir()] == ["draft"]
        assert {p.name for p in (tmp_path / "draft").iterdir()} == FILES

    def test_others_may_read_it(self, tmp_path: Path) -> None:
        save_draft(tiny_draft(tiny_target()), tmp_path / "draft")
        assert (tmp_path / "draft").stat().st_mode & 0o055 == 0o055
        assert (tmp_path / "draft" / "model.safetensors").stat().st_mode & 0o044 == 0o044

    def test_from_a_drafts_config(self, tmp_path: Path) -> None:
        """The same shape and algorithm, fresh weights."""
        draft = tiny_draft(tiny_target(), num_layers=2, ttt_steps=2, draft_vocab_size=20)
        save_draft(draft, tmp_path)
        for config in (draft.config, read_config(tmp_path)):
            fresh = auto_draft(config)
            assert {n: t.shape for n, t in fresh.state_dict().items()} == {n: t.shape for n, t in draft.state_dict().items()}
            assert fresh.algorithm.options == draft.algorithm.options
            assert not torch.equal(fresh.fc.weight, draft.fc.weight)

    def test_options_that_keep_the_shape(self, tmp_path: Path) -> None:
        save_draft(tiny_draft(tiny_target(), ttt_steps=2), tmp_path)
        assert auto_draft(tmp_path, "eagle3", ttt_steps=5).algorithm.options.ttt_steps == 5
        assert auto_draft(tmp_path).algorithm.options.ttt_steps == 2
        with pytest.raises(ForedraftError, match=r"\{'num_layers': 2\} change the draft's shape: build a new one"):
            auto_draft(tmp_path, num_layers=2)
        with pytest.raises(ForedraftError, match="unknown option 'ttt_step'; did you mean 'ttt_steps'"):
            auto_draft(tmp_path, ttt_step=5)
        with pytest.raises(ForedraftError, match="made by algorithm 'eagle3', asked for 'dflash'"):
            auto_draft(tmp_path, "dflash")

    def test_changed_options_are_saved(self, tmp_path: Path) -> None:
        """Trained on with smaller blocks, a draft says so to us and to engines; the config it came from is left alone."""
        draft = tiny_draft(tiny_target(), "dflash", block_size=8, num_layers=2)
        save_draft(draft, tmp_path)
        for changed in (auto_draft(tmp_path, block_size=4), auto_draft(draft.config, block_size=4)):
            written = changed.config.to_dict()
            assert (written["block_size"], written["foredraft"]["options"]["block_size"]) == (4, 4)
        assert (draft.config.block_size, draft.config.foredraft["options"]["block_size"]) == (8, 8)


class TestOnDisk:
    def written(self, path: Path, target: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        save_draft(tiny_draft(tiny_target(**target or {}), **options), path)
        return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")

    def test_config(self, tmp_path: Path) -> None:
        config, _ = self.written(tmp_path / "draft", draft_vocab_size=20)
        expected = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,  # the draft's, not the target's 8
            "num_aux_hidden_states": 3,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],  # vLLM: indices of hidden_states
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},  # SGLang: layer outputs from 0
            "vocab_size": 50,
            "draft_vocab_size": 20,
            "target_hidden_size": 32,
            "tie_word_embeddings": False,
            "fc_norm": False,
            "norm_output": False,
            "attention_bias": False,
        }
        assert {key: config[key] for key in expected} == expected
        made = config["foredraft"]
        assert (made["algorithm"], made["adapter"]) == ("eagle3", "llama")
        assert made["options"]["ttt_steps"] == 7
        assert made["versions"].keys() == {"foredraft", "torch", "transformers"}
        target = {key: made["target"][key] for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")}
        assert target == {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 32, "vocab_size": 50}


class TestDamaged:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        return save_draft(tiny_draft(tiny_target(), draft_vocab_size=20), tmp_path / "draft")

    def test_all_that_does_not_fit_in_one_error(self, saved: Path) -> None:
        tensors = load_file(saved / "model.safetensors")
        del tensors["d2t"], tensors["layers.0.hidden_norm.weight"]
        tensors["model.fc.weight"] = tensors.pop("fc.weight")
        tensors["extra.bias"] = torch.zeros(2)
        tensors["norm.weight"] = torch.ones(7)
        tensors["lm_head.weight"] = torch.ones(50, 32)
        save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ForedraftError) as raised:
            auto_draft(saved)
        assert str(raised.value) == (
            f"the weights in '{saved}' do not fit its config.json:\n"
            "  missing: d2t, fc.weight, layers.0.hidden_norm.weight\n"
            "  unexpected: extra.bias, model.fc.weight\n"
            "  mis-shaped (in the file, expected): lm_head.weight (50, 32), (20, 32), norm.weight (7,), (32,)"
        )

    @pytest.mark.parametrize("keep", [0, 4, 300, -1])
    def test_cut_off_weights(self, saved: Path, keep: int) -> None:
        file = saved / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ForedraftError, match=r"model.safetensors' is damaged \(cut off while it was written or copied\?\)"):
            auto_draft(saved)

    def test_no_weights(self, saved: Path) -> None:
        (saved / "model.safetensors").unlink()
        with pytest.raises(ForedraftError, match=r"holds no model.safetensors"):
            auto_draft(saved)

    @pytest.mark.parametrize(
        ("content", "error"),
        [('{"model_type": ', "config.json' is no JSON"), ("[1]", "config.json' holds list, expected an object"), ("", "is no JSON")],
    )
    def test_bad_config(self, saved: Path, content: str, error: str) -> None:
        (saved / "config.json").write_text(content)
        for read in (auto_draft, read_config):
            with pytest.raises(ForedraftError, match=error):
                read(saved)

    def test_no_config(self, saved: Path) -> None:
        (saved / "config.json").unlink()
        with pytest.raises(ForedraftError, match="no target or draft at"):
            auto_draft(saved)
        with pytest.raises(ForedraftError, match=r"holds no config.json"):
            read_config(saved)


# A process that may write files of 20 kB at most; the draft's weights need more.
FULL_DISK = """
import resource, sys
sys.path.insert(0, {tests!r})
from tiny import tiny_draft, tiny_target
from foredraft import ForedraftError
from foredraft.files.ours import record, save_draft, write_text
draft = tiny_draft(tiny_target(), seed=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
for attempt in (
    lambda: save_draft(draft, {path!r}),
    lambda: write_text({path!r} + "/config.json", "x" * 50_000),
    lambda: record({path!r}, dict(prompts="x" * 50_000)),
    lambda: save_draft(draft, {path!r} + "-new"),
):
    try:
        attempt()
    except ForedraftError as error:
        print(error)
    else:
        raise SystemExit("it could be written after all")
"""


def write_and_die(place: Path, files: dict[str, str], operations: int) -> NoReturn:
    """In a process of its own: `files` replace what is in `place`, until so many operations on files are done."""
    left = [operations]

    def count(event: str, arguments: Any) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    sys.addaudithook(count)
    with replacing(place) as temporary:
        for name, text in files.items():
            (temporary / name).write_text(text)
    os._exit(0)


class TestWriting:
    @pytest.mark.slow
    def test_a_full_disk_leaves_what_was_there(self, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target()), tmp_path / "draft")
        before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
        program = FULL_DISK.format(tests=str(Path(__file__).parent), path=str(path))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"could not write '{path}") == 4
        assert "what was there before is untouched" in done.stdout
        assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
        assert [p.name for p in tmp_path.iterdir()] == ["draft"]

    def test_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ForedraftError, match=r"could not write '.*draft'"):
            save_draft(tiny_draft(tiny_target()), tmp_path / "file" / "draft")
        with pytest.raises(ForedraftError, match=r"could not write '.*a.json'"):
            write_text(tmp_path / "file" / "a.json", "x")
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    @pytest.mark.parametrize("there", [True, False])
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_any_failure_leaves_what_was_there(self, tmp_path: Path, error: type[BaseException], there: bool) -> None:
        if there:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "config.json").write_text("old")
        before = sorted(tmp_path.rglob("*"))

        def fail() -> None:
            with replacing(tmp_path / "a") as temporary:
                (temporary / "new").write_text("new")
                raise error

        with pytest.raises(error):
            fail()
        with pytest.raises(ForedraftError, match="untouched"), replacing(tmp_path / "a") as temporary:
            temporary.rmdir()  # it vanished meanwhile
        assert sorted(tmp_path.rglob("*")) == before

    def test_only_a_draft_is_replaced(self, tmp_path: Path) -> None:
        draft = tiny_draft(tiny_target())
        (tmp_path / "file").write_text("kept")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        os.mkfifo(tmp_path / "pipe")
        for name in ("file", "dangling", "loop", "pipe"):
            with pytest.raises(ForedraftError, match=f"{name}' is no directory: name one, new or with a draft in it"):
                save_draft(draft, tmp_path / name)
        full = save_draft(draft, tmp_path / "full")
        (full / "thesis.tex").write_text("kept")
        (full / "checkpoint-7").mkdir()
        before = {p: p.read_bytes() for p in full.rglob("*") if p.is_file()}
        with pytest.raises(ForedraftError, match=r"full' holds more than a draft: checkpoint-7, thesis.tex\n  choose another"):
            save_draft(tiny_draft(tiny_target(), seed=1), full)
        assert {p: p.read_bytes() for p in full.rglob("*") if p.is_file()} == before
        link = tmp_path / "link"
        link.symlink_to(save_draft(draft, tmp_path / "real"))
        save_draft(tiny_draft(tiny_target(), num_layers=2), link)
        assert link.is_symlink()
        assert auto_draft(tmp_path / "real").config.num_hidden_layers == 2

    def test_one_writer_at_a_time(self, tmp_path: Path) -> None:
        with replacing(tmp_path / "a") as temporary:
            (temporary / "config.json").write_text("1")
            with pytest.raises(ForedraftError, match=r"another process is writing to '.*a'"), replacing(tmp_path / "a"):
                pass
        assert [p.name for p in (tmp_path / "a").iterdir()] == ["config.json"]

    @pytest.mark.parametrize("old", [None, ("config.json", "model-00001-of-00002.safetensors", "model.safetensors")])
    def test_killed_anywhere(self, tmp_path: Path, old: tuple[str, ...] | None) -> None:
        """Before each operation on files in turn: then the old draft is there or the new one, and the next save leaves no trace."""
        new = {"config.json": "new", "model.safetensors": "new"}
        states = []
        for operations in itertools.count():
            place = tmp_path / str(operations)
            if old:
                place.mkdir()
            for name in old or ():
                (place / name).write_text("old")
            if killed := os.fork():
                status = os.waitpid(killed, 0)[1]
            else:
                write_and_die(place, new, operations)
            seen = {p.name: p.read_text() for p in place.glob("*") if p.is_file()}
            assert "config.json" not in seen or seen in (new, dict.fromkeys(old or (), "old")), "others read half of each"
            finish(place)
            after = {p.name: p.read_text() for p in place.glob("*") if p.is_file()}
            assert after in (new, dict.fromkeys(old or (), "old"))
            states.append(after == new)
            with replacing(place) as temporary:
                (temporary / "config.json").write_text("newer")
            assert [p.name for p in place.iterdir()] == ["config.json"]
            if not status:
                break
        assert states == sorted(states), "once the new one is whole, it stays"
        assert len(states) > 10

    def test_write_text(self, tmp_path: Path) -> None:
        write_text(tmp_path / "new" / "a.txt", "τ 2")
        write_text(tmp_path / "new" / "a.txt", "τ 3")
        assert {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "new").iterdir()} == {"a.txt": "τ 3"}

    def test_record(self, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target()), tmp_path / "draft")
        before = read_config(path)
        record(path, {"chat": {"tau": 2.0}})
        record(path, {"code": {"tau": 3.0}})
        record(path, {"chat": {"tau": 2.5}})
        after = read_config(path)
        assert after["foredraft"].pop("measured") == {"chat": {"tau": 2.5}, "code": {"tau": 3.0}}
        assert after == before
        assert auto_draft(path).config.foredraft["measured"]["chat"] == {"tau": 2.5}
        assert {p.name for p in path.iterdir()} == FILES


class TestDescribe:
    @pytest.mark.usefixtures("uncounted")
    def test_target(self, tmp_path: Path) -> None:
        tiny_config().save_pretrained(tmp_path)  # no weights needed
        lines = describe(str(tmp_path), draft_vocab_size=20)
        assert lines["what"] == "a target; planned: a draft by eagle3"
        assert lines["target"] == f"{tmp_path}: llama, 8 layers, hidden 32, vocabulary 50"
        assert lines["adapter"].startswith("llama: ")
        assert lines["draft"] == "1 layer(s), hidden 32, 4 heads, vocabulary 20"
        assert lines["aux layers"].startswith("[2, 4, 5]")
        assert "measured" not in lines

    def test_draft(self, tmp_path: Path) -> None:
        save_draft(tiny_draft(tiny_target(), draft_vocab_size=20, num_layers=2, ttt_steps=1), tmp_path / "draft")
        record(tmp_path / "draft", {"chat": {"tau": 2.5}})
        lines = describe(str(tmp_path / "draft"))
        assert lines["what"] == "a draft by eagle3"
        assert lines["target"] == "unnamed: llama, 8 layers, hidden 32, vocabulary 50"
        assert lines["draft"] == "2 layer(s), hidden 32, 4 heads, vocabulary 20"
        assert lines["engines know it as"] == "LlamaForCausalLMEagle3"
        assert lines["measured"] == "chat: τ 2.5"
        assert lines["training step"].startswith("about ")

    def test_memory_grows_with_the_batch(self, tmp_path: Path) -> None:
        tiny_config(hidden=1024).save_pretrained(tmp_path)
        told = [describe(str(tmp_path), "medusa", rows=rows, length=512)["training step"] for rows in (1, 64)]
        one, many = (float(text.split()[1]) for text in told)  # about .. GiB
        assert many > 2 * one, told
