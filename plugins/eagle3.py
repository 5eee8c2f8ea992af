"""EAGLE-3: an autoregressive draft on fused target features, trained on its own outputs (training-time test). arXiv:2503.01840."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Generator, Tensor

from foredraft import AlgorithmBase, DraftSpec, hookimpl
from foredraft.contracts import DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.options import Frozen
from foredraft.decoding import AutoregressiveDrafter
from foredraft.draft import Fused, plan_unrolled, unrolled
from foredraft.draft.config import eagle_fields
from foredraft.loss import Loss, Minimising, Teacher, chunked, step_weights


class Eagle3Options(Frozen):
    """Options of EAGLE-3."""

    ttt_steps: int = Field(7, ge=1, le=512, description="drafting steps unrolled in training (training-time test)")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of each step relative to the one before")
    num_layers: int = Field(1, ge=1, le=512, description="decoder layers of the draft")
    num_aux: int = Field(3, ge=1, le=512, description="target layers whose hidden states the draft reads")
    fc_norm: bool = Field(False, description="norm each aux chunk before fc (EAGLE-3.1)")
    norm_output: bool = Field(False, description="feed back the post-norm state (EAGLE-3.1)")
    norm_before_residual: bool = Field(False, description="the layer adds to the normed features (speculators' default)")
    qk_norm: bool = Field(False, description="norms on queries and keys: a Qwen3-shaped draft")
    loss: Loss = Field("ce", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


class Eagle3(AlgorithmBase[Eagle3Options], Minimising):
    """Slot t holds the target's features after x_t and the embedding of x_{t+1}; it predicts x_{t+2}.

    At step k the same slot reads x_{t+1+k} and its own output of step k-1, and predicts x_{t+2+k}.
    """

    name = "eagle3"
    summary = "autoregressive draft on fused target features, trained on its own outputs"

    told_by = frozenset({"fc.weight", "layers.0.hidden_norm.weight"})

    Options = Eagle3Options

    @property
    def spec(self) -> DraftSpec:
        """One layer, as a rule."""
        o = self.options
        return DraftSpec(num_layers=o.num_layers, num_aux=o.num_aux, qk_norm=o.qk_norm)

    @property
    def wiring(self) -> Fused:
        """A first layer that reads embedding and features side by side."""
        o = self.options
        return Fused(fc_norm=o.fc_norm, norm_output=o.norm_output, norm_before_residual=o.norm_before_residual)

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """The wiring's flags, and the aux layers once more, in SGLang's convention."""
        return {**self.wiring.fields, **eagle_fields(config)}

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """The slots that serving reaches, see `plan_unrolled`."""
        return plan_unrolled(batch, self.options.ttt_steps)

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """The objective at every step, Σ 0.8^k L_k / Σ 0.8^k with L_k the mean over supervised slots."""
        states = self.unroll(draft, batch, signal.aux_BSA)
        shares = step_weights(len(states), self.options.step_decay)
        return chunked(
            draft,
            (state_BQD.flatten(0, 1).index_select(0, query) for state_BQD, query in zip(states, batch["queries"], strict=True)),
            Teacher.of(signal, batch["teacher_rows"], batch["input_ids"]),
            batch["teachers"],
            [share / count.clamp(min=1) for share, count in zip(shares, batch["counts"], strict=True)],
            self.objective,
            batch["pairs"],
        )

    def unroll(self, draft: DraftModel, batch: Batch, aux_BSA: Tensor) -> list[Tensor]:
        """The draft's states at `batch["slots"]` after each step: K tensors [B, Q, D]."""
        return unrolled(draft, batch, aux_BSA, self.options.ttt_steps)

    def drafter(self, draft: Any) -> AutoregressiveDrafter:
        """Drafts chains and trees, a depth per forward."""
        return AutoregressiveDrafter(draft)


class Eagle31Options(Eagle3Options):
    """Options of EAGLE-3.1: EAGLE-3's, with other defaults."""

    fc_norm: bool = Field(True, description="norm each aux chunk before fc")
    norm_output: bool = Field(True, description="feed back the post-norm state")


class Eagle31(Eagle3):
    """EAGLE-3.1: EAGLE-3 with a norm on every aux chunk, whose post-norm state is fed back."""

    name = "eagle31"
    summary = "EAGLE-3 with normed aux states and normed feedback"

    Options = Eagle31Options


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [Eagle3, Eagle31]
