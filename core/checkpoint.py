"""Drafts on disk: the engine-native format, written atomically and loaded strictly."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from .card import accompany, renew_card
from .errors import ForedraftError
from .protocols import AlgorithmBase
from .registry import Registry
from .writing import finish, replacing, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from .draft import BaseDraft

WEIGHTS = "model.safetensors"


def save_draft(draft: "BaseDraft", path: str | Path, state_dict: "Mapping[str, Tensor] | None" = None) -> Path:
    """Write the draft to the directory `path`, all or nothing: a draft that is there stays until the new one is complete.

    `state_dict` is written in place of its own tensors, which then need no storage. Raises `ForedraftError` if it cannot be
    written (disk full, say), or if more than a draft is there.
    """
    tensors = state_dict or dict(draft.named_parameters())
    if broken := [name for name, p in tensors.items() if not bool(p.isfinite().all())]:
        raise ForedraftError(f"not written to '{path}': {', '.join(broken)} hold values that are not finite")
    with replacing(path) as temporary:
        draft.save_pretrained(temporary, state_dict=state_dict)
        accompany(draft.config.to_dict(), temporary, Path(path))
        (temporary / WEIGHTS).chmod(0o644)  # safetensors makes it private to the user; servers often run as another
    return Path(path)


def read_config(path: str | Path) -> dict[str, Any]:
    """The `config.json` of a directory as a dict. Raises `ForedraftError` if it is missing or no JSON object."""
    finish(path)
    file = Path(path) / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ForedraftError(f"'{path}' holds no config.json: it is no draft (and no target) directory") from None
    except OSError as error:
        raise ForedraftError(f"'{file}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ForedraftError(f"'{file}' is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ForedraftError(f"'{file}' holds {type(fields).__name__}, expected an object")
    return fields


def load_draft(path: str | Path, registry: Registry, algorithm: AlgorithmBase) -> "BaseDraft":
    """A draft of ours from its directory; every tensor must be there, in shape, and no other.

    Raises `ForedraftError` with the lists of missing, unexpected and
    mis-shaped tensors, or the reason why the file cannot be read.
    """
    check_weights(Path(path))
    cls = registry.adapter(read_config(path)["foredraft"]["adapter"])
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong is told once, below
    try:
        with warnings.catch_warnings():  # engines on transformers 4 read rope_scaling; newer versions call it deprecated
            warnings.filterwarnings("ignore", message=".*rope_scaling.*", category=FutureWarning)
            draft, info = cls.from_pretrained(str(path), algorithm, output_loading_info=True, ignore_mismatched_sizes=True)
    finally:
        logging.set_verbosity(verbosity)
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mis-shaped (in the file, expected)": [f"{name} {tuple(a)}, {tuple(b)}" for name, a, b in sorted(info["mismatched_keys"])],
    }
    if any(problems.values()):
        lists = "\n".join(f"  {kind}: {', '.join(names)}" for kind, names in problems.items() if names)
        raise ForedraftError(f"the weights in '{path}' do not fit its config.json:\n{lists}")
    draft.embed_tokens.requires_grad_(False)  # from_pretrained makes every parameter trainable
    if draft.config.spec.target_head:
        draft.lm_head.requires_grad_(False)
        draft.complete = False
    return draft.eval()


def check_weights(directory: Path) -> None:
    """Raises `ForedraftError` unless the weights are there and whole (truncated files are named)."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ForedraftError(f"'{directory}' holds no {WEIGHTS}")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ForedraftError(f"'{file}' is damaged (cut off while it was written or copied?): {error}") from error


def record(path: str | Path, measured: Mapping[str, Any]) -> None:
    """Note measured figures in the `foredraft` entry of a draft's config.json, atomically, and in its card."""
    before, fields = read_config(path), read_config(path)
    fields["foredraft"]["measured"] = {**fields["foredraft"].get("measured", {}), **measured}
    write_text(Path(path) / "config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
    renew_card(fields, Path(path), before)
