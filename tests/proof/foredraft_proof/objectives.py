"""HASS's top-k term (arXiv:2408.15766, section 3.1), and the negative logarithm of the chance of acceptance."""

import torch
from torch import Tensor

from foredraft import hookimpl
from foredraft.contracts import ObjectiveBase


class TopK(ObjectiveBase):
    name = "proof_top_k"
    summary = "cross-entropy over the teacher's ten likeliest tokens"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        p_Nk, best_Nk = p_NW.topk(min(10, p_NW.shape[-1]))
        return -(p_Nk * log_q_NW.gather(-1, best_Nk)).sum(-1)


class NegativeLogAlpha(ObjectiveBase):
    name = "proof_nla"
    summary = "-log α"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        return -torch.minimum(p_NW * mass_N[:, None], log_q_NW.exp()).sum(-1).log()


@hookimpl
def foredraft_objectives() -> list[type]:
    return [TopK, NegativeLogAlpha]
