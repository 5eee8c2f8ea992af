"""The MLP speculator: a running state takes in each drafted token's embedding, a small layer per token, no attention. arXiv:2404.19124."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from foredraft import AlgorithmBase, DraftSpec, hookimpl
from foredraft.contracts import Choose, DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.options import Frozen
from foredraft.data import reachable
from foredraft.decoding import Turn, choose_in_turn
from foredraft.draft import Bare
from foredraft.loss import Labels, Loss, Minimising, Teacher, chunked


class Norm(nn.Module):
    """RMS norm with a gain and a bias, ahead of GELU."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D]."""
        return F.gelu(F.rms_norm(x_ND, x_ND.shape[-1:], eps=1e-6) * self.weight + self.bias)


class MLPSpeculatorOptions(Frozen):
    """Options of the MLP speculator."""

    num_stages: int = Field(4, ge=1, le=512, description="tokens drafted at once, a stage each")
    scale_input: bool = Field(True, description="the target's state is normed, and divided by √2, first")
    loss: Loss = Field("text", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


class MLPSpeculator(AlgorithmBase[MLPSpeculatorOptions], Minimising):
    """Stage k at slot t has read the target's final state after x_t and x_{t+1} .. x_{t+1+k}, and predicts x_{t+2+k}.

    s ← GELU(norm(W_k s + w · e)), e the token's embedding. Of the authors' two forms the tied one: all stages have one table of
    embeddings, one norm and one head, all but the first one W. Their width is the target's, whose head theirs starts as.
    """

    name = "mlp_speculator"
    summary = "a running state that takes in each drafted token, no attention; no engine serves it"

    Options = MLPSpeculatorOptions

    @property
    def needs(self) -> tuple[Literal["aux", "final"], ...]:  # type: ignore[override]
        """The teacher only where the objective asks for it."""
        return ("aux", "final") if self.objective.needs_teacher else ("aux",)

    @property
    def spec(self) -> DraftSpec:
        """No decoder layer at all, on the target's final state."""
        return DraftSpec(num_layers=0, num_aux=1, final=True, architecture="MLPSpeculatorDraftModel")

    @property
    def wiring(self) -> Bare:
        """Stages read the state as it is, the head what they make of it."""
        return Bare()

    @property
    def max_tokens(self) -> int:
        """One per stage."""
        return self.options.num_stages

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """The stages, and what tokens are to them."""
        width = draft.config.hidden_size
        made: list[nn.Embedding | nn.Linear] = [
            nn.Embedding(draft.config.vocab_size, width),
            *(nn.Linear(width, width, bias=False) for _ in range(2)),
        ]
        for module in made:
            nn.init.normal_(module.weight, std=width**-0.5)
        return {"token_table": made[0], "mixers": nn.ModuleList(made[1 : 1 + min(self.options.num_stages, 2)]), "stage_norm": Norm(width)}

    def begun(self, draft: DraftModel, hidden_NT: Tensor) -> Tensor:
        """The state before the first stage [N, D]."""
        state_ND = draft.project_hidden_states(hidden_NT)
        return F.rms_norm(state_ND, state_ND.shape[-1:], eps=1e-6) / 2**0.5 if self.options.scale_input else state_ND

    def advanced(self, draft: Any, k: int, state_ND: Tensor, ids_N: Tensor) -> Tensor:
        """The state after stage k, which reads these tokens. Each of n stages keeps 0.5^(1/n) of the state's variance."""
        kept = 0.5 ** (0.5 / self.options.num_stages)
        weight = ((1 - kept**2) * state_ND.shape[-1] / 2) ** 0.5 / kept
        return draft.stage_norm(draft.mixers[min(k, 1)](state_ND) + weight * draft.token_table(ids_N))

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """Per stage k, `queries[k]` [N_k] in the flattened [B·S], and `labels[k]`, the places of x_{t+2+k}."""
        masks = [reachable(batch["spans"], batch["documents"], k) for k in range(self.options.num_stages)]
        slots = [mask_BS.flatten().nonzero()[:, 0] for mask_BS in masks]
        labels = [s + 2 + k for k, s in enumerate(slots)]
        if self.objective.needs_teacher:
            return Plan.taught(slots, [label - 1 for label in labels], labels=labels)
        nobody = torch.empty(0, dtype=torch.long)
        return Plan(torch.tensor([len(s) for s in slots]), nobody, {"queries": slots, "labels": labels})

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """Σ_k L_k, L_k the mean objective of stage k."""
        minimised, ids_BS = self.objective, batch["input_ids"]
        weights, states = [1 / count.clamp(min=1) for count in batch["counts"]], self.states(draft, batch, signal.aux_BSA)
        if not minimised.needs_teacher:
            return chunked(draft, states, Labels(ids_BS.flatten()), batch["labels"], weights, minimised)
        teacher = Teacher.of(signal, batch["teacher_rows"], ids_BS)
        return chunked(draft, states, teacher, batch["teachers"], weights, minimised, batch["pairs"])

    def states(self, draft: DraftModel, batch: Batch, aux_BSA: Tensor) -> Iterator[Tensor]:
        """After each stage, at the slots that are trained there [N_k, D]."""
        ids_N = batch["input_ids"].flatten()
        state_ND = self.begun(draft, aux_BSA).flatten(0, 1)
        for k, slots in enumerate(batch["queries"]):
            state_ND = self.advanced(draft, k, state_ND, ids_N.roll(-1 - k))
            yield state_ND[slots]

    def drafter(self, draft: Any) -> "MLPDrafter":
        """Drafts a token per stage."""
        return MLPDrafter(draft)


class MLPDrafter:
    """Keeps nothing: the newest state and the tokens behind it say it all."""

    def __init__(self, draft: Any):
        self.draft = draft

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; never more tokens than there are stages."""
        return choose_in_turn(self._turn(ids[-1:], aux_1NA[:, -1], limit), choose)

    def _turn(self, token_1: Tensor, hidden_1T: Tensor, limit: int) -> Turn:
        method = self.draft.algorithm
        state_1D = method.begun(self.draft, hidden_1T)
        for k in range(min(limit, method.options.num_stages)):
            state_1D = method.advanced(self.draft, k, state_1D, token_1)
            token_1 = token_1.new_tensor([(yield self.draft.compute_logits(state_1D)[0])])


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithm of this file."""
    return [MLPSpeculator]
