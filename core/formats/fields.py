"""What a peer's `config.json` says of a draft, each field checked for its type and bounds before anything is built from it."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, ValidationError, model_validator

from ..errors import ForedraftError, describe_validation
from ..files.reading import Size, Strict, Token
from ..files.spellings import AUX_LAYERS, MASK_TOKEN, NESTED, value

Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Layers = Annotated[list[Annotated[int, Field(ge=-1, le=10_000)]], Field(min_length=1, max_length=1000)]
Factors = Annotated[list[Number], Field(max_length=4096)]

NO_COUNTERPART = {
    "norm_before_fc": "one norm over all aux states at once (input_norm); ours has one per aux state (fc_norm) or none",
    "sample_from_anchor": "the anchor's slot drafts too; our blocks begin behind it",
    "is_causal": "the slots of a block see only those before them; ours see all",
    "causal": "the slots of a block see only those before them; ours see all",
    "use_swa": "attention within a sliding window; our drafts see the whole text",
    "attention_sink_bias": "attention has sinks",
}
"""Flags that change what a draft computes and that ours cannot follow, and why."""
SCALES = ("logit_scale", "attention_value_scale", "input_embedding_scale", "output_multiplier", "partial_rotary_factor")
"""Factors that must be 1 (or absent)."""
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Frequency scalings of the rotary embedding, and what each needs."""


class Rope(Strict):
    """The rotary embedding, in either spelling; what is not understood is not skipped."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    rope_type: Annotated[
        Literal["default", "linear", "llama3", "yarn", "longrope"], Field(validation_alias=AliasChoices("rope_type", "type"))
    ] = "default"
    rope_theta: Number = 10000.0
    factor: Number | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    attention_factor: Number | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    truncate: bool | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    partial_rotary_factor: Number | None = Field(None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, fields: Any) -> Any:
        """Some files name the type twice."""
        if isinstance(fields, dict) and "rope_type" in fields and fields.get("type") == fields["rope_type"]:
            return {name: value for name, value in fields.items() if name != "type"}
        return fields

    @model_validator(mode="after")
    def _complete(self) -> "Rope":
        if missing := [name for name in SCALINGS[self.rope_type] if getattr(self, name) is None]:
            raise ValueError(f"rope_type '{self.rope_type}' needs {', '.join(missing)}")
        if self.partial_rotary_factor not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor}: ours turn the whole head")
        if self.short_factor != self.long_factor:
            raise ValueError("short and long texts get different frequencies, and engines switch at different moments")
        return self


class DraftFields(Strict):
    """The fields of a draft's config that decide what it computes, at its top level or in one of its objects."""

    hidden_act: Literal["silu"] = "silu"
    num_hidden_layers: Annotated[int, Field(ge=0, le=2**24)] | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 1e-6
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**31)] = 2048
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Number | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: Annotated[list[str], Field(max_length=10_000)] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False

    draft_vocab_size: Size | None = None
    fc_norm: bool = False
    norm_output: bool | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    sample_from_anchor: bool = False
    is_causal: bool | None = None
    causal: bool = False
    use_swa: bool = False
    attention_sink_bias: bool = False
    logit_scale: float | None = None
    attention_value_scale: float | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    partial_rotary_factor: float | None = None
    final_logit_softcapping: float | None = None
    mask_token_id: Token | None = None
    pard_token: Token | None = None
    ptd_token_id: Token | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None
    aux_hidden_state_layer_ids: Layers | None = None
    target_layer_ids: Layers | None = None
    use_aux_hidden_state: bool = True
    eagle_config: "DraftFields | None" = None
    dflash_config: "DraftFields | None" = None

    @classmethod
    def read(cls, fields: Mapping[str, Any], options: Collection[str] = ()) -> "DraftFields":
        """Checked fields. Raises `ForedraftError` that lists all that is wrong, and every flag that our drafts have no counterpart of.

        `options` are the names of the algorithm's own, which it follows.
        """
        try:
            read = cls.model_validate(fields)
            _ = read.rope
        except ValidationError as error:
            raise ForedraftError("the draft's config.json:\n  " + describe_validation(error, cls.model_fields)) from error
        if problems := read.objections(options):
            raise ForedraftError("a draft of ours cannot compute what this one does:\n  " + "\n  ".join(problems))
        return read

    def objections(self, options: Collection[str] = ()) -> list[str]:
        """What this draft computes and ours cannot, a line each."""
        said = self.model_dump()
        found = [f"{name}: {reason}" for name, reason in NO_COUNTERPART.items() if said[name] and name not in options]
        found += [f"{name}={said[name]}: a factor that ours has not" for name in SCALES if said[name] not in (None, 1.0)]
        if self.final_logit_softcapping:
            found.append(f"final_logit_softcapping={self.final_logit_softcapping}: the draft's logits are capped; ours are not")
        if not self.use_aux_hidden_state:
            found.append("use_aux_hidden_state=false: it reads the target's last state only, without fc (EAGLE-1)")
        if other := sorted({kind for kind in self.layer_types or () if kind != "full_attention"}):
            found.append(f"layer_types {', '.join(other)}: {NO_COUNTERPART['use_swa']}")
        elif self.layer_types is None and self.use_sliding_window and self.sliding_window:
            found.append(f"sliding_window={self.sliding_window}: {NO_COUNTERPART['use_swa']}")
        inside = [getattr(self, name) for name in NESTED]
        return found + [text for fields in inside if fields is not None for text in fields.objections(options)]

    @property
    def rope(self) -> Rope:
        """The rotary embedding as transformers 5 spells it, or 4 (`rope_theta`, `rope_scaling`)."""
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return Rope.model_validate({**theta, **(self.rope_scaling or {}), **(self.rope_parameters or {})})

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The target layers it reads, as HF `hidden_states` indices; None: not said. Raises `ForedraftError` where two fields disagree."""
        stated = {name: (value(self.model_dump(), name), shift) for name, shift in AUX_LAYERS.items()}
        said = {name: tuple(i + shift for i in ids) for name, (ids, shift) in stated.items() if ids is not None}
        return agreed("aux layers (as hidden_states indices)", said)

    @property
    def mask_token(self) -> int | None:
        """The token that stands for the unknown, by any of its names. Raises `ForedraftError` where two disagree."""
        stated = {name: value(self.model_dump(), name) for name in MASK_TOKEN}
        return agreed("mask token", {name: token for name, token in stated.items() if token is not None})


def agreed(what: str, said: Mapping[str, Any]) -> Any:
    """The one value that all fields give, None if there is none. Raises `ForedraftError` where they disagree."""
    if len(set(said.values())) > 1:
        values = ", ".join(f"{name}: {value}" for name, value in said.items())
        raise ForedraftError(f"the draft's config.json names its {what} twice, and not alike: {values}\n  correct one of them first")
    return next(iter(said.values()), None)
