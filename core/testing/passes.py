"""Drafts with random weights, and the passes through their backbone that the checks compare."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ..contracts.algorithm import AlgorithmBase
from ..contracts.draft import Layout, Wiring
from ..contracts.options import Frozen
from ..contracts.spec import DraftSpec
from ..decoding import generate
from ..draft.attention import Causal, DecodingCache, Full, Masked
from ..draft.model import BaseDraft
from ..draft.wiring import Fused, Prefix
from .common import randomize

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, -1, -1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 0, 1]])
ONE, ASCENDING = torch.zeros(2, 8, dtype=torch.long), torch.arange(8).expand(2, -1)


CASES: dict[str, tuple[DraftSpec, Wiring]] = {
    "fused": (DraftSpec(num_layers=2), Fused()),
    "norms": (DraftSpec(), Fused(fc_norm=True, norm_output=True)),
    "residual": (DraftSpec(), Fused(norm_before_residual=True)),
    "qk_norm": (DraftSpec(qk_norm=True), Fused()),
    "prefix": (DraftSpec(num_layers=2, qk_norm=True), Prefix()),
}
"""Drafts and wirings that algorithms ask for."""


class ProbeOptions(Frozen):
    """Which of `CASES` to ask for."""

    case: str


class Probe(AlgorithmBase[ProbeOptions]):
    """Asks for one of `CASES`, and no more: the checks ask the draft itself."""

    name = "probe"

    Options = ProbeOptions

    @property
    def spec(self) -> DraftSpec:
        """As the case says."""
        return CASES[self.options.case][0]

    @property
    def wiring(self) -> Wiring:
        """As the case says."""
        return CASES[self.options.case][1]

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """The wiring's flags."""
        return self.wiring.fields if isinstance(self.wiring, Fused) else {}

    def _never(self, *_: Any) -> Any:
        raise AssertionError("the probe neither trains nor drafts")

    plan: Any = _never
    loss: Any = _never
    drafter: Any = _never


def build(adapter: type[BaseDraft], target_config: Any, algorithm: AlgorithmBase, **fields: Any) -> Any:
    """A draft with random weights."""
    torch.manual_seed(0)
    return randomize(adapter(adapter.make_config(target_config, algorithm, **fields), algorithm))


def inputs(draft: BaseDraft) -> tuple[Tensor, Tensor]:
    """Random embeddings and context, each [2, 8, D]."""
    torch.manual_seed(3)
    embeds, context = torch.randn(2, 2, 8, draft.config.hidden_size).unbind(0)
    return embeds.clone(), context.clone()


def fused(draft: BaseDraft) -> None:
    """Skips the other wiring, where there is no context per input."""
    if not isinstance(draft.algorithm.wiring, Fused):
        pytest.skip(f"does not apply to the wiring {type(draft.algorithm.wiring).__name__}")


def everywhere(
    draft: BaseDraft, embeds: Tensor, context: Tensor, documents: Tensor, positions: Tensor, rows: Tensor | None = None
) -> Tensor:
    """The state at every position (or at `rows`), which sees what comes before it in its document (under `prefix`: the context there)."""
    if isinstance(draft.algorithm.wiring, Fused):
        return draft.backbone(embeds, context, Layout(positions, Causal(documents), rows))
    slots = documents.shape[1]

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at, other = query % slots, key % slots
        before = (key < slots) & (other < at) & (documents[b, at] == documents[b, other])
        return before | (key == query)

    rows = None if rows is None else slots + rows
    return draft.backbone(embeds, context, Layout(torch.cat([positions, positions], dim=1), Masked(sees), rows))


def decode(draft: BaseDraft, embeds: Tensor, context: Tensor, cuts: list[int]) -> Tensor:
    """The states of all 8 inputs (`fuse`), or of two embeddings behind all context (`prefix`), confirmed in portions that end at `cuts`.

    After each portion two more inputs are drafted, and forgotten.
    """
    cache, states, start = DecodingCache(), [], 0
    positions, ahead = ASCENDING, torch.tensor([[8, 9]] * 2)
    for end in cuts:
        cache.crop(start)
        if isinstance(draft.algorithm.wiring, Fused):
            layout = Layout(positions[:, start:end], Causal())
            states.append(draft.backbone(embeds[:, start:end], context[:, start:end], layout, cache))
            draft.backbone(embeds[:, :2], context[:, :2], Layout(ahead, Causal()), cache)
        else:
            layout = Layout(torch.cat([positions[:, start:end], ahead], dim=1), Full())
            states = [draft.backbone(embeds[:, :2], context[:, start:end], layout, cache)]
        start = end
    return torch.cat(states, dim=1)


def chain(draft: BaseDraft, embeds_SD: Tensor, context_SD: Tensor, documents_S: Tensor, slot: int, fed: list[Tensor]) -> list[Tensor]:
    """The states of one slot at steps 0, 1, ..: each time its whole document so far, and what was drafted behind it, in one causal pass."""
    start = int((documents_S == documents_S[slot]).nonzero()[0])
    embeds, context, states = embeds_SD[start : slot + 1], context_SD[start : slot + 1], []
    for token in [*fed, None]:
        layout = Layout(torch.arange(len(embeds))[None], Causal())
        states.append(draft.backbone(embeds[None], context[None], layout)[0, -1])
        if token is not None:
            embeds, context = torch.cat([embeds, token[None]]), torch.cat([context, states[-1][None]])
    return states


@torch.no_grad()
def check_lossless(model: Any, draft: Any) -> None:
    """Greedy decoding with a draft (or an algorithm without weights) is the target's own, token for token."""
    for seed, k in ((0, 1), (1, 4)):
        ids = torch.randint(1, 49, (1, 5), generator=torch.Generator().manual_seed(seed))
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        k = min(k, getattr(draft, "algorithm", draft).max_tokens or k)
        drafted = generate(model, draft, ids, num_draft_tokens=k, **settings)
        assert torch.equal(drafted, alone), (
            f"greedy decoding with {k} drafted tokens gives {drafted[0, 5:].tolist()}, the target alone {alone[0, 5:].tolist()}: "
            "does the target's own forward give the same logits for several tokens at once as one by one?"
        )
