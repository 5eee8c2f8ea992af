"""Drafts for targets whose layers hand on several streams (hyper-connections): the draft reads the mean of them."""

from foredraft import GroupedQueryDraft, hookimpl


class StreamsDraft(GroupedQueryDraft):
    """A Llama-shaped draft that reads the mean of the streams behind each aux layer, once they are mixed with what the layer adds.

    vLLM 0.32 gives drafts that mean of DeepSeek-V4 (`mhc_post`, then a mean) and GLM-5-Next (`hc_contract`); SGLang 0.5.23 does for its
    DSpark and DFlash drafts. Of Hy-V4 and Qwen4 neither captures anything yet: what an engine will hand on may be another vector.
    """

    name = "streams"
    summary = "Llama-shaped drafts for targets with hyper-connections, which read the mean of the streams"
    model_types = ("deepseek_v4", "glm5_next_text", "hy_v4", "qwen4_exp_text")


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [StreamsDraft]
