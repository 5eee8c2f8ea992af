"""The stored states of a run, told by the files of its target alone."""

from pathlib import Path

import torch

from ..data import Reader, tokenizer_of
from ..draft.model import BaseDraft
from ..target.cached import store_of
from ..target.fingerprint import fingerprint_of, weights_of_files
from ..target.loading import load_config
from ..target.store import Store
from .settings import RunConfig


def store_of_run(config: RunConfig, draft: BaseDraft, reader: Reader) -> Store | None:
    """What a run keeps states in; None where it keeps none, or its target is no directory of safetensors that is read as it stands.

    Raises `ForedraftError` if another target's states are there.
    """
    settled = config.device_map or config.tp_plan or config.quantization
    directory = Path(config.target)
    as_it_stands = (directory / "config.json").exists() and any(directory.glob("*.safetensors")) and not list(directory.glob("adapter_*"))
    if config.hidden_states_cache is None or settled or not as_it_stands:
        return None
    target = load_config(config.target, config)
    dtype = target.dtype if config.target_dtype == "auto" else getattr(torch, config.target_dtype)
    if not isinstance(dtype, torch.dtype):
        return None
    needs = draft.algorithm.needs
    of = fingerprint_of(target, weights_of_files(config.target), draft.config.aux_layers, needs, dtype, tokenizer_of(reader))
    return store_of(config.hidden_states_cache, target, of, dtype, config.hidden_states_dtype, config.hidden_states_room is not None)
