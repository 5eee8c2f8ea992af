"""Targets, their configs and tokenizers, from a directory or the hub."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import find_adapter_config_file, is_peft_available

from ..contracts.loading import PLAIN, Loading, Rendering, Repository
from ..data import Reader, tokenizer_of, with_template
from ..errors import ForedraftError
from ..registry import default_registry
from .capture import decoder_layers, is_settled
from .gguf import check_readable, completed, is_gguf, plain, source, with_digits
from .segments import score_cap

HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def load_config(name: str, loading: Repository = PLAIN) -> PretrainedConfig:
    """The config of the target (or draft) in a directory or on the hub; of an adapter (LoRA), its base's. Raises `ForedraftError` if
    there is none."""
    default_registry()  # a plugin may bring the classes of its targets
    try:
        _check_there(name)
        config = completed(AutoConfig.from_pretrained(**source(name), **loading.source), name)
        model = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if loading.trust_remote_code and model:  # AutoModel registers it as it loads; drafts are planned before that
            cls = get_class_from_dynamic_module(model, name, **{"revision": loading.revision} if loading.revision else {})
            AutoModelForCausalLM.register(type(config), cls, exist_ok=True)
    except (OSError, ValueError, ImportError) as error:
        if base := adapted_base(name, loading):
            return load_config(base, loading)
        raise ForedraftError(f"no target or draft at '{name}': {error}") from error
    return config


def load_tokenizer(name: str, loading: Loading = PLAIN, images: bool = False) -> Reader:
    """The tokenizer of the target in a directory or on the hub, or its processor where `images` are to be read; an adapter's base's, where
    it has none.

    Raises `ForedraftError` if there is none.
    """
    default_registry()
    what, auto = ("processor", AutoProcessor) if images else ("tokenizer", AutoTokenizer)
    try:
        _check_there(name)
        reader = with_digits(auto.from_pretrained(**source(name), **loading.source), name)
    except (OSError, ValueError, ImportError) as error:
        if base := adapted_base(name, loading):
            return load_tokenizer(base, loading, images)
        raise ForedraftError(f"the {what} of target '{name}' could not be loaded: {error}") from error
    if images and not hasattr(reader, "image_processor"):
        raise ForedraftError(f"the data has images, and target '{name}' has no processor for them: found a {type(reader).__name__}")
    if isinstance(loading, Rendering):
        with_template(tokenizer_of(reader), loading.chat_template, loading.template_kwargs)
    return reader


def load_target(
    name: str, dtype: str, loading: Loading = PLAIN, device: str | torch.device = "cpu", layers: bool = True
) -> PreTrainedModel:
    """The target in a directory or on the hub, on `device` unless `loading` says where; its decoder layers stay on disk if not wanted.

    Raises `ForedraftError` if it is not there.
    """
    config = load_config(name, loading)
    how = dict(loading.model)
    if is_gguf(name):
        how["config"] = config
    if attention := _attention(config):
        how.setdefault("attn_implementation", attention)
    if not layers and not {"device_map", "tp_plan", "quantization"} & how.keys():
        how["device_map"] = _without_layers(config, "cpu" if torch.device(device).type == "cpu" else str(device))
    if torch.device(device).type != "cpu" and not {"device_map", "tp_plan"} & how.keys():
        how["device_map"] = {"": torch.device(device)}  # read straight to it, not by way of the host's memory
    try:
        if plan := how.pop("tp_plan", None):
            how["distributed_config"] = DistributedConfig(tp_plan=plan)
        if quantization := how.pop("quantization", None):
            how["quantization_config"] = AutoQuantizationConfig.from_dict(dict(quantization))
        model = headed(plain(auto_class(config).from_pretrained(**source(name), dtype=dtype, **how), name))
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise ForedraftError(f"target '{name}' could not be loaded: {error}") from error
    if loading.device_map is not None and not hasattr(model, "hf_device_map"):  # transformers notes a map of several devices alone
        model.hf_device_map = {"": model.device}
    return model


def _without_layers(config: PretrainedConfig, device: str) -> dict[str, str]:
    """A device map: the decoder layers on disk, from where they are fetched if one is asked for, and all else on `device`."""
    with torch.device("meta"):
        model = untrained(config)
    layers, places = decoder_layers(model), dict[str, str]()

    def settle(module: nn.Module, name: str) -> None:
        for own, part in module.named_children():
            if any(inner is layers for inner in part.modules()) and part is not layers:
                settle(part, f"{name}{own}.")
            else:
                places[f"{name}{own}"] = "disk" if part is layers else device

    settle(model, "")
    return places


def auto_class(config: PretrainedConfig) -> Any:
    """Which of transformers' auto classes makes the whole model of a config: with what it reads images and sound with, if it does."""
    return AutoModelForMultimodalLM if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else AutoModelForCausalLM


def untrained(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model of a config with weights that mean nothing; it attends as one that `load_target` loads."""
    return headed(auto_class(config).from_config(config, dtype=dtype, attn_implementation=_attention(config)))


def _attention(config: PretrainedConfig) -> str | None:
    """What a target attends by if nothing is asked for; None: as transformers chooses."""
    return None if score_cap(config) is None else "eager"


def headed(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, which names its head: where it is built around a causal language model and forgets to, that one's."""
    inner = (part for part in model.children() if isinstance(part, PreTrainedModel) and part.get_output_embeddings() is not None)
    if model.get_output_embeddings() is None and (text := next(inner, None)) is not None:
        vars(model)["get_output_embeddings"] = text.get_output_embeddings
    return model


def place(model: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    """`model` on `device`, unless its parts were put where they belong when it was loaded (`is_settled`)."""
    return model if is_settled(model) else model.to(device)


def _check_there(name: str) -> None:
    """Raises `OSError` for what can only be a directory and is none: the hub need not be asked, and would only confuse."""
    if is_gguf(name):
        check_readable(name)
    elif not Path(name).is_dir() and (Path(name).exists() or not HUB_ID.fullmatch(name)):
        raise NotADirectoryError("it is a file, a directory (or a .gguf) is expected" if Path(name).exists() else "no such directory")


def adapted_base(name: str, loading: Repository) -> str | None:
    """The base of an adapter that peft wrote; None if there is no adapter at `name`, or a whole model beside it.

    Raises `ForedraftError` if there is one, and nothing that loads it.
    """
    if (Path(name) / "config.json").exists():
        return None
    try:
        file = find_adapter_config_file(name, **{"revision": loading.revision} if loading.revision else {})
        base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path") if file else None
    except (OSError, ValueError, AttributeError):
        return None
    if file and not (base and is_peft_available()):
        named = base or "a model that it does not name"
        raise ForedraftError(
            f"no target at '{name}': it is a LoRA adapter for {named}, no model of its own: pip install peft, or merge them\n"
            f"  AutoPeftModelForCausalLM.from_pretrained('{name}').merge_and_unload().save_pretrained('merged'), the tokenizer beside it"
        )
    return base
