"""DFlash2: DFlash with small convolutions over the slots of a block, and a walk through each slot's candidates. inco.ai/blog/dflash2."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foredraft import ForedraftError, hookimpl
from foredraft.contracts import DraftModel, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import Finding, error
from foredraft.decoding import BlockDrafter, Turn
from foredraft.draft import BlockAlgorithm, BlockOptions, Prefix
from foredraft.loss import rows_at_once


class Projection(nn.Module):
    """A matrix without a bias, nothing at first."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., out]."""
        return F.linear(x, self.weight)


class BlockConvolution(nn.Module):
    """Around a sublayer: what it reads, and what it puts out, becomes a sum over the slot and those right before it in its block.

    The weights of the sum are `base_kernel`'s and, for groups of features, what the slot's own input adds. At first it changes nothing.
    """

    def __init__(self, width: int, taps: int, group: int, size: int):
        super().__init__()
        if width % group:
            raise ForedraftError(f"conv_group_size={group} does not divide the draft's width of {width}")
        kernel = torch.zeros(2, taps, width)
        kernel[:, 0] = 1
        self.taps, self.group, self.size = taps, group, size
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = Projection(width, 2 * taps * width // group)

    def forward(self, y_BQD: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the sublayer reads instead of y, and what becomes of its output."""
        own = self.kernel_projection(y_BQD).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (self.base_kernel + own).unbind(-3)
        return self._sum(before, y_BQD), partial(self._sum, after)

    def _sum(self, kernel_BQOD: Tensor, z_BQD: Tensor) -> Tensor:
        blocks = z_BQD.unflatten(1, (-1, self.size))
        taps = [F.pad(blocks, (0, 0, o, 0))[:, :, : self.size].flatten(1, 2) for o in range(self.taps)]
        return sum(kernel_BQOD[..., o, :] * tap for o, tap in enumerate(taps))  # type: ignore[return-value]


class CandidateSelector(nn.Module):
    """How well a candidate follows the token before, in the light of the slot's state; nothing at first."""

    def __init__(self, vocab: int, width: int, rank: int, scale: float):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * scale)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, before_N: Tensor, read_ND: Tensor, ids_Nk: Tensor) -> Tensor:
        """[N, k]."""
        gate_Nr = self.predecessor_codebook[before_N] * self.hidden_projection(read_ND)
        return (self.successor_codebook[ids_Nk] @ gate_Nr[..., None])[..., 0]


class DFlash2Options(BlockOptions):
    """Options of DFlash2."""

    block_size: int = Field(8, ge=2, le=4096, description="slots of a block, its anchor's included: one more than it drafts")
    gamma: float | None = Field(7.0, gt=0, description="the k-th drafted token weighs exp(-(k-1)/gamma)")
    conv_kernel_size: int = Field(2, ge=1, le=64, description="slots that a convolution reads: a slot and those before it")
    conv_group_size: int = Field(16, ge=1, le=2**16, description="features that share what a slot adds to the convolution")
    selector_rank: int = Field(256, ge=1, le=2**16, description="rank of what a token says of the next one")
    selector_top_k: int = Field(16, ge=1, le=2**16, description="candidates of each slot")


