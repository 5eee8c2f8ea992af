"""Attention of a few drafted tokens under a mask, on the CPU: grouped keys and values stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "foredraft_grouped"


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
