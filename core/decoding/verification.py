"""What verifying drafted tokens asks of the target: a cache that goes back, attention that copies no keys; and what is accepted."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    QuantizedCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..contracts.options import Frozen
from ..errors import ForedraftError
from .states import NO_CACHE, cache_of, is_stateful, way_of

GROUPED = "foredraft_grouped"


class Lossy(Frozen):
    """Rules that accept more than the target itself would have said: the output is NOT the target's any more. Off unless asked for.

    One of the two. `lenience` l: a drafted token is accepted with probability min(1, p / (l·q)), greedily where p is at least l times
    the target's likeliest; no token comes with more than p / l (after arXiv:2211.17192, appendix A.5; what is drawn after a rejection is of
    p - l·q here). `typical` ε, δ: one is accepted where p exceeds min(ε, δ·exp(-H(p))), H the target's entropy there (arXiv:2401.10774, on
    typical acceptance).
    """

    lenience: float | None = Field(default=None, gt=0, lt=1)
    typical: tuple[float, float] | None = None

    @classmethod
    def parse(cls, text: str) -> "Lossy":
        """The rule written as `lenience=0.8` or `typical=0.09,0.3`. Raises `ForedraftError` for anything else."""
        name, _, values = text.partition("=")
        try:
            first, *rest = (float(value) for value in values.split(","))
            if name == "lenience" and not rest:
                return cls(lenience=first)
            if name == "typical" and len(rest) == 1 and min(first, rest[0]) > 0:
                return cls(typical=(first, rest[0]))
            raise ValueError
        except ValueError as error:
            raise ForedraftError(
                f"lossy rule '{text}': expected lenience=L, with L between 0 and 1, or typical=EPSILON,DELTA, as in typical=0.09,0.3"
            ) from error

    def __str__(self) -> str:
        return f"lenience {self.lenience:g}" if self.lenience else "typical {:g}, {:g}".format(*(self.typical or ()))

    def least(self, p_V: Tensor) -> Tensor:
        """What a token's probability must reach, where that alone decides."""
        if self.typical is None:
            return p_V.max() * (self.lenience or 1.0)
        epsilon, delta = self.typical
        entropy = torch.special.entr(p_V).sum()
        return torch.clamp(delta * torch.exp(-entropy), max=epsilon)


def choose_token(scores_V: Tensor, offered: Sequence[int], q_V: Tensor | None, do_sample: bool, lossy: Lossy | None = None) -> int:
    """The token that follows, where the target has these scores; `offered` are the drafted ones, drawn from `q_V` if that is given.

    Exact unless `lossy`: the target's own, or of one drawn from q it or a sample of max(p - q, 0).
    """
    p_V = scores_V.softmax(-1)
    by_chance = do_sample and (lossy is None or lossy.typical is None)
    if lossy is not None and offered and not by_chance:
        best = max(offered, key=lambda token: float(p_V[token]))
        if p_V[best] >= lossy.least(p_V):
            return best
    if not do_sample:
        return int(scores_V.argmax())
    if by_chance and (lossy is not None or q_V is not None):
        lenience = 1.0 if lossy is None else lossy.lenience or 1.0
        for token in offered:
            mass_V = lenience * (F.one_hot(p_V.new_tensor(token, dtype=torch.long), len(p_V)) if q_V is None else q_V.to(p_V.device))
            if bool(torch.rand((), device=p_V.device) * mass_V[token] < p_V[token]):
                return token
            left_V = (p_V - mass_V).clamp(min=0)
            p_V = torch.where(left_V.any(), left_V / left_V.sum(), p_V)  # nothing is left where p and q differ by rounding alone
    return int(torch.multinomial(p_V, 1))


def check_target(model: PreTrainedModel, config: GenerationConfig, kwargs: Mapping[str, Any], tree: bool) -> None:
    """Raises `ForedraftError` that names every reason why drafted tokens cannot be verified here; `kwargs` are the model's."""
    text, cache, reasons = model.config.get_text_config(decoder=True), cache_of(kwargs), []
    if model.config.is_encoder_decoder:
        reasons.append("it is an encoder with a decoder")
    if (cache is None and model._supports_default_dynamic_cache()) or not kwargs.get("use_cache", True):
        reasons.append(NO_CACHE)
    elif cache is not None and (isinstance(cache, QuantizedCache) or not all(hasattr(layer, "crop") for layer in cache.layers)):
        reasons.append(f"a {type(cache).__name__} cannot go back to before a rejected token: leave cache_implementation out")
    if tree and text._attn_implementation not in ("eager", "sdpa"):
        reasons.append(
            f"its attention is '{text._attn_implementation}', which takes no mask of a tree: load it with attn_implementation='sdpa'"
        )
    if tree and is_stateful(model, cache):
        reasons.append("its states go from token to token: branches of a tree would run into each other")
    # A cache of the user's own may not show what the target needs.
    layers = [*DynamicCache(config=text).layers, *(cache.layers if cache is not None else [])] if tree else []
    if other := sorted({type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}):
        reasons.append(f"it keeps states in {', '.join(other)}: branches of a tree need layers that keep every token apart")
    if tree and kwargs.get("position_ids") is None:
        reasons.append("it takes no position_ids: branches of a tree share positions")
    if tree and config.return_dict_in_generate and config.output_attentions:
        reasons.append("output_attentions: attention over a tree is not attention over its text")
    if not reasons and is_stateful(model, cache) and way_of(model) is None:
        reasons.append(
            "behind a state it does not read several tokens as it does in one go, in transformers: all drafted ones at once would lose it"
        )
    if reasons:
        drafted, advice = ("a tree", "; or leave tree out, for a chain") if tree else ("drafted tokens", "")
        raise ForedraftError(f"{type(model).__name__} cannot verify {drafted}: {'; '.join(reasons)}{advice}")


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """While open, SDPA attention of a model on the CPU copies no keys and values: what it computes is the same.

    Where a mask is given, as it is as soon as a pass holds several tokens, transformers copies those of each group for every query head: on
    other devices masks and groups do not go together, on the CPU it is time lost.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if (
        model.device.type != "cpu"
        or config._attn_implementation != "sdpa"
        or getattr(config, "num_key_value_heads", heads) in (None, heads)
    ):
        yield
        return
    AttentionInterface.register(GROUPED, _forward)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    if attention_mask is None or module.training or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None
