"""The draft's own `config.json`: the family's native config plus what engines read, written in every spelling they know."""

from functools import cache
from importlib import metadata
from typing import Any

from transformers import PretrainedConfig

from ..contracts.algorithm import AlgorithmBase
from ..contracts.aux_layers import BEFORE_NORM, check_aux_layers
from ..errors import ForedraftError, gathering
from ..target.capture import depth_of
from ..target.pairing import describe_target


def config_for(
    cls: Any, target: PretrainedConfig, algorithm: AlgorithmBase, aux_layers: tuple[int, ...] | None, draft_vocab_size: int | None
) -> Any:
    """See `BaseDraft.make_config`."""
    algorithm, sized = algorithm.fitted(target), algorithm.sized_by(target)
    text, depth, spec = target.get_text_config(), depth_of(target), algorithm.spec
    end = BEFORE_NORM if spec.before_norm else depth
    usual = (end,) if spec.final else algorithm.aux_layers(depth)
    layers = aux_layers or usual or cls.aux_layers(target, spec.num_aux)
    size = draft_vocab_size or text.vocab_size
    problems: list[str] = []
    with gathering(problems):
        check_aux_layers(layers, depth, spec.final)
    if len(layers) != spec.num_aux:
        problems.append(f"aux_layers={list(layers)} are {len(layers)} layers, but num_aux={spec.num_aux}: make them agree")
    if not 1 <= size <= text.vocab_size:
        problems.append(f"draft_vocab_size={size} does not fit the target's vocabulary of {text.vocab_size}: choose 1 to {text.vocab_size}")
    elif spec.target_head and size != text.vocab_size:
        problems.append(
            f"draft_vocab_size={size}: a draft by algorithm '{algorithm.name}' uses its target's own head, so its vocabulary is the "
            f"target's {text.vocab_size}: leave draft_vocab_size out"
        )
    if problems:
        raise ForedraftError("\n  ".join(problems))
    config = cls.config_class(
        **cls.shape(sized.get_text_config()),
        num_aux_hidden_states=len(layers),
        eagle_aux_hidden_state_layer_ids=list(layers),
        num_hidden_layers=spec.num_layers,
        vocab_size=text.vocab_size,
        draft_vocab_size=size,
        target_hidden_size=text.hidden_size,
        tie_word_embeddings=False,
        **({"target_config": sized.to_dict()} if spec.layers_of else {}),
        foredraft={
            "algorithm": algorithm.name,
            "options": algorithm.options.model_dump(mode="json"),
            "adapter": cls.name,
            "architecture": cls.architecture_for(spec),
            "spec": spec.model_dump(mode="json"),
            "max_tokens": algorithm.max_tokens,
            "target": describe_target(target),
            "versions": versions(),
        },
    )
    if spec.mask_token:
        set_mask_token(config, text.vocab_size - 1 if spec.mask_token_id is None else spec.mask_token_id)
    config.update(algorithm.engine_fields(config))
    return config


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
    return {name: _version(name) for name in ("foredraft", "torch", "transformers")}


_version = cache(metadata.version)
