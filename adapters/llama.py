"""Drafts for Llama targets and for those that share its shape, but for biases, extra norms or multipliers."""

from foredraft import GroupedQueryDraft, hookimpl


class LlamaDraft(GroupedQueryDraft):
    """A Llama-shaped draft."""

    name = "llama"
    summary = "Llama-shaped drafts for Llama targets and their kin"
    model_types = (
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "qwen2",
        "smollm3",
        "granite",
        "olmo",
        "olmo2",
        "helium",
        "arcee",
        "seed_oss",
    )


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [LlamaDraft]
