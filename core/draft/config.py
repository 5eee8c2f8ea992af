"""The draft's own `config.json`: the family's native config plus what engines read, written in every spelling they know."""

from importlib import metadata
from typing import Any

from ..errors import ForedraftError


def eagle_fields(config: Any) -> dict[str, Any]:
    """The aux layers as SGLang reads them (0-based layer outputs); vLLM reads the top-level field, `hidden_states` indices."""
    layers = [i - 1 for i in config.aux_layers]
    return {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}}


def set_mask_token(config: Any, token: int) -> None:
    """Let `token` stand for what is not known yet. Raises `ForedraftError` unless it is one of the target's ids."""
    if not 0 <= token < config.vocab_size:
        raise ForedraftError(f"mask_token_id={token} is no token of the target: choose 0 to {config.vocab_size - 1}")
    config.mask_token_id = token


def versions() -> dict[str, str]:
    """The versions a checkpoint was made with."""
    return {name: metadata.version(name) for name in ("foredraft", "torch", "transformers")}
