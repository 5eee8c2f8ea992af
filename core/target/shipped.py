"""What a target's checkpoint holds beside the model that transformers makes of it: multi-token heads, which it drops on loading."""

from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..files.reading import read_json

INDEX = "model.safetensors.index.json"


def tensor_files(model: PreTrainedModel) -> dict[str, Path]:
    """The file of each tensor in the directory, or in the hub's cache, that a target was loaded from; empty where there is none."""
    name = model.config.name_or_path
    cached = None if not name or Path(name).is_dir() else _cached(name, getattr(model.config, "_commit_hash", None))
    directory = Path(cached).parent if cached else Path(name or "/nowhere")
    if (directory / INDEX).exists():
        named = read_json(directory / INDEX).get("weight_map", {})
        return {tensor: directory / file for tensor, file in named.items() if (directory / file).exists()}
    found: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with suppress(SafetensorError, OSError), safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _cached(name: str, commit: str | None) -> str | None:
    with suppress(ValueError):  # a name that no repository has
        found = try_to_load_from_cache(name, "config.json", revision=commit)
        return found if isinstance(found, str) else None
    return None
