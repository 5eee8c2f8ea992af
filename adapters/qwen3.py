"""Drafts for Qwen3 targets, dense and mixture-of-experts."""

from foredraft import GroupedQueryDraft, hookimpl


class Qwen3Draft(GroupedQueryDraft):
    """Llama-shaped as engines serve it best; Qwen3-shaped, q_norm and k_norm taken over too, where the algorithm asks for `qk_norm`."""

    name = "qwen3"
    summary = "Llama-shaped drafts for Qwen3 targets; Qwen3-shaped with qk_norm"
    model_types = ("qwen3", "qwen3_moe")


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [Qwen3Draft]
