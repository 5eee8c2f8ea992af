"""Of what a draft is made, and what it starts from: what an adapter may change of it."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ..contracts.algorithm import AlgorithmBase
from ..contracts.draft import DraftModel
from ..contracts.spec import DraftSpec
from ..errors import ForedraftError
from ..target.target import Target
from ..target.weights import matrix_of
from .attention import GroupedQueryAttention
from .config import config_for
from .family import Family, OwnLayer
from .layer import DraftLayer
from .published import Published
from .start import layer_weights, retarget, start
from .vocabulary import DraftVocabulary


class DraftParts(DraftVocabulary, Published, DraftModel):
    """The part of `BaseDraft` that makes its modules, and sets their weights near a target's."""

    norm_class: ClassVar[type[nn.Module]]
    mlp_class: ClassVar[type[nn.Module]]
    rotary_class: ClassVar[type[nn.Module]]
    layer_class: ClassVar[type[DraftLayer]] = DraftLayer

    family: Family | None
    """What its layers are made of, where they are of the target's own kind."""
    complete: bool
    """Whether embedding and head are there; a loaded draft that uses its target's lacks them until `take_head`."""

    @classmethod
    def assumed(cls, target: PretrainedConfig) -> list[str]:
        """What `shape` had to assume of `target` (its text config), as its config does not say: a text each, for `info` and the log."""
        return []

    def make_attention(self, layer: int, input_size: int) -> nn.Module:
        """The attention geometry of a layer."""
        return GroupedQueryAttention(self.config, layer, input_size, self.make_norm if self.config.spec.qk_norm else None)

    @classmethod
    def architecture_for(cls, spec: DraftSpec) -> str:
        """The name engines know a draft of this spec by."""
        return spec.architecture or cls.architecture

    def weights_of(self, layer: nn.Module) -> dict[str, Tensor]:
        """What a target's layer gives a draft's layer to start from, by the draft's names: its parameters and saved buffers.

        Norms are told by what they do: Gemma's keep their weight less one. Where the target norms what its sublayers put
        out (Gemma 2, OLMo 2), only the norms of what they read have a counterpart.
        """
        weights = layer_weights(layer, scaled=self.family is None)
        if "post_feedforward_layernorm.weight" in weights:
            del weights["post_attention_layernorm.weight"]
            if "pre_feedforward_layernorm.weight" in weights:
                weights["post_attention_layernorm.weight"] = weights["pre_feedforward_layernorm.weight"]
        return weights

    def make_layer(self, layer: int, input_size: int) -> nn.Module:
        """A decoder layer that reads inputs of `input_size` features."""
        return self.layer_class(self, layer, input_size) if self.family is None else OwnLayer(self, layer, input_size, self.family)

    def make_mlp(self, layer: int) -> nn.Module:
        """The feed-forward module of a layer."""
        return self.mlp_class(self.config)

    def make_norm(self, size: int) -> nn.Module:
        """A norm over `size` features."""
        eps = self.config.rms_norm_eps
        return self.norm_class(size, eps=eps) if self.family is None else self.family.norm(size, eps)

    def make_rotary(self) -> nn.Module:
        """The rotary embedding."""
        return self.rotary_class(self.config) if self.family is None else self.family.rotary()

    def _init_weights(self, module: nn.Module) -> None:
        """transformers' start of a fresh module; a family's own bare parameters (experts) are known to it alone."""
        if self.family is None:
            super()._init_weights(module)
        else:
            self.family.model._init_weights(module)

    # Building.

    @classmethod
    def lacking(cls) -> list[str]:
        """See `Plugin.lacking`."""
        checks = {
            "norm_class: the family's norm": hasattr(cls, "norm_class") or cls.make_norm is not DraftParts.make_norm,
            "mlp_class: the family's feed-forward": hasattr(cls, "mlp_class") or cls.make_mlp is not DraftParts.make_mlp,
            "rotary_class: the family's rotary embedding": hasattr(cls, "rotary_class"),
        }
        return super().lacking() + [text for text, fine in checks.items() if not fine]

    @classmethod
    def make_config(
        cls,
        target: PretrainedConfig,
        algorithm: AlgorithmBase,
        aux_layers: tuple[int, ...] | None = None,
        draft_vocab_size: int | None = None,
    ) -> Any:
        """The draft's config for a target's config. Raises `ForedraftError` where layers or vocabulary do not fit."""
        return config_for(cls, target, algorithm, aux_layers, draft_vocab_size)

    @torch.no_grad()
    def start_from(self, target: Target | PreTrainedModel, rows: Iterable[dict[str, Any]] | None = None) -> str:
        """Start near the target: its embedding (frozen), head and final norm, its last layers, and fc passing the last aux state.

        The fresh draft then is the target's last layers on its last aux state; what it must learn is to look at the next
        token. Parameters whose counterpart has another name or shape keep their random start. With packed training `rows`, a
        reduced draft vocabulary becomes the tokens they supervise most often, and a mask token the highest id they do not
        use; without, set both before. Says in a line what was taken over, and which share of the tokens the vocabulary covers.

        Raises `ForedraftError` if the target's width is not the draft's, or if the rows use the mask token that was asked for.
        """
        return start(self, target if isinstance(target, Target) else Target(target, self.config.aux_layers), rows)

    @torch.no_grad()
    def retarget(
        self, target: Target | PreTrainedModel, rows: Iterable[dict[str, Any]] | None = None, draft_vocab_size: int | None = None
    ) -> str:
        """Make a trained draft ready to be trained further: for other data, a fine-tuned target, another draft vocabulary; in float32.

        Its layers stay. The embedding becomes the target's unless the draft has one of its own (trained, or imported). With
        `draft_vocab_size` the vocabulary is chosen anew from packed `rows`; the head keeps its rows of the tokens it knew, others are
        the target's. Says in a line what it did. Raises `ForedraftError` for a target of another width or depth, or where rows are needed.
        """
        return retarget(self, target.model if isinstance(target, Target) else target, rows, draft_vocab_size)

    @torch.no_grad()
    def take_head(self, target: Target | PreTrainedModel) -> None:
        """Copy the target's embedding and head: their weights alone, no multiplier, soft cap or bias, which no engine applies to a draft.

        Raises `ForedraftError` if its width or vocabulary is not the draft's.
        """
        model = target.model if isinstance(target, Target) else target
        embedding, head = (matrix_of(m, model.dtype) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
        if embedding.shape != self.embed_tokens.weight.shape:
            raise ForedraftError(
                f"the target's embedding is {tuple(embedding.shape)}, the draft's {tuple(self.embed_tokens.weight.shape)}: "
                "a draft takes over its target's embedding, so they must agree"
            )
        self.embed_tokens.weight.copy_(embedding)
        self.lm_head.weight.copy_(head[self.draft_ids.to(head.device)])
        self.complete = True
