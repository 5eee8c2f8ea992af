"""EAGLE-1 and EAGLE-2: a draft of the target's next final state, whose own head names the token. arXiv:2401.15077, 2406.16858.

On its own outputs it is HASS (arXiv:2408.15766): `ttt_steps: 3`, and a weight for `top10` in `loss`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

from foredraft import AlgorithmBase, DraftSpec, hookimpl
from foredraft.contracts import DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.options import Frozen
from foredraft.decoding import AutoregressiveDrafter
from foredraft.draft import Summed, plan_unrolled, unrolled
from foredraft.loss import Loss, Minimising, Teacher, chunked, step_weights


class EagleOptions(Frozen):
    """Options of EAGLE-1 and EAGLE-2."""

    num_layers: int = Field(1, ge=1, le=512, description="decoder layers of the draft")
    ttt_steps: int = Field(1, ge=1, le=512, description="drafting steps in training: 1 is EAGLE, more of them HASS (its paper: 3)")
    noise: float = Field(0.1, ge=0, le=1e4, description="in training the target's states are off by up to this, uniformly (0: never)")
    state_weight: float = Field(1.0, ge=0, le=1e4, description="weight of the distance to the target's next state (smooth L1)")
    loss: Loss = Field({"ce": 0.1}, description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


class Eagle(AlgorithmBase[EagleOptions], Minimising):
    """Slot t holds the target's final state after x_t and the embedding of x_{t+1}; it predicts the state after x_{t+1}, and so x_{t+2}.

    In the form that engines run: its first layer norms nothing before its attention, and no norm follows the last. Steps after the
    first (HASS) read the slot's own state of the step before, without its gradient, as EAGLE-3's do.
    """

    name = "eagle"
    summary = "autoregressive draft of the target's next state, under the target's head (EAGLE-1, EAGLE-2, HASS)"

    told_by = frozenset({"fc.weight"})  # it has nothing that the others lack

    Options = EagleOptions

    @property
    def spec(self) -> DraftSpec:
        """Ordinary layers on the target's final state, between its embedding and head."""
        return DraftSpec(num_layers=self.options.num_layers, num_aux=1, final=True, target_head=True, architecture="EagleLlamaForCausalLM")

    @property
    def wiring(self) -> Summed:
        """Embedding and state in one, by fc."""
        return Summed()

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """The slots that serving reaches, see `plan_unrolled`, and a seed of each row's noise."""
        plan = plan_unrolled(batch, self.options.ttt_steps)
        return replace(plan, added={**plan.added, "noise": [int(torch.randint(2**62, (), generator=g)) for g in generators]})

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """The objective and the distance to the target's next state, each the mean over supervised slots, and over steps."""
        states = self.states(draft, batch, signal.aux_BSA)
        taught_RT = signal.hidden_BST.flatten(0, 1)[batch["teacher_rows"]]
        weights = [share / count.clamp(min=1) for share, count in zip(step_weights(len(states), 1.0), batch["counts"], strict=True)]
        step = chunked(
            draft, states, Teacher.of(signal, batch["teacher_rows"], batch["input_ids"]), batch["teachers"], weights,
            self.objective, batch["pairs"],
        )  # fmt: skip
        away = [
            weight * F.smooth_l1_loss(state_ND.float(), taught_RT[rows].float(), reduction="none").mean(-1).sum()
            for state_ND, rows, weight in zip(states, batch["teachers"], weights, strict=True)
        ]
        return replace(step, loss=step.loss + self.options.state_weight * torch.stack(away).sum())

    def states(self, draft: DraftModel, batch: Batch, aux_BSA: Tensor) -> list[Tensor]:
        """The draft's states [N_k, D] at step k's supervised slots; of a draft that is being trained, from noisy states of the target."""
        if self.options.noise and draft.training:
            drawn = [_drawn(aux_SA, seed) for aux_SA, seed in zip(aux_BSA, batch["noise"], strict=True)]
            aux_BSA = aux_BSA + self.options.noise * (2 * torch.stack(drawn) - 1)
        made = unrolled(draft, batch, aux_BSA, self.options.ttt_steps, through_time=False)
        return [state_BQD.flatten(0, 1).index_select(0, query) for state_BQD, query in zip(made, batch["queries"], strict=True)]

    def drafter(self, draft: Any) -> AutoregressiveDrafter:
        """Drafts chains and trees, a depth per forward."""
        return AutoregressiveDrafter(draft)


def _drawn(like_SA: Tensor, seed: int) -> Tensor:
    """Of a row, whichever process trains it."""
    generator = torch.Generator(like_SA.device).manual_seed(seed)
    return torch.rand(like_SA.shape, generator=generator, device=like_SA.device, dtype=like_SA.dtype)


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [Eagle]