class DFlash2(BlockAlgorithm[DFlash2Options]):
    """Of slot j's likeliest tokens, its candidates, one is chosen as x_{a+j} by its logit and by how it follows x_{a+j-1}.

    Two losses, of equal weight: the logits', and cross-entropy of the text's token among the candidates, where it takes the place of the
    last one if it is none of them.
    """

    name = "dflash2"
    summary = "DFlash with convolutions over a block's slots, and a selector that walks through their candidates"
    architecture = "DFlash2DraftModel"
    whole = True

    told_by = BlockAlgorithm.told_by | {"candidate_selector.predecessor_codebook", "layers.0.attention_conv.base_kernel"}

    Options = DFlash2Options

    @property
    def wiring(self) -> Prefix:
        """With a convolution around every sublayer, over the block's slots alone."""
        return Prefix(around=self._around)

    def _around(self, draft: DraftModel) -> dict[str, tuple[str, nn.Module]]:
        o = self.options
        shape = (draft.config.hidden_size, o.conv_kernel_size, o.conv_group_size, o.block_size)
        return {sublayer: (f"{sublayer}_conv", BlockConvolution(*shape)) for sublayer in ("attention", "mlp")}

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """The selector."""
        config = draft.config
        sizes = (config.vocab_size, config.hidden_size, self.options.selector_rank)
        return {"candidate_selector": CandidateSelector(*sizes, config.initializer_range)}

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What engines read, in one object; that slots see each other both ways stands beside it."""
        o = self.options
        names = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        layers = {"mask_token_id": config.mask_token_id, "target_layer_ids": [i - 1 for i in config.aux_layers]}
        return {"dflash_config": {**layers, **{n: getattr(o, n) for n in names}}, "block_size": o.block_size, "is_causal": False}

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """The logits' loss, and the selector's with the same weights; metrics are those of the selector, which serving draws from."""
        states_ND, weights = self.states(draft, batch, signal.aux_BSA).flatten(0, 1), self.shares(batch)
        step = self.supervised(draft, states_ND, batch, signal, weights)
        before_N, texts_N = self.tokens_before(batch).flatten(), self.texts(batch)
        parts = zip(batch["queries"], batch["labels"], weights, strict=True)
        found = [self._selected(draft, states_ND[q], before_N[q], texts_N[label], w) for q, label, w in parts]
        losses, sums = zip(*found, strict=True)
        correct, accepted, cross_entropy = torch.stack(sums, dim=1)
        metrics = {"count": step.metrics["count"], "correct": correct, "accepted": accepted, "cross_entropy": cross_entropy}
        return Step(step.loss + torch.stack(losses).sum(), metrics)

    def _selected(self, draft: DraftModel, states_ND: Tensor, before_N: Tensor, text_N: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The selector's loss at one drafted position, and sums [3]: the right token chosen, its probability, its cross-entropy."""
        weight_N, total, sums = weight.expand(len(states_ND)), states_ND.new_zeros((), dtype=torch.float32), states_ND.new_zeros(3).float()
        for rows in torch.arange(len(states_ND), device=states_ND.device).split(rows_at_once(draft.config.vocab_size, states_ND)) or ():
            with torch.no_grad():
                ids_Nk = draft.compute_logits(states_ND[rows]).topk(min(self.options.selector_top_k, draft.config.vocab_size)).indices
                hit_Nk = ids_Nk == text_N[rows, None]
                there_N = hit_Nk.any(-1)
                ids_Nk[:, -1] = torch.where(there_N, ids_Nk[:, -1], text_N[rows])
                at_N = torch.where(there_N, hit_Nk.long().argmax(-1), ids_Nk.shape[1] - 1)
            scores_Nk: Any = checkpoint(self._scores, draft, states_ND[rows], before_N[rows], ids_Nk, use_reentrant=False)
            cross_entropy_N = F.cross_entropy(scores_Nk.float(), at_N, reduction="none")
            total = total + (weight_N[rows] * cross_entropy_N).sum()
            with torch.no_grad():
                right_N = there_N & (scores_Nk.argmax(-1) == at_N)
                sums += torch.stack([right_N.sum(), (there_N * (-cross_entropy_N).exp()).sum(), cross_entropy_N.sum()])
        return total, sums

    def _scores(self, draft: DraftModel, states_ND: Tensor, before_N: Tensor, ids_Nk: Tensor) -> Tensor:
        """Of candidates, [N, k]: their logits, and how well they follow the tokens before."""
        read_ND = self.wiring.head_input(draft, states_ND)
        unary_Nk = (draft.lm_head.weight[ids_Nk] @ read_ND[..., None])[..., 0]
        return unary_Nk + draft.candidate_selector(before_N, read_ND, ids_Nk)

    def drafter(self, draft: Any) -> BlockDrafter:
        """Drafts a block in one forward, its tokens in turn."""
        turn = partial(self._in_turn, draft)
        return BlockDrafter(draft, self.options.block_size, whole=True, turn=turn)

    def _in_turn(self, draft: DraftModel, states_QD: Tensor, newest: int) -> Turn:
        token, read_QD = newest, self.wiring.head_input(draft, states_QD)
        for unary_W, read_D in zip(draft.compute_logits(states_QD), read_QD, strict=True):
            best_k, ids_k = unary_W.topk(min(self.options.selector_top_k, len(unary_W)))
            before_1 = torch.tensor([token], device=unary_W.device)
            scores_k = best_k + draft.candidate_selector(before_1, read_D[None], ids_k[None])[0]
            token = yield torch.full_like(unary_W, float("-inf")).scatter(0, ids_k, scores_k.to(unary_W.dtype))

    @classmethod
    def findings(cls, draft: Files) -> list[Finding]:
        """Sizes that the config states otherwise than the tensors have them."""
        if not cls.told_by <= draft.tensors.keys():
            return []
        inner = draft.config.get("dflash_config")
        fields = {**draft.config, **inner} if isinstance(inner, dict) else dict(draft.config)
        shapes = {
            "conv_kernel_size": draft.tensors["layers.0.attention_conv.base_kernel"].shape,
            "selector_rank": draft.tensors["candidate_selector.predecessor_codebook"].shape,
        }
        wrong = {n: shape[1] for n, shape in shapes.items() if len(shape) > 1 and fields.get(n) not in (None, shape[1])}
        other = [f"{n}={fields[n]}, the tensors have {size}" for n, size in wrong.items()]
        breaks = "engines make modules of another size, and refuse the file"
        return [error("dflash2-size", "; ".join(other), breaks, "write what the tensors have")] if other else []


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [DFlash2]
