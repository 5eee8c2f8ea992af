"""Drafts for any decoder-only target of transformers that no other adapter lists, after a look at a tiny one of its family."""

from transformers import PretrainedConfig

from foredraft import GroupedQueryDraft, hookimpl
from foredraft.decoding.compatibility import objection


class GenericDraft(GroupedQueryDraft):
    """A Llama-shaped draft, whatever the target's norms, activations and positions are; it starts from what fits by name and shape."""

    name = "generic"
    summary = "Llama-shaped drafts for any decoder-only target"
    model_types = ()
    generic = True

    @classmethod
    def refuses(cls, target: PretrainedConfig) -> str | None:
        """What a tiny random model of the target's family objects to; asked once per model_type."""
        return objection(target)


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [GenericDraft]
