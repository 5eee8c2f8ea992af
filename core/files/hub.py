"""Drafts on the Hugging Face hub: found by id wherever a draft is named. Directories come first."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ForedraftError
from .reading import read_json
from .writing import finish

ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""organisation/repository."""

DRAFT = ("*.json", "*.safetensors", "*.bin", "*.pt")
"""What a draft consists of, in our format and in others."""

TARGET = ("*.json", "*.jinja", "*.py", "*.safetensors")


def find_draft(name: str | Path, revision: str | None = None) -> Path:
    """The directory of a draft: `name` itself, its `draft/` if a run wrote it, or what the hub has (or had, offline) by this id.

    A directory that is not there is returned as it stands, for its reader to tell. Raises `ForedraftError` for ids that cannot be had.
    """
    path = Path(name)
    if not path.exists() and ID.fullmatch(str(name)):
        return download(str(name), DRAFT, "draft", revision)
    in_run = path / "draft"
    finish(in_run)
    return in_run if (in_run / "config.json").is_file() and not (path / "config.json").exists() else path


def locate(name: str | Path) -> str | Path:
    """The directory of a draft of ours, or `name` where it is something else, a target as likely as not. Raises as `find_draft`.

    Of what is on the hub only `config.json` is asked for, unless it is a draft.
    """
    if Path(name).exists():
        return find_draft(name)
    if not ID.fullmatch(str(name)):
        return name  # as it was spelt: `./nope` can be no id
    directory = download(str(name), ["config.json"], "target or draft")
    try:
        fields = read_json(directory / "config.json")
    except ForedraftError:  # whoever reads a target says what is wrong
        return name
    return find_draft(name) if "foredraft" in fields else name


def download(name: str, files: Sequence[str], what: str, revision: str | None = None) -> Path:
    """The cached directory of a repository's `files`, none in folders. Raises `ForedraftError` that says, in a line, what to do."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        why = "its owner grants access: ask for it on its page, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "no such directory, and no such repository on the hub: check the name, or `hf auth login` if it is private"
    except errors.RevisionNotFoundError:
        why = f"it has no revision '{revision}' on the hub: look at its branches and tags"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = "no such directory, and the hub cannot be reached: go online (HF_HUB_OFFLINE=0), or bring its files here from elsewhere"
    except (OSError, ValueError) as error:
        why = f"no such directory, and the hub says: {str(error).splitlines()[0][:200]}"
    raise ForedraftError(f"no {what} at '{name}': {why}")
