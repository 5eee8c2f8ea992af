"""What an algorithm asks of a draft's shape."""

from typing import Literal

from pydantic import Field

from .options import MOST, Frozen


class DraftSpec(Frozen):
    """All that an algorithm may ask of an adapter."""

    wiring: Literal["fuse", "prefix"] = Field(
        "fuse",
        description="fuse: embedding and context side by side into a 2·D-wide first layer; prefix: the context as extra keys and values of "
        "every layer",
    )
    num_layers: int = Field(1, ge=0, le=MOST, description="decoder layers of the draft")
    num_aux: int = Field(3, ge=1, le=MOST, description="target layers whose hidden states the draft reads")
    fc_norm: bool = Field(False, description="one RMSNorm per aux chunk before fc (EAGLE-3.1)")
    context_norm: bool = Field(False, description="a norm after fc (DFlash)")
    norm_output: bool = Field(False, description="the post-norm state is fed back, and the head applies no second norm (EAGLE-3.1)")
    norm_before_residual: bool = Field(False, description="fuse: the first layer adds to the normed context, not to the context itself")
    qk_norm: bool = Field(False, description="a norm on queries and keys, as in Qwen3")
    mask_token: bool = Field(False, description="the draft reads a token that stands for the unknown, config.mask_token_id")
    mask_token_id: int | None = Field(None, ge=0, description="which one; None: one that the training data never uses")
    target_head: bool = Field(False, description="embedding and head are the target's own: frozen, and not in the draft's file")
    architecture: str | None = Field(None, description="the name engines know the draft by; None: the adapter's")
