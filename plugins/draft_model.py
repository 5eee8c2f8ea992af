"""An ordinary small language model as the draft, fine-tuned on the target's text. DistillSpec, arXiv:2310.08461."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import Field
from torch import Generator, Tensor

from foredraft import AlgorithmBase, DraftSpec, ForedraftError, hookimpl
from foredraft.contracts import DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch, Layout
from foredraft.contracts.options import Frozen
from foredraft.decoding import AutoregressiveDrafter
from foredraft.draft import Alone, plan_unrolled
from foredraft.draft.attention import Causal, Unrolled, UnrolledCache
from foredraft.draft.layer import take_over
from foredraft.draft.start import layer_weights
from foredraft.loss import Loss, Minimising, Teacher, chunked
from foredraft.target.capture import decoder_layers, decoder_of
from foredraft.target.loading import load_config, load_target, load_tokenizer
from foredraft.target.weights import matrix_of

ENOUGH = 0.9
"""Share of the target's tokens that the model must know, by their text."""


class DraftModelOptions(Frozen):
    """Options of ordinary language models as drafts."""

    model: str = Field(description="the small language model: a directory, or an id on the hub")
    num_layers: int | None = Field(None, ge=1, le=512, description="its decoder layers; default, and no other: as many as it has")
    layers_of: str | None = Field(None, description="its model_type; default, and no other: its own")
    loss: Loss = Field("ce", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


class OrdinaryModel(AlgorithmBase[DraftModelOptions], Minimising):
    """Slot t reads x_0 .. x_t and nothing of the target, and predicts x_{t+1}; it is taught the target's word there.

    Its embedding and head are put in the order of the target's vocabulary once, when it is started: so it reads and names the target's ids.
    """

    name = "draft_model"
    summary = "an ordinary small language model, fine-tuned on the target's text (DistillSpec)"
    needs = ("final",)

    Options = DraftModelOptions

    @property
    def spec(self) -> DraftSpec:
        """The model's own layers."""
        o = self.options
        return DraftSpec(num_layers=o.num_layers or 1, num_aux=1, final=True, layers_of=o.layers_of, architecture="OrdinaryDraftModel")

    @property
    def wiring(self) -> Alone:
        """Layers and a norm."""
        return Alone()

    def sized_by(self, target: Any) -> Any:
        """The small model's config."""
        return load_config(self.options.model)

    def fitted(self, target: Any) -> Self:
        """With the shape that the small model has."""
        text = load_config(self.options.model).get_text_config()
        shape = {"num_layers": text.num_hidden_layers, "layers_of": text.model_type}
        return type(self)(self.options.model_copy(update=shape))

    def start(self, draft: Any, target: Any) -> list[str]:
        """The small model's weights, its rows of tokens where the target has these tokens; those it does not know get the mean row."""
        model = load_target(self.options.model, "float32")
        own_V = self._own_ids(target, draft.config.vocab_size)
        draft.embed_tokens.weight.copy_(_rows(matrix_of(model.get_input_embeddings()), own_V))
        draft.lm_head.weight.copy_(_rows(matrix_of(model.get_output_embeddings()), own_V[draft.draft_ids]))
        for mine, theirs in zip(draft.layers, decoder_layers(model), strict=True):
            take_over(mine, layer_weights(theirs, scaled=False))
        take_over(draft.norm, decoder_of(model).norm.state_dict())
        draft.config.update({"foredraft": {**draft.config.foredraft, "own_embedding": True}})
        self._check(draft, model, own_V)
        return [f"'{self.options.model}', which knows {int((own_V >= 0).sum())} of the target's {len(own_V)} ids"]

    def _own_ids(self, target: Any, size: int) -> Tensor:
        """[V] the small model's id of each of the target's, -1 where it has none. Raises `ForedraftError` where few are known."""
        theirs = load_tokenizer(target.model.config.name_or_path).get_vocab()
        own = load_tokenizer(self.options.model).get_vocab()
        found_V = torch.full((size,), -1)
        for token, at in theirs.items():
            if at < size and token in own:
                found_V[at] = own[token]
        share = float((found_V >= 0).sum()) / max(len(theirs), 1)
        if share < ENOUGH:
            raise ForedraftError(
                f"'{self.options.model}' knows {share:.0%} of the target's tokens by their text, at least {ENOUGH:.0%} are needed: "
                f"its tokenizer has {len(own)} tokens, the target's {len(theirs)}\n  Choose a model of the target's family"
            )
        return found_V

    def _check(self, draft: Any, model: Any, own_V: Tensor) -> None:
        """Raises `ForedraftError` unless the draft computes what the small model does."""
        ids_8, own_W = (own_V >= 0).nonzero()[:8, 0], own_V[draft.draft_ids]
        hidden_18D = draft.backbone(draft.embed_input_ids(ids_8[None]), None, Layout(torch.arange(len(ids_8))[None], Causal()))
        ours, theirs = draft.compute_logits(hidden_18D)[0][:, own_W >= 0], model(own_V[ids_8][None]).logits[0][:, own_W[own_W >= 0]]
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
            raise ForedraftError(f"'{self.options.model}' computes more than its layers say (multipliers, windows, caps): choose another")

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """The slots that serving reaches: the newest token is the assistant's, and so is the next."""
        return plan_unrolled(batch, 1, ahead=1)

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """The mean objective of all supervised slots, on the text as it stands."""
        slots_BQ = batch["slots"]
        pattern = Unrolled(batch["documents"], slots_BQ, draft.kernel, batch.get("segments"), draft.regions)
        layout = Layout(batch["positions"], pattern, slots_BQ)
        state_BQD = draft.backbone(draft.embed_input_ids(batch["input_ids"]), signal.aux_BSA, layout, UnrolledCache())
        states = [state_BQD.flatten(0, 1).index_select(0, query) for query in batch["queries"]]
        teacher = Teacher.of(signal, batch["teacher_rows"], batch["input_ids"])
        weights = [1 / count.clamp(min=1) for count in batch["counts"]]
        return chunked(draft, states, teacher, batch["teachers"], weights, self.objective, batch["pairs"])

    def drafter(self, draft: Any) -> AutoregressiveDrafter:
        """Drafts chains and trees, a depth per forward."""
        return OrdinaryDrafter(draft)


def _rows(table_UD: Tensor, own_V: Tensor) -> Tensor:
    """The rows of these ids, the mean of all where there is none (-1)."""
    return torch.where(own_V[:, None] >= 0, table_UD[own_V.clamp(min=0)], table_UD.mean(0))


class OrdinaryDrafter(AutoregressiveDrafter):
    """Reads the text itself, the newest token included, and no state of the target's."""

    def _confirm(self, ids: Tensor, aux_1NA: Tensor) -> Tensor:
        start, self.confirmed = self.confirmed, len(ids)
        self.cache.crop(start)
        positions = torch.arange(start, self.confirmed, device=ids.device)[None]
        embeds = self.draft.embed_input_ids(ids[None, start:])
        return self.draft.backbone(embeds, aux_1NA, Layout(positions, Causal(), 1), self.cache)


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithm of this file."""
    return [OrdinaryModel]
