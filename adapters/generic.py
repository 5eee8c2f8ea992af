"""Drafts for any decoder-only target of transformers that no other adapter lists, after a look at a tiny one of its family."""

from transformers import PretrainedConfig

from foredraft import GroupedQueryDraft, hookimpl
from foredraft.decoding.compatibility import objection
from foredraft.target.capture import depth_of


class GenericDraft(GroupedQueryDraft):
    """A Llama-shaped draft, whatever the target's norms, activations and positions are; it starts from what fits by name and shape."""

    name = "generic"
    summary = "Llama-shaped drafts for any decoder-only target"
    model_types = ()
    generic = True

    @classmethod
    def aux_layers(cls, target_config: PretrainedConfig, count: int) -> tuple[int, ...]:
        """The usual ones; where features of images are added behind the first layers (deepstack), none of these, if there are others.

        Up to there vLLM captures what is there after the addition, transformers and SGLang before it.
        """
        usual = super().aux_layers(target_config, count)
        deep = len(getattr(getattr(target_config, "vision_config", None), "deepstack_visual_indexes", None) or ())
        behind = tuple(max(layer, deep + 1 + i) for i, layer in enumerate(usual))
        return behind if deep and behind[-1] < depth_of(target_config) else usual

    @classmethod
    def refuses(cls, target: PretrainedConfig) -> str | None:
        """What a tiny random model of the target's family objects to; asked once per model_type."""
        return objection(target)


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [GenericDraft]
