"""What a pass that verifies drafted tokens asks of the target: a cache that goes back, and attention that copies no keys."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    QuantizedCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import ForedraftError

GROUPED = "foredraft_grouped"


def check_target(model: PreTrainedModel, config: GenerationConfig, kwargs: Mapping[str, Any], tree: bool) -> None:
    """Raises `ForedraftError` that names every reason why drafted tokens cannot be verified here; `kwargs` are the model's."""
    text, cache, reasons = model.config.get_text_config(decoder=True), kwargs.get("past_key_values"), []
    if model.config.is_encoder_decoder:
        reasons.append("it is an encoder with a decoder")
    if model._is_stateful:
        reasons.append("it keeps a recurrent state, which cannot go back to before a rejected token")
    if cache is None:
        reasons.append("it keeps no cache (use_cache=False?): drafted tokens are verified against the cache of the text before them")
    elif isinstance(cache, QuantizedCache) or not all(hasattr(layer, "crop") for layer in cache.layers):
        reasons.append(f"a {type(cache).__name__} cannot go back to before a rejected token: leave cache_implementation out")
    if tree and text._attn_implementation not in ("eager", "sdpa"):
        reasons.append(
            f"its attention is '{text._attn_implementation}', which takes no mask of a tree: load it with attn_implementation='sdpa'"
        )
    # A cache of the user's own may not show what the target needs.
    layers = [*DynamicCache(config=text).layers, *(cache.layers if cache is not None else [])] if tree else []
    if other := sorted({type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}):
        reasons.append(f"it keeps states in {', '.join(other)}: branches of a tree need layers that keep every token apart")
    if tree and kwargs.get("position_ids") is None:
        reasons.append("it takes no position_ids: branches of a tree share positions")
    if tree and config.return_dict_in_generate and config.output_attentions:
        reasons.append("output_attentions: attention over a tree is not attention over its text")
    if reasons:
        drafted, advice = ("a tree", "; or leave tree out, for a chain") if tree else ("drafted tokens", "")
        raise ForedraftError(f"{type(model).__name__} cannot verify {drafted}: {'; '.join(reasons)}{advice}")


def keep_rows(cache: Cache, rows: Sequence[int], count: int) -> None:
    """Of the latest `count` rows in the cache keep these, ascending.

    Called after every pass: sliding windows, which keep more while they may have to go back, are cut to their length by it.
    """
    if list(rows) != list(range(len(rows))):
        past = cache.get_seq_length() - count
        for layer in cache.layers:
            for states in (layer.keys, layer.values):
                states[..., past : past + len(rows), :] = states[..., [past + row for row in rows], :]
    cache.crop(len(rows) - count)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """While open, SDPA attention of a model on the CPU copies no keys and values: what it computes is the same.

    Where a mask is given, as it is as soon as a pass holds several tokens, transformers copies those of each group for every query head: on
    other devices masks and groups do not go together, on the CPU it is time lost.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
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
