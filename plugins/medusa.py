"""Medusa: one small head per position to draft, all reading the target's features at once. arXiv:2401.10774."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from foredraft import AlgorithmBase, DraftSpec, hookimpl
from foredraft.contracts import DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Choose, Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.options import Frozen
from foredraft.data import reachable
from foredraft.decoding import choose_in_turn
from foredraft.draft import Bare, Fused
from foredraft.loss import Loss, Minimising, Teacher, chunked, step_weights


class ResidualHead(nn.Module):
    """x + SiLU(W x + b), with W = 0 and b = 0 at first: a fresh head is the identity (section 2.1.1)."""

    def __init__(self, width: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D]."""
        return x_ND + F.silu(F.linear(x_ND, self.weight, self.bias))


class ServedHead(nn.Module):
    """Several of them, with biases as in the paper's code, under the names that engines know."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.layers = nn.Sequential(*(ResidualHead(width, bias=True) for _ in range(blocks)))

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D]."""
        return self.layers(x_ND)


class MedusaOptions(Frozen):
    """Options of Medusa."""

    num_heads: int = Field(4, ge=1, le=512, description="positions drafted, a head each")
    num_aux: int = Field(3, ge=1, le=512, description="target layers whose hidden states the draft reads")
    served: bool = Field(False, description="in the form that vLLM serves: heads on the target's final state (num_aux does not count)")
    num_blocks: int = Field(1, ge=1, le=512, description="residual blocks of a head; more than one where it is served")
    head_decay: float = Field(0.8, gt=0, le=1, description="weight of each head relative to the one before (the paper's λ_k)")
    loss: Loss = Field("ce", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


class Medusa(AlgorithmBase[MedusaOptions], Minimising):
    """Head k at slot t reads the target's features after x_t and predicts x_{t+2+k}; no head sees what another one drafted.

    Where the paper's heads read the target's last hidden state and own a vocabulary head each, these read fused aux states and share one;
    with `served` they read the state after the target's final norm, and share one head that starts as the target's: the form engines run.
    """

    name = "medusa"
    summary = "one head per drafted position on the target's features; no attention"

    Options = MedusaOptions

    told_by = frozenset({"blocks.0.layers.0.weight"})

    @property
    def spec(self) -> DraftSpec:
        """No decoder layer at all."""
        if self.options.served:
            return DraftSpec(num_layers=0, num_aux=1, final=True, architecture="MedusaModel")
        return DraftSpec(num_layers=0, num_aux=self.options.num_aux, architecture="MedusaDraftModel")

    @property
    def wiring(self) -> Fused | Bare:
        """The aux states through fc, where the heads stand on several."""
        return Bare() if self.options.served else Fused()

    @property
    def max_tokens(self) -> int:
        """One per head."""
        return self.options.num_heads

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """The heads."""
        o, width = self.options, draft.config.hidden_size
        if o.served:
            return {"blocks": nn.ModuleList(ServedHead(width, o.num_blocks) for _ in range(o.num_heads))}
        return {"heads": nn.ModuleList(ResidualHead(width) for _ in range(o.num_heads))}

    def heads(self, draft: Any) -> nn.ModuleList:
        """Those of a draft."""
        return draft.blocks if self.options.served else draft.heads

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """Per head k, `queries[k]` [N_k] in the flattened [B·S]: those with x_{t+1} .. x_{t+2+k} in one span of x_t's document."""
        masks = [reachable(batch["spans"], batch["documents"], k) for k in range(self.options.num_heads)]
        slots = [mask_BS.flatten().nonzero()[:, 0] for mask_BS in masks]
        return Plan.taught(slots, [s + 1 + k for k, s in enumerate(slots)])

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """Σ λ_k L_k / Σ λ_k, L_k the mean objective of head k (equation 1)."""
        heads = self.heads(draft)
        features_ND = draft.project_hidden_states(signal.aux_BSA).flatten(0, 1)
        shares = step_weights(len(heads), self.options.head_decay)
        return chunked(
            draft,
            (head(features_ND[slots]) for head, slots in zip(heads, batch["queries"], strict=True)),
            Teacher.of(signal, batch["teacher_rows"], batch["input_ids"]),
            batch["teachers"],
            [share / count.clamp(min=1) for share, count in zip(shares, batch["counts"], strict=True)],
            self.objective,
            batch["pairs"],
        )

    def drafter(self, draft: Any) -> "MedusaDrafter":
        """Drafts a token per head, all from the newest features."""
        return MedusaDrafter(draft)


class MedusaDrafter:
    """Keeps nothing: the newest features say it all."""

    def __init__(self, draft: Any):
        self.draft, self.heads = draft, draft.algorithm.heads(draft)

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; never more tokens than there are heads."""
        features_1D = self.draft.project_hidden_states(aux_1NA[:, -1])
        return choose_in_turn((self.draft.compute_logits(head(features_1D))[0] for head in self.heads[:limit]), choose)


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [Medusa]
