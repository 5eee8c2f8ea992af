"""Attention of the target over packed rows, document by document: no mask, no look at the device's values.

Two names of one function. `foredraft_varlen` may be asked for when a target is loaded: wherever no documents are told it is SDPA.
`foredraft_packed` stands in its place while a batch is captured: transformers makes no mask for an attention without a mask function.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ASKED, WITHIN = "foredraft_varlen", "foredraft_packed"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: [1, H, T, d] and [1, h, T, d] to [1, T, H, d].

    Documents end at `cu_seq_lens_q` [n+1], int32; the longest has `max_length_q` tokens. Raises `ValueError` for scores that are
    capped, or share their sum with a sink.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise ValueError("capped scores, sinks and attention both ways are not known here")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if sliding_window is None or sliding_window >= max_length_q else sliding_window
    run = _flash if query.is_cuda else _emulated
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return run(q, k, v, cu_seq_lens_q, max_length_q, scale, window)[None], None


AttentionInterface.register(ASKED, attend)
AttentionInterface.register(WITHIN, attend)
AttentionMaskInterface.register(ASKED, sdpa_mask)


def score_cap(config: PretrainedConfig) -> float | None:
    """What a target's attention caps its scores at, where it does: by `eager`, FlexAttention and flash-attn; by SDPA transformers lets
    them run free."""
    cap: float | None = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return cap


def wanted(model: PreTrainedModel) -> bool:
    """Whether a target is to attend so: asked to, or by SDPA where the flash kernel runs; its layers must tell their windows."""
    text = model.config.get_text_config()
    asked = text._attn_implementation
    shapes = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    heads = max(getattr(shape, name, None) or 0 for shape in shapes for name in ("head_dim", "v_head_dim", "qk_head_dim"))
    flash = (
        next(model.parameters()).is_cuda
        and model.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability() >= (8, 0)
        and heads <= 256
    )
    return (asked == ASKED or (asked == "sdpa" and flash)) and _tells_windows(model)


@contextmanager
def by_documents(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the target's attention is `attend` without masks."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = WITHIN
    try:
        yield
    finally:
        config._attn_implementation = before


def _tells_windows(model: PreTrainedModel) -> bool:
    """Whether layers that see a window have it as `sliding_window`, which they hand on; others have it in their masks alone."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"])
    told = any(isinstance(getattr(module, "sliding_window", None), int) for module in model.modules())
    return kinds == {"full_attention"} or (kinds <= {"full_attention", "sliding_attention"} and told)


def _flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, window: int | None) -> Tensor:
    """Torch's flash kernel for CUDA; heads are padded to one width, a multiple of 8."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    padded = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    left, right = (None, None) if window is None else (window - 1, 0)
    found = torch.ops.aten._flash_attention_forward(
        *padded, ends, ends, longest, longest, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=right
    )
    return found[0][..., : v.shape[-1]]


def _emulated(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, window: int | None) -> Tensor:
    """The same anywhere, a document after the other."""
    out, marks = [], ends.tolist()
    for start, end in pairwise(marks):
        mask = None
        if window is not None and end - start > window:
            at = torch.arange(end - start, device=q.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < window)
        query, key, value = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        part = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        out.append(part[0].transpose(0, 1))
    return torch.cat(out)
