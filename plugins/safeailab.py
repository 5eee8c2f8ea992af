"""EAGLE-3 drafts by SafeAILab/EAGLE and SpecForge."""

from collections.abc import Collection
from typing import Any

from foredraft import ForedraftError, FormatBase, hookimpl
from foredraft.contracts import Config


class SafeAILab(FormatBase):
    """The one layer has a name of its own. `norm_output` says that the head sees the normed state; what is fed back never is normed."""

    name = "safeailab"
    summary = "EAGLE-3 drafts by SafeAILab/EAGLE and SpecForge"
    sign = "names that begin with 'midlayer.'"
    priority = 0

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """By the layer."""
        return any(name.startswith("midlayer.") for name in names)

    def rename(self, name: str) -> str:
        """The layer is the first."""
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    def flatten(self, config: Config) -> dict[str, Any]:
        """Without a flag that is always true here, and means something else elsewhere."""
        if config.get("norm_output") is False:
            raise ForedraftError("norm_output=false: this draft's head reads the state before the norm; ours reads it after")
        return {name: value for name, value in config.items() if name != "norm_output" or value is not True}

    def notes(self, config: Config) -> list[str]:
        """How the flag is read."""
        text = "norm_output here means a norm before the head, as every draft has; the state fed back is not normed"
        return [text] if config.get("norm_output") else []


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [SafeAILab]
