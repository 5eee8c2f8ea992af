"""Drafting without weights: the text's last tokens over again."""

from typing import Any

from pydantic import Field
from torch import Tensor

from foredraft import hookimpl
from foredraft.contracts import Choose, DrafterBase, Frozen


class Echo(DrafterBase):
    name = "proof_echo"
    summary = "drafts the newest tokens once more"

    class Options(Frozen):
        """Options of the algorithm."""

        width: int = Field(3, ge=1, description="tokens repeated")

    def drafter(self, draft: Any) -> "Echo":
        return self

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        return ids[-min(self.options.width, limit) :].tolist(), []


@hookimpl
def foredraft_algorithms() -> list[type]:
    return [Echo]
