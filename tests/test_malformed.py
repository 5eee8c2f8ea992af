"""Drafts of ours with a config or weights that foredraft never wrote: every reader ends in a result or a `ForedraftError`, soon."""

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_deepseek import CONFIGS
from tiny import tiny_draft, tiny_target

from foredraft import ForedraftError, auto_draft, default_registry, save_draft
from foredraft.cli import main
from foredraft.cli.common import load_draft_for
from foredraft.cli.describe import describe
from foredraft.doctor import ask_engines, examine
from foredraft.files.raw import Checkpoint
from foredraft.files.reading import read_config
from foredraft.formats import export_draft
from foredraft.formats.serving import serve_command

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
KINDS: dict[str, Callable[[], Any]] = {
    "eagle3": lambda: tiny_draft(tiny_target(), "eagle3", ttt_steps=1),
    "reduced, qk_norm": lambda: tiny_draft(tiny_target(), "eagle3", ttt_steps=1, qk_norm=True, num_layers=2, draft_vocab_size=20),
    "eagle31, yarn": lambda: tiny_draft(tiny_target(rope_parameters=YARN), "eagle31", ttt_steps=1),
    "latent": lambda: auto_draft(CONFIGS["V3, yarn"], ttt_steps=1),
    "dflash": lambda: tiny_draft(tiny_target(), "dflash", num_layers=2, block_size=4, anchors=16),
    "peagle": lambda: tiny_draft(tiny_target(), "peagle", num_layers=2, draft_vocab_size=20, num_depths=2),
    "medusa": lambda: tiny_draft(tiny_target(), "medusa"),
    "served": lambda: tiny_draft(tiny_target(), "medusa", served=True),
    "eagle": lambda: tiny_draft(tiny_target(), "eagle"),
    "mtp": lambda: tiny_draft(tiny_target(), "mtp", layers_of="llama"),
}
MISSING = object()
NESTED: Any = [{"a": [[{"b": None}]]}]
VALUES = ("x", -1, 2**24, None, 10**30, [], {}, MISSING, True, 1.5, float("nan"), NESTED, 0, "\x1b[31m\ud800", [-1], 2**40, 1e308)
ADDED: dict[str, Any] = {
    "attn_implementation": "someone/kernel",
    "_attn_implementation": "someone/kernel",
    "auto_map": {"AutoModel": "someone/code--model.Draft"},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "num_labels": 10**9,
    "to_dict": 1,
    "fusion_config": {"patch_embeddings": True},
    "torch_dtype": "save",
    "rope_scaling": {"rope_type": "nonsense"},
    "per_layer_config": {"0": {"hidden_size": 7}},
}
IGNORED = ("attn_implementation", "_attn_implementation", "auto_map", "num_labels", "to_dict", "fusion_config", "per_layer_config")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sound")
    return {kind: save_draft(make(), folder / kind) for kind, make in KINDS.items()}


