"""`auto_draft`: from a target, or a draft, to a draft model; the mapping of configs to classes is open to plugins."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from .contracts.algorithm import AlgorithmBase
from .contracts.config import DraftConfigMixin
from .contracts.spec import DraftSpec
from .draft.model import BaseDraft
from .errors import ForedraftError
from .files.hub import locate
from .files.ours import build, load_draft
from .files.reading import draft_config, read_config
from .registry import DEFAULT_ALGORITHM, Registry, default_registry
from .target.loading import load_config


def auto_draft(
    config: PretrainedConfig | Mapping[str, Any] | str | Path,
    algorithm: str | None = None,
    *,
    adapter: str | None = None,
    aux_layers: tuple[int, ...] | None = None,
    draft_vocab_size: int | None = None,
    registry: Registry | None = None,
    **options: Any,
) -> BaseDraft:
    """A draft model for `config`.

    `config` is a target's config, a target's directory or hub id, a draft's config (object or dict), or a draft's directory or
    hub id (then its weights are loaded, strictly). For a target, the adapter follows from its `model_type` and the weights
    are fresh: `draft.start_from(target)` copies what need not be learned. `algorithm` defaults to EAGLE-3, `aux_layers` (HF
    `hidden_states` indices) to the adapter's choice, `draft_vocab_size` to the target's whole vocabulary; `options` are the algorithm's.

    Raises `ForedraftError` for an unknown architecture, algorithm or option, and for layers or vocabularies that do not fit.
    """
    registry = registry or default_registry()
    asked = {"adapter": adapter, "aux_layers": aux_layers, "draft_vocab_size": draft_vocab_size}
    if isinstance(config, str | Path):
        config = locate(config)
        if (Path(config) / "config.json").exists() and "foredraft" in (fields := read_config(config)):
            made = draft_config(fields, registry, config).foredraft
            return _recorded(load_draft(config, registry, _settled(made, algorithm, options, asked, registry)), options)
        config = load_config(str(config))
    elif isinstance(config, Mapping):
        fields = deepcopy(dict(config))  # transformers changes nested fields in place
        config = draft_config(fields, registry) if "foredraft" in fields else _target_config(fields, registry)
    if hasattr(config, "foredraft"):
        # AutoConfig sees the family's plain config there.
        own: Any = deepcopy(config) if isinstance(config, DraftConfigMixin) else draft_config(config.to_dict(), registry)
        method = _settled(own.foredraft, algorithm, options, asked, registry)
        return _recorded(build(registry.adapter(own.foredraft["adapter"]), own, method, "the draft"), options)
    method = make_algorithm(algorithm or DEFAULT_ALGORITHM, options, registry)
    sized = method.sized_by(config)
    cls = registry.adapter(adapter) if adapter else registry.adapter_for(sized.get_text_config().model_type, sized)
    return cls(cls.make_config(config, method, aux_layers, draft_vocab_size), method)


def make_algorithm(name: str, options: Mapping[str, Any], registry: Registry) -> AlgorithmBase:
    """The algorithm `name`, which has a draft model. Raises `ForedraftError` that lists every wrong option, and for one without weights."""
    made = registry.make_algorithm(name, options)
    if not isinstance(made, AlgorithmBase):
        raise ForedraftError(
            f"algorithm '{name}' has no weights: there is no draft to build, train or export\n"
            f"  run it: foredraft generate (or eval) --algorithm {name}; in Python, foredraft.generate(target, '{name}', ids)"
        )
    return made


def _target_config(fields: Mapping[str, Any], registry: Registry) -> PretrainedConfig:
    name = fields.get("model_type")
    if not isinstance(name, str):
        raise ForedraftError(f"a target's config needs a model_type, found the fields {sorted(fields)}")
    try:
        return AutoConfig.for_model(**fields)
    except ValueError as error:
        registry.adapter_for(name)  # says what is known
        raise ForedraftError(f"transformers cannot make a config for model_type '{name}': {str(error)[:200]}") from error


def _settled(
    made: Mapping[str, Any], algorithm: str | None, options: Mapping[str, Any], asked: Mapping[str, Any], registry: Registry
) -> AlgorithmBase:
    """The algorithm of a draft that is there, with `options` on top of those it was made with; its shape is settled."""
    if fixed := [name for name, value in asked.items() if value is not None]:
        raise ForedraftError(f"{', '.join(fixed)}: this draft's shape is settled; build a new one from the target's config")
    if algorithm not in (None, made["algorithm"]):
        raise ForedraftError(
            f"this draft was made by algorithm '{made['algorithm']}', asked for '{algorithm}': build a new one from the target's config"
        )
    method = make_algorithm(made["algorithm"], {**made["options"], **options}, registry)
    if method.spec != DraftSpec(**made["spec"]):
        raise ForedraftError(f"the options {dict(options)} change the draft's shape: build a new one from the target's config")
    return method


def _recorded(draft: BaseDraft, options: Mapping[str, Any]) -> BaseDraft:
    """The draft with changed options in its config, too, so that what is saved says how it was trained."""
    if options:
        method = draft.algorithm
        changed = {"options": method.options.model_dump(mode="json"), "max_tokens": method.max_tokens}
        draft.config.update({"foredraft": {**draft.config.foredraft, **changed}, **method.engine_fields(draft.config)})
    return draft
