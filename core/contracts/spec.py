"""What an algorithm asks of a draft's shape."""

from pydantic import Field

from .options import MOST, Frozen


class DraftSpec(Frozen):
    """The sizes and the vocabulary of a draft: all that an algorithm may ask of an adapter."""

    num_layers: int = Field(default=1, ge=0, le=MOST, description="decoder layers of the draft")
    num_aux: int = Field(default=3, ge=1, le=MOST, description="target layers whose hidden states the draft reads")
    final: bool = Field(default=False, description="it reads the target's state after its final norm, and no other (then num_aux is 1)")
    before_norm: bool = Field(default=False, description="with final: the state before that norm, as the last layer puts it out")
    layers_of: str | None = Field(
        default=None, description="its layers are those of this model_type in transformers, as the target's config shapes them"
    )
    qk_norm: bool = Field(default=False, description="a norm on queries and keys, as in Qwen3")
    mask_token: bool = Field(default=False, description="the draft reads a token that stands for the unknown, config.mask_token_id")
    mask_token_id: int | None = Field(default=None, ge=0, description="which one; None: one that the training data never uses")
    target_head: bool = Field(default=False, description="embedding and head are the target's own: frozen, and not in the draft's file")
    architecture: str | None = Field(default=None, description="the name engines know the draft by; None: the adapter's")