def places(fields: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in an object, objects and lists included."""
    for key in fields if isinstance(fields, dict) else range(len(fields)):
        yield (*at, key)
        if isinstance(fields[key], dict | list):
            yield from places(fields[key], (*at, key))


def mutants(fields: dict[str, Any], values: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each place with `values` of the `VALUES` in turn, and each addition."""
    for number, (*way, last) in enumerate(places(fields)):
        for value in (VALUES[(number * values + i) % len(VALUES)] for i in range(values)):
            mutant = json.loads(json.dumps(fields))
            inner = mutant
            for key in way:
                inner = inner[key]
            if value is MISSING:
                del inner[last]
            else:
                inner[last] = value
            yield f"{'.'.join(map(str, (*way, last)))}={'missing' if value is MISSING else repr(value)}", mutant
    for key, value in ADDED.items():
        yield f"{key}={value!r}", {**fields, key: value}


def read_all_ways(path: Path, model: Any, out: Path) -> dict[str, bool]:
    """Whether each reader took it; raises what is no `ForedraftError`."""
    shutil.rmtree(out, ignore_errors=True)
    readers: dict[str, Callable[[], Any]] = {
        "info": lambda: describe(str(path), length=64),
        "export": lambda: export_draft(path, out, "speculators"),
        "eval": lambda: load_draft_for(path, model),
        "config": lambda: auto_draft(read_config(path)),
        "serve": lambda: [serve_command(default_registry().engine(name)(), path, "some/target") for name in ("vllm", "sglang")],
        "doctor": lambda: (examine(path), ask_engines(Checkpoint.open(path), default_registry().engines().values(), asked=True)),
    }
    took = {}
    for name, read in readers.items():
        try:
            read()
            took[name] = True
        except ForedraftError:
            took[name] = False
    return took


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_field(drafts: dict[str, Path], kind: str, every: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Over all kinds many mutants, or a part of them, another one of each kind; no code is fetched, and memory does not grow.

    Of all of them the training step is counted, too.
    """
    if every > 1:
        request.getfixturevalue("uncounted")
    sound = json.loads((drafts[kind] / "config.json").read_text())
    model, place = tiny_target(), tmp_path / "mutant"
    shutil.copytree(drafts[kind], place)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_all_ways(place, model, tmp_path / "out")["info"]
    for name, mutant in islice(mutants(sound, values=1), list(KINDS).index(kind) % every, None, every):
        (place / "config.json").write_text(json.dumps(mutant))
        try:
            took = read_all_ways(place, model, tmp_path / "out")
        except Exception as error:
            raise AssertionError(f"{kind} with {name}: {type(error).__name__}: {error}") from error
        assert took["info"] or name.partition("=")[0] not in IGNORED, f"{name} is not read"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"


@pytest.mark.parametrize("damage", ["d2t too high", "d2t negative", "d2t falling", "d2t float", "d2t short", "integers", "garbage", "pipe"])
def test_weights(drafts: dict[str, Path], damage: str, tmp_path: Path) -> None:
    """What is loaded from a file of another make, all readers refuse."""
    shutil.copytree(drafts["peagle"], tmp_path / "mutant")
    file = tmp_path / "mutant" / "model.safetensors"
    tensors = load_file(file)
    d2t = tensors["d2t"]
    tensors["d2t"] = {
        "d2t too high": d2t + 31,
        "d2t negative": d2t - 1,
        "d2t falling": d2t.flip(0) - 5,
        "d2t float": d2t.float(),
        "d2t short": d2t[:-1],
    }.get(damage, d2t)
    if damage == "integers":
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "garbage":
        file.write_bytes(os.urandom(5000))
    elif damage == "pipe":
        file.unlink()
        os.mkfifo(file)
    took = read_all_ways(tmp_path / "mutant", tiny_target(), tmp_path / "out")
    assert not any(took[name] for name in ("info", "export", "eval"))


@pytest.mark.parametrize("what", ["pipe", "zero", "directory", "loop", "large", "deep", "digits", "latin-1"])
def test_what_is_no_config(drafts: dict[str, Path], what: str, tmp_path: Path) -> None:
    """Nobody waits for a pipe, or reads without an end."""
    shutil.copytree(drafts["eagle3"], tmp_path / "mutant")
    file = tmp_path / "mutant" / "config.json"
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    elif what == "zero":
        file.symlink_to("/dev/zero")
    elif what == "directory":
        file.mkdir()
    elif what == "loop":
        file.symlink_to(file)
    elif what == "large":
        with file.open("wb") as out:
            out.truncate(65 * 2**20)
    else:
        file.write_bytes({"deep": b"[" * 100_000, "digits": b'{"a": ' + b"9" * 5000 + b"}", "latin-1": b'{"a": "\xe9"}'}[what])
    for read in (describe, auto_draft, read_config):
        with pytest.raises(ForedraftError, match="mutant"):
            read(str(file.parent))
    assert any(f.severity == "error" for f in examine(file.parent))
    with pytest.raises(ForedraftError):
        serve_command(default_registry().engine("vllm")(), file.parent, "some/target")


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_a_terminal_obeys_no_name(
    drafts: dict[str, Path], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of tensors, of the target: escapes, turned text and lone surrogates are spelt out, markup is text."""
    shutil.copytree(drafts["eagle3"], tmp_path / "mutant")
    file = tmp_path / "mutant" / "config.json"
    fields = json.loads(file.read_text())
    fields["foredraft"]["target"]["name"] = "\x1b[31m\u202e\ud800\x9b[/red]"
    file.write_text(json.dumps(fields))
    ways = [lambda: None, lambda: save_file({**load_file(weights), "\x1b]0;title\x07[/bold]": torch.zeros(1)}, weights, {"format": "pt"})]
    weights = tmp_path / "mutant" / "model.safetensors"
    for change in ways:
        change()
        monkeypatch.setattr(sys, "argv", ["foredraft", command, str(tmp_path / "mutant")])
        with pytest.raises(SystemExit):
            main()
        out = "".join(capsys.readouterr())
        assert not {"\x1b", "\x07", "\u202e", "\ud800", "\x9b"} & set(out)
    assert "\\x1b]0;title\\x07" in out.replace("\n", "") or command == "doctor"
