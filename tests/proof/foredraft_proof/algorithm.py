"""K layers of their own, one per drafted token, as in DeepSeek-V3's multi-token prediction (arXiv:2412.19437, section 2.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor

from foredraft import AlgorithmBase, DraftSpec, Signal, hookimpl
from foredraft.contracts import Batch, Choose, DraftModel, Frozen, Layout, Plan, Step
from foredraft.data import reachable
from foredraft.draft import Fused
from foredraft.draft.attention import Causal, DecodingCache, take_rows
from foredraft.loss import Loss, Teacher, chunked, objective, step_weights


@dataclass(frozen=True)
class OneLayerPerStep(Fused):
    """Every layer reads the embedding beside the state of the layer before it, each under its own norm; a call runs one layer."""

    def _layers(self, draft: Any) -> list[Any]:
        width = draft.config.hidden_size
        layers = [draft.make_layer(k, 2 * width) for k in range(draft.config.num_hidden_layers)]
        for layer in layers:
            layer.hidden_norm = draft.make_norm(width)
        return layers

    def backbone(self, draft: Any, embeds_BQD: Tensor, context_BSD: Tensor, layout: Layout, cache: Any) -> Tensor:
        layer, rotary = draft.layers[layout.step], draft.rotary(embeds_BQD, layout.positions)
        x_BQX = torch.cat([layer.input_layernorm(embeds_BQD), layer.hidden_norm(context_BSD)], dim=-1)
        return layer.attend(take_rows(context_BSD, layout.rows), x_BQX, rotary, layout.pattern, cache, layout.rows)

    def saved(self, draft: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state


class PerStep(AlgorithmBase):
    """Layer k at slot t reads the state of layer k-1 there and the embedding of x_{t+1+k}; it predicts x_{t+2+k}."""

    name = "proof_per_step"
    summary = "a layer of its own for each drafted token"
    told_by = frozenset({"fc.weight", "layers.0.hidden_norm.weight", "layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight"})

    class Options(Frozen):
        """Options of the algorithm."""

        steps: int = Field(3, ge=1, le=16, description="drafted tokens, a layer each")
        loss: Loss = Field("ce", description="objective by name, or {name: weight}")

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec(num_layers=self.options.steps, architecture="PerStepDraftModel")

    @property
    def wiring(self) -> OneLayerPerStep:
        return OneLayerPerStep()

    @property
    def max_tokens(self) -> int:
        return int(self.options.steps)

    @classmethod
    def options_from(cls, fields: Any) -> dict[str, Any]:
        return {"steps": fields["num_hidden_layers"]}

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        masks = [reachable(batch["spans"], batch["documents"], k) for k in range(self.options.steps)]
        slots = [mask_BS.flatten().nonzero()[:, 0] for mask_BS in masks]
        return Plan.taught(slots, [s + 1 + k for k, s in enumerate(slots)])

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        hidden_BSD, states = draft.project_hidden_states(signal.aux_BSA), []
        for k, slots in enumerate(batch["queries"]):
            embeds = draft.embed_input_ids(batch["input_ids"].roll(-1 - k, dims=1))
            layout = Layout(batch["positions"], Causal(batch["documents"]), step=k)
            hidden_BSD = draft.backbone(embeds, hidden_BSD, layout)
            states.append(hidden_BSD.flatten(0, 1)[slots])
        weights = [share / n.clamp(min=1) for share, n in zip(step_weights(len(states), 0.8), batch["counts"], strict=True)]
        teacher = Teacher.of(signal, batch["teacher_rows"])
        return chunked(draft, states, teacher, batch["teachers"], weights, objective(self.options.loss), batch["pairs"])

    def drafter(self, draft: Any) -> "PerStepDrafter":
        return PerStepDrafter(draft, self.options.steps)


class PerStepDrafter:
    """A cache per layer: layer k has read the slots whose x_{t+1+k} is confirmed, k fewer than the first layer."""

    def __init__(self, draft: Any, steps: int):
        self.draft, self.confirmed = draft, [0] * steps
        self.caches = [DecodingCache() for _ in range(steps)]
        self.states: list[Any] = [None] * (steps + 1)
        """What each layer reads of all slots so far: the projected features, then the states of the layer before."""

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        draft, slots = self.draft, len(ids) - 1
        self._read(0, slots - aux_1NA.shape[1], draft.project_hidden_states(aux_1NA))
        tokens: list[int] = []
        scores: list[Tensor] = []
        for k, cache in enumerate(self.caches[:limit]):
            start = self.confirmed[k]
            cache.crop(start)
            text = torch.cat([ids, ids.new_tensor(tokens)])[None, start + 1 + k : slots + 1 + k]
            layout = Layout(torch.arange(start, slots, device=ids.device)[None], Causal(), step=k)
            self._read(k + 1, start, draft.backbone(draft.embed_input_ids(text), self.states[k][:, start:], layout, cache))
            self.confirmed[k] = max(0, slots - k)
            chosen = choose(draft.compute_logits(self.states[k + 1][:, -1:])[0, 0], tokens)
            if chosen is None:
                break
            tokens.append(chosen[0])
            scores += [chosen[1]] if chosen[1] is not None else []
        return tokens, scores

    def _read(self, k: int, start: int, new_1ND: Tensor) -> None:
        known = self.states[k]
        self.states[k] = new_1ND if known is None else torch.cat([known[:, :start], new_1ND], dim=1)


@hookimpl
def foredraft_algorithms() -> list[type]:
    return [PerStep]
