"""DSpark: a block in one forward, whose tokens are chosen in turn, each told the one before. github.com/deepseek-ai/DeepSpec."""

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft import DraftSpec, hookimpl
from foredraft.contracts import DraftModel, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import Finding, error
from foredraft.decoding import BlockDrafter, Turn
from foredraft.draft import BlockAlgorithm, BlockOptions
from foredraft.loss import Loss

PARTS = {"gated": "gate_proj", "rnn": "joint_proj"}
"""What a Markov head holds beside its two tables."""


class MarkovHead(nn.Module):
    """What a token says of the next one: a row of `markov_w1`, gated or through a recurrent state if asked, for the matrix `markov_w2`."""

    def __init__(self, kind: str, vocab: int, draft_vocab: int, rank: int, width: int):
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, before_N: Tensor, state_ND: Tensor, memory_Nr: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What `markov_w2` reads [N, r] at slots with these states, behind these tokens (target ids); and the memory for the next slots."""
        said_Nr = self.markov_w1(before_N)
        if self.kind == "gated":
            return self.gate_proj(torch.cat([state_ND, said_Nr], dim=-1)).sigmoid() * said_Nr, None
        if self.kind == "vanilla":
            return said_Nr, None
        memory_Nr = torch.zeros_like(said_Nr) if memory_Nr is None else memory_Nr
        gate_Nr, new_Nr, out_Nr = self.joint_proj(torch.cat([memory_Nr, said_Nr, state_ND], dim=-1)).chunk(3, dim=-1)
        return out_Nr.tanh(), new_Nr.tanh() + gate_Nr.sigmoid() * (memory_Nr - new_Nr.tanh())

    def unrolled(self, before_NK: Tensor, state_NKD: Tensor) -> Tensor:
        """The same for all K slots of blocks whose tokens are known, [N, K, r]."""
        if self.kind != "rnn":
            return self(before_NK, state_NKD)[0]
        outs, memory = [], None
        for before_N, state_ND in zip(before_NK.unbind(1), state_NKD.unbind(1), strict=True):
            out_Nr, memory = self(before_N, state_ND, memory)
            outs.append(out_Nr)
        return torch.stack(outs, dim=1)


class DSparkOptions(BlockOptions):
    """Options of DSpark."""

    block_size: int = Field(7, ge=2, le=4096, description="slots of a block, its anchor's included: as many as it drafts")
    gamma: float | None = Field(4.0, gt=0, description="the k-th drafted token weighs exp(-(k-1)/gamma)")
    markov_rank: int = Field(256, ge=1, le=2**16, description="rank of what a token adds to the logits of the next one")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(
        "vanilla", description="vanilla: by the token alone; gated: and the slot's state; rnn: and all tokens of the block before it"
    )
    enable_confidence_head: bool = Field(True, description="a head that says how likely a drafted token is accepted")
    confidence_head_with_markov: bool = Field(True, description="it reads the token before, too")
    confidence_threshold: float = Field(0.0, ge=0, lt=1, description="drafting here ends before a token that it holds for less sure")
    sample_from_anchor: bool = Field(True, description="the anchor's slot drafts, too; false: as in DFlash, it does not")
    own_head: bool = Field(False, description="embedding and head are the draft's own: needed where it names a part of the vocabulary")
    loss: Loss = Field({"text": 0.1, "tv": 1.8}, description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


class DSpark(BlockAlgorithm[DSparkOptions]):
    """Slot j predicts x_{a+1+j} from its state and x_{a+j}: the block is one forward, the tokens are chosen from left to right.

    Taught by the target (0.9 L1, which is 1.8 TV) and the text (0.1 cross-entropy); the confidence head by the chance of acceptance.
    """

    name = "dspark"
    summary = "a block in one forward, its tokens chosen in turn by a low-rank Markov head; says how sure it is"
    architecture = "Qwen3DSparkModel"

    told_by = BlockAlgorithm.told_by | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}

    Options = DSparkOptions

    @property
    def spec(self) -> DraftSpec:
        """Of blocks, but for the head."""
        return super().spec.model_copy(update={"target_head": not self.options.own_head})

    @property
    def shift(self) -> int:
        """See `BlockAlgorithm`."""
        return int(self.options.sample_from_anchor)

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """The two heads."""
        o, config = self.options, draft.config
        made: dict[str, nn.Module | nn.Parameter] = {
            "markov_head": MarkovHead(o.markov_head_type, config.vocab_size, config.draft_vocab_size, o.markov_rank, config.hidden_size)
        }
        if o.enable_confidence_head:
            width = config.hidden_size + o.confidence_head_with_markov * o.markov_rank
            made["confidence_head"] = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        return made

    def rider(self, draft: DraftModel) -> nn.Linear:
        """See `AlgorithmBase.rider`."""
        return draft.markov_head.markov_w2

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What engines read, all at the top level: the aux layers as outputs from 0, the block, the heads."""
        o = self.options
        kept = ("block_size", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        fields = {name: getattr(o, name) for name in (*kept, "sample_from_anchor")}
        return {**fields, "num_anchors": o.anchors, "target_layer_ids": [i - 1 for i in config.aux_layers]}

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """Σ w (0.1 CE + 0.9 L1 + BCE) / Σ w, where the confidence is held against what the corrected logits are accepted with."""
        weights, steps = self.shares(batch), self.max_tokens
        states_ND, before_NK = self.states(draft, batch, signal.aux_BSA).flatten(0, 1), self.tokens_before(batch).flatten(0, 1)
        read_ND = self.wiring.head_input(draft, states_ND)
        said_Nr = draft.markov_head.unrolled(before_NK, read_ND.unflatten(0, (-1, steps))).flatten(0, 1)
        step = self.supervised(draft, torch.cat([states_ND, said_Nr], dim=-1), batch, signal, weights)
        if not self.options.enable_confidence_head:
            return step
        sure_N = self.confidence(draft, read_ND, before_NK.flatten()).float()
        parts = zip(weights, batch["queries"], step.acceptance, strict=True)
        terms = [(w * F.binary_cross_entropy_with_logits(sure_N[q], alpha.clamp(max=1), reduction="none")).sum() for w, q, alpha in parts]
        return Step(step.loss + torch.stack(terms).sum(), step.metrics, step.acceptance)

    def confidence(self, draft: DraftModel, read_ND: Tensor, before_N: Tensor) -> Tensor:
        """How likely what a slot drafts behind these tokens is accepted, as logits [N]; `read_ND` are the states behind the final norm."""
        said = [draft.markov_head.markov_w1(before_N)] if self.options.confidence_head_with_markov else []
        return draft.confidence_head.proj(torch.cat([read_ND, *said], dim=-1))[:, 0]

    def drafter(self, draft: Any) -> BlockDrafter:
        """Drafts a block in one forward, its tokens in turn."""
        return BlockDrafter(draft, self.options.block_size, self.shift, turn=lambda states, newest: self._in_turn(draft, states, newest))

    def _in_turn(self, draft: DraftModel, states_QD: Tensor, newest: int) -> Turn:
        token, memory, least = newest, None, self.options.confidence_threshold
        base_QW, read_QD = draft.compute_logits(states_QD), self.wiring.head_input(draft, states_QD)
        for base_W, read_D in zip(base_QW, read_QD, strict=True):
            before_1 = torch.tensor([token], device=base_W.device)
            sure = partial(self._sure, draft, read_D[None], before_1)
            if least and float(sure()) < least:
                return
            said_1r, memory = draft.markov_head(before_1, read_D[None], memory)
            logits_W = base_W + self.rider(draft)(said_1r)[0]
            token = yield (logits_W, sure) if self.options.enable_confidence_head else logits_W

    def _sure(self, draft: DraftModel, read_1D: Tensor, before_1: Tensor) -> Tensor:
        return self.confidence(draft, read_1D, before_1).float().sigmoid()[0]

    @classmethod
    def options_from(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `BlockAlgorithm.options_from`; a part of the vocabulary takes a head."""
        settled = {name: value for name, value in super().options_from(fields).items() if name not in ("loss", "confidence_threshold")}
        return {**settled, "own_head": fields.get("draft_vocab_size") not in (None, fields.get("vocab_size"))}

    @classmethod
    def findings(cls, draft: Files) -> list[Finding]:
        """Heads that the config describes otherwise."""
        fields, shapes = draft.config, {name: tuple(info.shape) for name, info in draft.tensors.items()}
        table = shapes.get("markov_head.markov_w1.weight", ())
        if len(table) != 2 or not cls.told_by <= shapes.keys():
            return []
        kind, rank, found = fields.get("markov_head_type") or "vanilla", table[1], []
        if fields.get("markov_rank") not in (None, rank):
            text = f"markov_rank={fields['markov_rank']}, markov_w1 holds {rank} numbers for a token"
            found.append(error("dspark-rank", text, "engines make the Markov head of another size, and fail or skip it", f"write {rank}"))
        held = next((kind for kind, part in PARTS.items() if f"markov_head.{part}.weight" in shapes), "vanilla")
        if kind != held:
            text = f"markov_head_type '{kind}', the tensors are those of a {held} head"
            found.append(error("dspark-head-type", text, "drafted tokens are corrected otherwise than trained", f"write '{held}'"))
        sure, norm = shapes.get("confidence_head.proj.weight"), shapes.get("norm.weight", (0,))
        if fields.get("enable_confidence_head") is not None and bool(fields["enable_confidence_head"]) != (sure is not None):
            text = f"enable_confidence_head={fields['enable_confidence_head']}, the file holds {'one' if sure else 'none'}"
            mend = f"write {str(sure is not None).lower()}"
            found.append(error("dspark-confidence", text, "SGLang refuses a draft without it, and engines skip a surplus one", mend))
        reads = prod(norm) + rank * bool(fields.get("confidence_head_with_markov", True))
        if sure is not None and sure[-1] != reads:
            text = f"the confidence head reads {sure[-1]} features, by confidence_head_with_markov they are {reads}"
            found.append(error("dspark-confidence-width", text, "engines cannot load it", "write whether it reads the token before"))
        return found


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [DSpark]
