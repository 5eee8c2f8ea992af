"""Drafts as engines read them: EAGLE-3 and P-EAGLE by SpecForge or for vLLM, DFlash by z-lab, SpecForge and NeMo."""

from collections.abc import Collection

from foredraft import FormatBase, hookimpl
from foredraft.contracts import Config


class Plain(FormatBase):
    """The names are ours."""

    name = "plain"
    summary = "drafts as engines read them: z-lab's, SpecForge's and NeMo's DFlash, P-EAGLE by SpecForge, EAGLE-3 for vLLM"
    sign = "fc.weight and layers.0.*"
    priority = -1

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """Whether there is what every draft reads the target's features by; its algorithm tells the rest."""
        return "fc.weight" in names


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [Plain]
