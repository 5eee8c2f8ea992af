"""Drafts on disk: the engine-native format, written atomically and loaded strictly."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from ..contracts.algorithm import AlgorithmBase
from ..contracts.draft import DraftModel
from ..errors import ForedraftError
from ..registry import Registry
from .card import accompany, renew_card
from .reading import draft_config, read_config
from .spellings import TARGET_HEAD
from .writing import replacing, write_text

WEIGHTS = "model.safetensors"


def save_draft(draft: DraftModel, path: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> Path:
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


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Config and weights of a draft in any format."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    (folder / "config.json").write_text(_json(config), encoding="utf-8")


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def load_draft(path: str | Path, registry: Registry, algorithm: AlgorithmBase) -> Any:
    """A draft of ours from its directory; every tensor must be there, in shape, and no other.

    Raises `ForedraftError` with the lists of missing, unexpected and mis-shaped tensors, or the reason why the files cannot be read.
    """
    config = draft_config(read_config(path), registry, path)
    cls = registry.adapter(config.foredraft["adapter"])
    tensors = read_weights(Path(path))
    with torch.device("meta"):
        empty = build(cls, config, algorithm, path).state_dict()
    described = sum(t.numel() for name, t in empty.items() if not (config.spec.target_head and name in TARGET_HEAD))
    if described > (held := sum(t.nbytes for t in tensors.values())):
        raise ForedraftError(f"the config.json of '{path}' describes {described} parameters, its weights are {held} bytes")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong is told once, below
    try:
        with warnings.catch_warnings():  # engines on transformers 4 read rope_scaling; newer versions call it deprecated
            warnings.filterwarnings("ignore", message=".*rope_scaling.*", category=FutureWarning)
            # From tensors, not from the directory: nothing else in it is looked at.
            arguments = {"config": config, "state_dict": tensors, "output_loading_info": True, "ignore_mismatched_sizes": True}
            draft, info = cls.from_pretrained(None, algorithm, **arguments)
    finally:
        logging.set_verbosity(verbosity)
    dtypes = [(n, t.dtype, empty[n].dtype) for n, t in tensors.items() if n in empty]
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mis-shaped (in the file, expected)": [f"{name} {tuple(a)}, {tuple(b)}" for name, a, b in sorted(info["mismatched_keys"])],
        "of another dtype (in the file, expected)": [f"{n} {a}, {b}" for n, a, b in dtypes if a.is_floating_point != b.is_floating_point],
    }
    if any(problems.values()):
        lists = "\n".join(f"  {kind}: {', '.join(names)}" for kind, names in problems.items() if names)
        raise ForedraftError(f"the weights in '{path}' do not fit its config.json:\n{lists}")
    _check_vocabulary(draft, path)
    draft.embed_tokens.requires_grad_(False)  # from_pretrained makes every parameter trainable
    if draft.config.spec.target_head:
        draft.lm_head.requires_grad_(False)
        draft.complete = False
    return draft.eval()


def build(cls: Any, config: Any, algorithm: AlgorithmBase, where: str | Path) -> Any:
    """A fresh draft of the class `cls` for a config from `where`. Raises `ForedraftError` if none can be built from it."""
    try:
        return cls(config, algorithm)
    except Exception as error:  # whatever the family's modules raise
        raise ForedraftError(f"no draft can be built from the config.json of '{where}': {str(error)[:500]}") from error


def _check_vocabulary(draft: Any, path: str | Path) -> None:
    if not draft.config.has_reduced_vocabulary:
        return
    ids_W, vocab = draft.draft_ids, draft.config.vocab_size
    if not (bool((ids_W[1:] > ids_W[:-1]).all()) and int(ids_W[0]) >= 0 and int(ids_W[-1]) < vocab):
        raise ForedraftError(
            f"d2t in '{path}' names no ascending ids below {vocab}, the target's vocabulary: the draft's words are lost\n"
            f"  `foredraft doctor {path}` says more"
        )


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a draft, in one file or several. Raises `ForedraftError` as `check_weights`."""
    check_weights(directory)
    one = directory / WEIGHTS
    tensors: dict[str, Tensor] = {}
    for file in [one] if one.exists() else sorted(directory.glob("*.safetensors")):
        try:
            tensors.update(load_file(file))
        except Exception as error:  # besides damage, whatever the library raises for dtypes that it cannot make
            raise ForedraftError(f"'{file}' could not be read: {error}") from error
    return tensors


def check_weights(directory: Path) -> None:
    """Raises `ForedraftError` unless the weights are there and whole (truncated files are named)."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ForedraftError(f"'{directory}' holds no {WEIGHTS}")
    for file in files:
        try:
            if not file.is_file():
                raise OSError("it is no regular file")
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ForedraftError(f"'{file}' is damaged (cut off while it was written or copied?): {error}") from error


def record(path: str | Path, measured: Mapping[str, Any]) -> None:
    """Note measured figures in the `foredraft` entry of a draft's config.json, atomically, and in its card."""
    before, fields = read_config(path), read_config(path)
    fields["foredraft"]["measured"] = {**fields["foredraft"].get("measured", {}), **measured}
    write_text(Path(path) / "config.json", _json(fields))
    renew_card(fields, Path(path), before)
