"""Medusa's heads in the form that vLLM's `MedusaModel` reads: one shared vocabulary head beside the blocks."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from foredraft import ForedraftError, FormatBase, hookimpl
from foredraft.contracts import Config, DraftModel, Finding
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import error

HEADS = re.compile(r"(?:medusa_heads\.)?(?:(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias))")
"""A block's tensor, as vLLM names it or as the paper's code does."""
MINE = ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size")


class MedusaModel(FormatBase):
    """The paper's heads and vLLM's; of several vocabulary heads, one for each, ours have no counterpart."""

    name = "medusa"
    summary = "Medusa heads on the target's final state, as vLLM's method medusa reads them"
    sign = "blocks.0.layers.0.weight, or the paper's 0.0.linear.weight"
    priority = 2

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """By the first block."""
        return "foredraft" not in config and any(self.rename(name) == "blocks.0.layers.0.weight" for name in names)

    def rename(self, name: str) -> str | None:
        """vLLM's, but for its vocabulary head under its other name."""
        if match := HEADS.fullmatch(name):
            return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
        return "lm_head.weight" if name == "lm_heads.0.weight" else name

    def flatten(self, config: Config) -> dict[str, Any]:
        """Our options. Raises `ForedraftError` where each head has a vocabulary head, or a part of the vocabulary."""
        if not config.get("original_lm_head"):
            raise ForedraftError("original_lm_head is not set: each of its heads has a vocabulary head of its own; ours share one")
        if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
            raise ForedraftError("truncated_vocab_size: its heads name a part of the vocabulary; ours of this form name all of it")
        shape = {"served": True, "num_heads": config.get("num_heads", 5), "num_blocks": config.get("num_hidden_layers", 1)}
        sizes = {name: config[name] for name in ("hidden_size", "vocab_size") if name in config}
        return {**shape, **sizes, "num_hidden_layers": 0, "num_attention_heads": 1}

    def findings(self, draft: Files) -> list[Finding]:
        """What vLLM takes for something else without a word, or fails at."""
        config, found = draft.config, []
        if any(name.endswith(".bias") for name in draft.tensors) and not config.get("medusa_fc_bias"):
            breaks = "vLLM drops the biases without a word: every head drafts other tokens than in training"
            found.append(error("medusa-bias", "blocks have biases, and medusa_fc_bias is not set", breaks, "set medusa_fc_bias to true"))
        other = [n for n in config if "num" in n and ("heads" in n or "layers" in n) and n not in MINE]
        if other:
            breaks = "vLLM takes every field with such a name for the number of heads, or of blocks"
            found.append(error("medusa-counts", f"{', '.join(sorted(other))} beside num_heads", breaks, "leave them out"))
        if not {"lm_head.weight", "lm_heads.0.weight"} & draft.tensors.keys():
            found.append(
                error("medusa-lm-head", "there is no vocabulary head", "vLLM fails while it loads", "copy it from the training's file")
            )
        blocks = {int(match[1]) for name in draft.tensors if (match := HEADS.fullmatch(name))}
        if len(blocks) != config.get("num_heads", 5):
            text = f"num_heads is {config.get('num_heads', 5)}, the file holds {len(blocks)}"
            found.append(error("medusa-heads", text, "vLLM leaves heads out, or finds no weights for them", f"write {len(blocks)}"))
        return found

    def refuses(self, config: Config) -> list[str]:
        """What is no draft by Medusa on the final state, or names a part of the vocabulary."""
        made = config.get("foredraft")
        options = made.get("options") if isinstance(made, Mapping) else None
        if not isinstance(options, Mapping) or not options.get("served"):
            return ["it is no draft by Medusa in the served form (option `served`)"]
        reduced = config.get("draft_vocab_size") != config.get("vocab_size")
        return ["it names a part of the vocabulary, which vLLM's loader does not take"] if reduced else []

    def write(
        self, draft: DraftModel, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The blocks and the shared head; no embedding, which heads do not read."""
        if reasons := self.refuses(draft.config.to_dict()):
            raise ForedraftError(f"medusa cannot express this draft: {reasons[0]}")
        options, config = draft.algorithm.options, draft.config
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "dtype": str(draft.dtype).removeprefix("torch."),
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": options.num_heads,
            "num_hidden_layers": options.num_blocks,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }, {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [MedusaModel]
