"""Drafts as engines read them: EAGLE-1, EAGLE-3 and P-EAGLE by SpecForge or for vLLM, blocks by z-lab, DeepSpec, SpecForge and NeMo."""

from collections.abc import Collection

from foredraft import FormatBase, hookimpl
from foredraft.contracts import Config


class Plain(FormatBase):
    """The names are ours."""

    name = "plain"
    summary = "drafts as engines read them: DFlash and its kin by z-lab, DeepSpec, SpecForge and NeMo, EAGLE-1, 3 and P-EAGLE for engines"
    sign = "fc.weight and layers.0.*"
    priority = -1

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """Whether there is what every draft reads the target's features by; its algorithm tells the rest."""
        return "fc.weight" in names


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [Plain]
