"""Drafts for ERNIE 4.5 targets, dense ones, whose rotary pairs lie side by side."""

from typing import Any

from transformers import PretrainedConfig

from foredraft import GroupedQueryDraft, hookimpl


class Ernie45Draft(GroupedQueryDraft):
    """A Llama-shaped draft; its RoPE is told apart from its target's by the length for which tables are made.

    vLLM 0.32 keeps one rotary module for all layers that ask for the same, the draft's among them, and turns the target's into one of
    pairs after it is made: a draft of the same length would be turned so, too.
    """

    name = "ernie4_5"
    summary = "Llama-shaped drafts for ERNIE 4.5 targets"
    model_types = ("ernie4_5",)

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """Llama's, one position longer."""
        return {**super().shape(target), "max_position_embeddings": target.max_position_embeddings + 1}


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [Ernie45Draft]
