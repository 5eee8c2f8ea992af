"""Drafts on the hub, of which there is none here: its cache is laid out by hand, or `snapshot_download` is a stand-in."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from test_cli import Command
from test_cli import command as command
from tiny import TOKENS, tiny_draft, tiny_target, tiny_tokenizer

from foredraft import ForedraftError, auto_draft, save_draft
from foredraft.hub import find_draft

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and a hub's cache that holds a draft for it and a target's config."""
    folder = tmp_path_factory.mktemp("hub")
    model = tiny_target(vocab=TOKENS, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "why?"}) + "\n")
    save_draft(tiny_draft(model, ttt_steps=2), folder / "run" / "draft")
    for name, source in (("draft", folder / "run" / "draft"), ("target", folder / "target")):
        snapshot = folder / "cache" / f"models--org--{name}" / "snapshots" / HASH
        shutil.copytree(source, snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text(HASH)
    return folder


@pytest.fixture
def cached(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Offline, with that cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(work / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(work)
    return work


def test_drafts_in_the_cache(command: Command, cached: Path) -> None:
    """Wherever a draft is named, an id does."""
    draft = auto_draft("org/draft")
    assert torch.equal(draft.fc.weight, auto_draft(cached / "run" / "draft").fc.weight)
    target = ("--target", cached / "target")
    for arguments, expected in (
        (("info", "org/draft"), "a draft by eagle3"),
        (("generate", "why?", *target, "--draft", "org/draft", "--max-new-tokens", 4), "τ"),
        (("eval", *target, "--draft", "org/draft", "--prompts", cached / "prompts.jsonl", "--max-new-tokens", 4), "1/1"),
        (("doctor", "org/draft", *target, "--no-measure"), "0 errors"),
        (("serve-command", "org/draft", *target), '"model": "org/draft"'),
        (("export", "org/draft", cached / "exported", "--format", "speculators"), "exported"),
    ):
        code, out, err = command(*arguments)
        assert code == 0, f"{arguments}: {out}{err}"
        assert expected in out, arguments
    assert "--record: 'org/draft' is on the hub" in command.fails(
        "eval", *target, "--draft", "org/draft", "--prompts", cached / "prompts.jsonl", "--record"
    )


def test_directories_come_first(cached: Path) -> None:
    """One named like an id is not asked of the hub; that of a run holds its draft in `draft/`."""
    assert find_draft("run/draft") == Path("run/draft")
    assert find_draft("run") == Path("run/draft")
    assert auto_draft("run").config.draft_vocab_size == TOKENS


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError, "no such directory, and no such repository on the hub: check the name, or `hf auth login`"),
        (errors.GatedRepoError, "its owner grants access: ask for it on its page, then `hf auth login`"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached: go online"),
        (errors.OfflineModeIsEnabled, "the hub cannot be reached: go online"),
        (errors.HfHubHTTPError, "the hub says: words"),
    ],
)
def test_what_the_hub_says_is_told_in_a_line(
    command: Command, work: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        response = SimpleNamespace(headers={}, request=None, status_code=404)
        raise error("words\nmore words", **({"response": response} if issubclass(error, errors.HfHubHTTPError) else {}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for arguments in (("info", "org/x"), ("generate", "hi", "--target", work / "target", "--draft", "org/x"), ("doctor", "org/x")):
        told = command.fails(*arguments)
        assert message in told
        assert "\n" not in told
    with pytest.raises(ForedraftError, match="no target or draft at 'org/x'"):
        auto_draft("org/x")
