"""Drafts on the hub, of which there is none here: its cache is laid out by hand, or `snapshot_download` is a stand-in."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants, errors
from test_cli import Command
from test_cli import command as command
from tiny import TOKENS, tiny_draft, tiny_target, tiny_tokenizer

from foredraft import ForedraftError, auto_draft, save_draft
from foredraft.decoding import DraftingStats
from foredraft.files.hub import find_draft
from foredraft.files.ours import record

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


@pytest.mark.usefixtures("uncounted")
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
        (("serve-command", "org/draft", *target, "--revision", "v1", "--trust-remote-code"), "--revision v1 --trust-remote-code"),
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


class TestPublished:
    """What lies beside a draft's weights, and what is uploaded."""

    @pytest.fixture
    def saved(self, work: Path, tmp_path: Path) -> Path:
        draft = tiny_draft(tiny_target(vocab=TOKENS), ttt_steps=2)  # fresh: once read, its settings are in another order
        draft.config.foredraft["target"]["name"] = "org/model"
        draft.config.foredraft["data"] = {"sources": ["chat.jsonl", "org/talks"], "packed": "12 conversations in 3 rows"}
        return save_draft(draft, tmp_path / "draft")

    def test_a_card_tells_where_it_comes_from_and_how_it_is_served(self, saved: Path) -> None:
        text = ModelCard.load(saved / "README.md")
        head = text.data.to_dict()
        assert (head["base_model"], head["library_name"], head["datasets"]) == ("org/model", "foredraft", ["org/talks"])
        assert "eagle3" in head["tags"]
        for part in ("org/model (llama, 8 layers", "ttt_steps=2", "chat.jsonl, org/talks: 12 conversations in 3 rows", "Not measured yet"):
            assert part in text.text
        for part in (
            'vllm serve org/model --speculative-config \'{"model": "DRAFT"',
            "sglang",
            'custom_generate="DRAFT"',
            "Not stated yet",
        ):
            assert part in text.text

    def test_measuring_renews_it_and_what_people_wrote_stays(self, saved: Path) -> None:
        record(saved, {"chat": {"tau": 2.5, "num_draft_tokens": 4}})
        card = saved / "README.md"
        assert "chat: τ 2.5 tokens per pass of the target (num_draft_tokens=4)" in card.read_text()
        save_draft(auto_draft(saved), saved)
        assert "τ 2.5" in card.read_text()
        card.write_text("our own words")
        record(saved, {"chat": {"tau": 3.5}})
        save_draft(auto_draft(saved), saved)
        assert card.read_text() == "our own words"

    @pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
    def test_transformers_decodes_with_it(self, work: Path, tmp_path: Path, algorithm: str) -> None:
        """`custom_generate` names the directory; the text is plain generate's."""
        model, ids = tiny_target(vocab=TOKENS), torch.tensor([[5, 6, 7]])
        draft = save_draft(tiny_draft(model, algorithm), tmp_path / algorithm)
        stats, settings = DraftingStats(), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        drafted = model.generate(ids, custom_generate=str(draft), trust_remote_code=True, num_draft_tokens=3, stats=stats, **settings)
        assert drafted.tolist() == model.generate(ids, **settings).tolist()
        assert stats.passes > 0
        inside = model.generate(inputs=ids, custom_generate=str(draft), trust_remote_code=True, draft=draft, **settings)
        assert inside.tolist() == drafted.tolist()
        with pytest.raises(ForedraftError, match=r"no `assistant_model`: use foredraft.generate\(target, draft, ids\)"):
            model.generate(ids, assistant_model=auto_draft(draft), **settings)

    @pytest.mark.parametrize("card", [False, True], ids=["none there", "a card there"])
    def test_pushed(self, saved: Path, monkeypatch: pytest.MonkeyPatch, card: bool) -> None:
        """With its card, unless the repository has one. A stand-in takes the place of the hub."""
        seen: dict[str, Any] = {}

        class Api:
            def __init__(self, token: str) -> None:
                seen["token"] = token

            def create_repo(self, repo_id: str, **_: Any) -> Any:
                return SimpleNamespace(repo_id=f"me/{repo_id}")

            def file_exists(self, repo_id: str, name: str, revision: str | None) -> bool:
                return card

            def upload_folder(self, folder_path: Path, **given: Any) -> str:
                names = {str(file.relative_to(folder_path)) for file in folder_path.rglob("*") if file.is_file()}
                seen.update(given, names=names - set(given["ignore_patterns"]))
                return "address"

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        assert auto_draft(saved).push_to_hub("draft", token="t", revision="v1") == "address"
        expected = {"config.json", "model.safetensors", "custom_generate/generate.py"} | (set() if card else {"README.md"})
        assert seen["names"] == expected
        assert (seen["repo_id"], seen["revision"], seen["token"]) == ("me/draft", "v1", "t")
