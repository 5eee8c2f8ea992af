"""A draft that is an ordinary language model, as transformers and every engine load one."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from foredraft import FormatBase, hookimpl
from foredraft.contracts import Config, DraftModel
from foredraft.draft.family import apart


class CausalLM(FormatBase):
    """Its layers' own config, with the target's vocabulary; written, not read: a model that is there is the option `model`."""

    name = "causal_lm"
    summary = "an ordinary language model with the target's vocabulary, for engines' draft_model"
    sign = "not told: it is only written"

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """Never."""
        return False

    def refuses(self, config: Config) -> list[str]:
        """Drafts that read the target's states."""
        made = config.get("foredraft")
        ours = isinstance(made, Mapping) and made.get("algorithm") == "draft_model"
        if not ours:
            return ["it reads its target's states: no language model of its own"]
        reduced = config.get("draft_vocab_size") != config.get("vocab_size")
        return ["it names a part of the vocabulary, which no ordinary model does"] if reduced else []

    def write(
        self, draft: DraftModel, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """Under transformers' names; embedding and head apart, in the order of the target's ids."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = draft.config
        kind = config.spec.layers_of
        fields = {**config.target_config, "vocab_size": config.vocab_size, "tie_word_embeddings": False}
        fields |= {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "dtype": str(draft.dtype).removeprefix("torch.")}
        return fields, {n if n == "lm_head.weight" else f"model.{n}": tensor for n, tensor in apart(tensors).items()}


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [CausalLM]
