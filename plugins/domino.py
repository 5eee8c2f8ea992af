"""Domino: a block in one forward, corrected token by token from what a GRU has read of the block so far. arXiv:2605.29707."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from foredraft import hookimpl
from foredraft.contracts import DraftModel, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import Finding, error
from foredraft.decoding import BlockDrafter, Turn
from foredraft.draft import BlockAlgorithm, BlockOptions


class DominoOptions(BlockOptions):
    """Options of Domino."""

    anchors: int = Field(256, ge=1, description="blocks drawn per row of training data, at most")
    emb_dim: int = Field(256, ge=1, le=2**16, description="rank of the correction")
    gru_hidden_dim: int = Field(1024, ge=1, le=2**16, description="width of what has been read of the block")
    pure_draft_prefix_len: int = Field(1, ge=0, le=4096, description="drafted tokens at the start of a block that are not corrected")
    shift_label: bool = Field(True, description="the anchor's slot drafts, too; false: as in DFlash, it does not")
    base_ratio: float = Field(
        1.0, ge=0, le=1, description="share of the training over which the loss of the uncorrected logits fades, from all to nothing"
    )


class Domino(BlockAlgorithm[DominoOptions]):
    """To slot j's logits E2 SiLU(E0 [state ; what a GRU read up to the token before]) is added; tokens are chosen from left to right.

    The uncorrected logits are trained, too, at first alone: the loss is (1 - λ) corrected + λ uncorrected, λ falling from 1 to 0.
    """

    name = "domino"
    summary = "a block in one forward, its tokens corrected in turn by what a GRU read of the block"
    architecture = "DFlashDraftModel"

    told_by = BlockAlgorithm.told_by | {"prefix_gru.weight_ih_l0", "embed_proj.2.weight"}

    Options = DominoOptions

    @property
    def shift(self) -> int:
        """See `BlockAlgorithm`."""
        return int(self.options.shift_label)

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """The GRU, without biases, and the correction's two matrices."""
        o, config = self.options, draft.config
        width, heard = config.hidden_size, o.gru_hidden_dim
        into, out = nn.Linear(width + heard, o.emb_dim, bias=False), nn.Linear(o.emb_dim, config.draft_vocab_size, bias=False)
        return {"prefix_gru": nn.GRU(width, heard, bias=False, batch_first=True), "embed_proj": nn.Sequential(into, nn.SiLU(), out)}

    def rider(self, draft: DraftModel) -> nn.Linear:
        """See `AlgorithmBase.rider`."""
        return draft.embed_proj[2]

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What SGLang reads, which tells a Domino draft from a DFlash one by `projector_type`."""
        o = self.options
        own = {name: getattr(o, name) for name in ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")}
        fields = {"mask_token_id": config.mask_token_id, "target_layer_ids": [i - 1 for i in config.aux_layers]}
        return {"dflash_config": {"projector_type": "domino", **own, **fields}, "block_size": o.block_size}

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """(1 - λ) Σ w CE(corrected) / Σ w + λ Σ w CE(uncorrected) / Σ w; the metrics are those of the corrected logits."""
        states_ND = self.states(draft, batch, signal.aux_BSA).flatten(0, 1)
        tokens_NK = self.tokens_before(batch).flatten(0, 1)
        heard_NKG = draft.prefix_gru(draft.embed_input_ids(tokens_NK))[0]
        carried_Nr = self.correction(draft, self.wiring.head_input(draft, states_ND), heard_NKG.flatten(0, 1))
        corrected_K = torch.arange(self.max_tokens, device=states_ND.device) >= self.options.pure_draft_prefix_len
        carried_Nr = carried_Nr * corrected_K.repeat(len(tokens_NK))[:, None]
        progress, ratio = batch.get("progress", 1.0), self.options.base_ratio
        base = max(0.0, 1 - progress / ratio) if ratio else 0.0
        shares = self.shares(batch)
        step = self.supervised(draft, torch.cat([states_ND, carried_Nr], dim=-1), batch, signal, [(1 - base) * w for w in shares])
        if not base:
            return step
        plain = self.supervised(draft, states_ND, batch, signal, [base * w for w in shares])
        return Step(step.loss + plain.loss, step.metrics, step.acceptance)

    def correction(self, draft: DraftModel, read_ND: Tensor, heard_NG: Tensor) -> Tensor:
        """What the rider reads, [N, r]: of states behind the final norm, and of what was heard of the block up to the token before."""
        into, act, _ = draft.embed_proj
        return act(into(torch.cat([read_ND, heard_NG], dim=-1)))

    def drafter(self, draft: Any) -> BlockDrafter:
        """Drafts a block in one forward, its tokens in turn."""
        return BlockDrafter(draft, self.options.block_size, self.shift, turn=lambda states, newest: self._in_turn(draft, states, newest))

    def _in_turn(self, draft: DraftModel, states_QD: Tensor, newest: int) -> Turn:
        base_QW, read_QD = draft.compute_logits(states_QD), self.wiring.head_input(draft, states_QD)
        token, memory = newest, None
        for j, (base_W, read_D) in enumerate(zip(base_QW, read_QD, strict=True)):
            embeds_11D = draft.embed_input_ids(torch.tensor([[token]], device=base_W.device))
            _, memory = draft.prefix_gru(embeds_11D, memory)
            if j < self.options.pure_draft_prefix_len:
                token = yield base_W
            else:
                token = yield base_W + self.rider(draft)(self.correction(draft, read_D[None], memory[0]))[0]

    @classmethod
    def findings(cls, draft: Files) -> list[Finding]:
        """Sizes that the config states otherwise than the tensors have them, and an object that does not say what the draft is."""
        if not cls.told_by <= draft.tensors.keys():
            return []
        fields = draft.config.get("dflash_config")
        fields = {**draft.config, **fields} if isinstance(fields, dict) else dict(draft.config)
        shapes = {name: tuple(draft.tensors[name].shape) for name in ("embed_proj.2.weight", "prefix_gru.weight_ih_l0")}
        held = {"emb_dim": shapes["embed_proj.2.weight"][-1], "gru_hidden_dim": shapes["prefix_gru.weight_ih_l0"][0] // 3}
        found = []
        if other := [f"{n}={fields[n]}, the tensors have {size}" for n, size in held.items() if fields.get(n) not in (None, size)]:
            found.append(error("domino-size", "; ".join(other), "engines make modules of another size, and refuse the file", "write these"))
        if fields.get("projector_type") != "domino":
            text = f"projector_type={fields.get('projector_type')!r} beside the tensors of a Domino draft"
            found.append(error("domino-projector", text, "SGLang takes it for a DFlash draft and refuses its tensors", "write 'domino'"))
        return found


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [Domino]
