"""NeMo Automodel's EAGLE-3 and P-EAGLE drafts."""

from collections.abc import Collection

from foredraft import FormatBase, hookimpl
from foredraft.contracts import Config


class NeMo(FormatBase):
    """Names as of a model inside a model; what they mean is ours."""

    name = "nemo"
    summary = "EAGLE-3 and P-EAGLE drafts by NeMo Automodel"
    sign = "names that begin with 'model.'"
    priority = 0

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """By the beginning."""
        return any(name.startswith("model.") for name in names)

    def rename(self, name: str) -> str:
        """Without it."""
        return name.removeprefix("model.")


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [NeMo]
