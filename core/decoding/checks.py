"""Whether a target can verify what is drafted: it needs a cache that goes back, and for trees layers that keep every token apart."""

from collections.abc import Mapping
from typing import Any

from transformers import DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache
from transformers.cache_utils import DynamicLayer

from ..errors import ForedraftError
from .states import NO_CACHE, cache_of, is_stateful, way_of


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
