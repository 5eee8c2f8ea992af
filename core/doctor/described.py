"""The model that a draft's config describes, built without memory: its adapter and its algorithm say what belongs to it."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..auto import auto_draft, make_algorithm
from ..contracts.algorithm import AlgorithmBase
from ..contracts.engine import architecture_of
from ..contracts.options import MOST
from ..contracts.spec import DraftSpec
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..files.spellings import MASK_TOKEN, flat, value
from ..registry import DEFAULT_ALGORITHM, Registry

LARGE = 2**24
"""More than any size of a real model."""
SHAPELESS = ("quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "dtype", "torch_dtype")
"""Fields of a peer's that change no tensor's name or shape; others say what is wrong with them."""


def build(fields: Mapping[str, Any] | None, registry: Registry) -> BaseDraft | None:
    """The model of a `config.json` of ours; None if none can be built, or if it would be absurdly large."""
    import torch

    made = (fields or {}).get("foredraft")
    options = made.get("options") if isinstance(made, Mapping) else None
    if fields is None or not isinstance(options, Mapping):
        return None
    tokens = [value(fields, name) for name in MASK_TOKEN]
    counts = [fields.get(name) for name in ("num_hidden_layers", "num_aux_hidden_states")] + [
        n for n in options.values() if n not in tokens
    ]
    sizes = [*fields.values(), *options.values()]
    absurd = any(isinstance(n, int) and n > most for most, found in ((LARGE, sizes), (MOST, counts)) for n in found)
    if absurd or not isinstance(fields.get("num_hidden_layers"), int):
        return None
    try:
        with torch.device("meta"):
            return auto_draft(fields, registry=registry)
    except Exception:  # whatever a config by someone else makes a constructor raise; other checks say what is wrong with it
        return None


def as_ours(
    fields: Mapping[str, Any], algorithm: type[AlgorithmBase] | None, registry: Registry, chunks: int | None, width: int, qk_norm: bool
) -> dict[str, Any] | None:
    """A peer's fields with what foredraft would have recorded: what its tensors (`chunks` aux states of `width`) and its fields tell.

    None where they make no draft.
    """
    cls = algorithm or registry.algorithm(DEFAULT_ALGORITHM)
    layers, vocabulary, aux = fields.get("num_hidden_layers"), fields.get("vocab_size"), chunks or 3
    settled = {"num_layers": layers, "num_aux": aux, "qk_norm": qk_norm}
    with suppress(ForedraftError):  # told elsewhere
        settled = cls.options_from(flat(fields)) | settled
    try:
        method = make_algorithm(cls.name, {n: v for n, v in settled.items() if n in cls.Options.model_fields}, registry)
    except ForedraftError:
        return None
    aux = 1 if method.spec.final else aux
    read = [aux + 2] if method.spec.final else list(range(1, aux + 1))
    adapter = _adapter(fields, method.spec, registry)
    target = {"model_type": "", "num_hidden_layers": aux + 2, "hidden_size": width, "vocab_size": vocabulary, "fingerprint": ""}
    return {
        **{name: field for name, field in fields.items() if name not in SHAPELESS},
        "num_aux_hidden_states": aux,
        "eagle_aux_hidden_state_layer_ids": read,
        "draft_vocab_size": fields.get("draft_vocab_size") or vocabulary,
        "target_hidden_size": width,
        "mask_token_id": 0,
        "foredraft": {
            "algorithm": cls.name,
            "options": method.options.model_dump(mode="json"),
            "adapter": adapter.name,
            "architecture": adapter.architecture_for(method.spec),
            "spec": method.spec.model_dump(mode="json"),
            "target": target,
        },
    }


def _adapter(fields: Mapping[str, Any], spec: DraftSpec, registry: Registry) -> Any:
    """The adapter whose drafts engines know by this architecture, else one of this family, else of Llama's shape, as most are."""
    adapters, stated, family = registry.adapters().values(), architecture_of(fields), fields.get("model_type")
    plain = spec.model_copy(update={"qk_norm": False})
    named = [cls for cls in adapters if stated in (cls.architecture_for(spec), cls.architecture_for(plain))]
    akin = [cls for cls in adapters if family in (cls.config_class.model_type, *cls.model_types)]
    return next(iter([*named, *akin])) if named or akin else registry.adapter_for("llama")


def spec_of(algorithm: type[AlgorithmBase]) -> DraftSpec:
    """What an algorithm asks for by default; nothing where it has no defaults."""
    try:
        return algorithm().spec
    except Exception:  # an option may be required
        return DraftSpec.model_validate({})
