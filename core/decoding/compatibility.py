"""Which targets can be drafted for: asked of a tiny random model of their family, not of a list."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from ..auto import auto_draft
from ..contracts.algorithm import AlgorithmBase, Choose, DrafterBase
from ..contracts.draft import DraftModel
from ..data import DraftCollator
from ..draft.model import BaseDraft
from ..errors import ForedraftError, nearest
from ..registry import Registry, default_registry
from ..target.capture import AuxCapture, decoder_layers
from ..target.target import Target
from . import generate
from .families import tiny_model


@dataclass(frozen=True)
class Verdict:
    """Whether drafts for a model_type work, and by which adapter."""

    model_type: str
    text_type: str
    """The model_type of what reads and writes text in it: another one where it is multimodal."""
    adapter: str | None = None
    problem: str | None = None
    """Why no draft is trained for it; None if a training step worked."""
    decoding: str | None = None
    """Why transformers does not decode with one; None if it does, greedily and losslessly, or none is trained."""
    served: Mapping[str, str | None] = field(default_factory=dict)
    """By engine: why it does not serve one; None if it does."""


def objection(target: PretrainedConfig) -> str | None:
    """Why a target with this config cannot be drafted for, as far as a tiny model of its family shows; None if it can."""
    family: Any = type(target if type(target) in MODEL_FOR_MULTIMODAL_LM_MAPPING else target.get_text_config())
    with torch.device("cpu"):  # the draft may be planned on the meta device
        return _objection(family)


@cache
def _objection(config_class: Any) -> str | None:
    try:
        if config_class().is_encoder_decoder:
            return "it is an encoder with a decoder"
        if config_class not in MODEL_FOR_MULTIMODAL_LM_MAPPING and config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return "transformers has no language model of its own for it"
        model = tiny_model(config_class)
    except Exception as error:  # a family's code may raise anything
        return f"no tiny model of its family can be built to look at: {_short(error)}"
    try:
        examine(model)
    except ForedraftError as error:
        return _short(error)
    except Exception as error:
        return f"a tiny model of its family fails: {_short(error)}"
    return None


def _is_causal(model: PreTrainedModel, ids: Tensor) -> bool:
    early, all_ = (model(input_ids=i, use_cache=False).logits for i in (ids[:, :8], ids))
    return torch.allclose(early, all_[:, :8], rtol=1e-3, atol=1e-3 * float(early.abs().max()))


@torch.no_grad()
def examine(model: PreTrainedModel) -> None:
    """Raises `ForedraftError` unless the model is causal, its hidden states can be captured, and its head is understood."""
    ids = _text(12)
    if not _is_causal(model, ids) and not _is_causal(deepcopy(model).double(), ids):  # a recurrence may amplify what float32 rounds
        raise ForedraftError("its logits depend on what follows: it is no causal decoder")
    count = len(decoder_layers(model))
    target = Target(model, tuple(range(1, count)))
    with AuxCapture(model, target.aux_layers) as captured:
        out = target.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
    text, embedding = model.config.get_text_config(), tuple(target.embedding_weight.shape)
    vocabulary, width = text.vocab_size, text.hidden_size
    if embedding != (vocabulary, width):
        raise ForedraftError(f"its embedding is {embedding}, not its vocabulary by its hidden size, {(vocabulary, width)}")
    told = out.hidden_states if len(out.hidden_states or ()) == count + 1 else ()
    if out.hidden_states and out.hidden_states[1].shape != (1, 12, width):
        raise ForedraftError(
            f"its layers hand on states of shape {tuple(out.hidden_states[1].shape)}, not one vector of {width} per token: "
            "which vector of them engines give a draft, an adapter has to say"
        )
    # The first is the embedding's, as a rule; some list the layers' alone, and the last one's twice.
    if not told or not any(torch.equal(torch.cat(told[i : i + count - 1], dim=-1), captured.aux_BSA) for i in (1, 0)):
        raise ForedraftError("what its layers put out is not what it calls its hidden states")


class _Foretold(DrafterBase):
    """Drafts a text that is known, but for every fifth token."""

    name = "foretold"

    def __init__(self, text_L: Tensor, vocabulary: int):
        super().__init__()
        self.text = [(token + (i % 5 == 0)) % vocabulary for i, token in enumerate(text_L.tolist())]

    def drafter(self, draft: DraftModel | None) -> "_Foretold":
        return self

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        return self.text[len(ids) : len(ids) + limit], []


def try_out(model: PreTrainedModel, registry: Registry | None = None, **options: Any) -> Any:
    """A draft for `model` after a training step and a greedy decode; `options` as in `auto_draft`.

    Raises `ForedraftError` if a trainable parameter gets no gradient, or the decoded text is not the target's own.
    """
    draft = train(model, registry, **options)
    decode(model, draft)
    return draft


def train(model: PreTrainedModel, registry: Registry | None = None, **options: Any) -> Any:
    """A draft for `model` after a training step on two packed documents. Raises `ForedraftError` if a parameter gets no gradient."""
    draft = auto_draft(model.config, registry=registry, **options)
    target = Target(model, draft.config.aux_layers)
    draft.start_from(target)
    ids = _text(20)[0].tolist()
    row = {"input_ids": ids, "documents": [0] * 9 + [1] * 11, "spans": [-1] * 2 + [0] * 7 + [-1] * 2 + [1] * 9, "row": 0}
    batch = DraftCollator(cast(AlgorithmBase, draft.algorithm))([row])
    loss = draft(batch, target.capture(batch))["loss"]
    loss.backward()
    moved = {name: p.grad is not None and bool(p.grad.any() and p.grad.isfinite().all()) for name, p in draft.named_parameters()}
    if idle := [name for name, p in draft.named_parameters() if p.requires_grad and not moved[name]]:
        raise ForedraftError(f"a training step (loss {float(loss):.3g}) gave no gradient to {', '.join(idle)}")
    return draft.eval()


def decode(model: PreTrainedModel, draft: BaseDraft) -> None:
    """Raises `ForedraftError` unless decoding with `draft`, and with drafts that are right or wrong by turns, gives the model's text."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    ids, vocabulary = _text(12), model.config.get_text_config().vocab_size
    plain = model.generate(ids, **settings)
    for drafts, count in ((draft, None), (_Foretold(plain[0], vocabulary), 3)):
        if not torch.equal(generate(model, drafts, ids, num_draft_tokens=count, **settings), plain):
            raise ForedraftError("verifying drafted tokens changes its text (its cache cannot go back, perhaps)")


def language_models() -> list[str]:
    """The model types that transformers offers as language models, with or without images."""
    return sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def verdict(model_type: str, registry: Registry | None = None) -> Verdict:
    """What becomes of targets of a `model_type` of transformers. Raises `ForedraftError` if it knows no such type."""
    if model_type not in CONFIG_MAPPING:
        raise ForedraftError(f"transformers knows no model_type '{model_type}'{nearest(model_type, CONFIG_MAPPING.keys())}")
    registry, found = registry or default_registry(), Verdict(model_type, model_type)
    try:
        whole = CONFIG_MAPPING[model_type]()
        found = replace(found, text_type=whole.get_text_config().model_type)
        if not any(found.text_type in a.model_types for a in registry.adapters().values()) and (problem := objection(whole)):
            return replace(found, problem=problem)
        found = replace(found, adapter=registry.adapter_for(found.text_type, whole).name)
        family: Any = type(whole if type(whole) in MODEL_FOR_MULTIMODAL_LM_MAPPING else whole.get_text_config())
        draft = train(model := tiny_model(family), registry)
    except Exception as error:  # a family's code may raise anything
        return replace(found, problem=_short(error))
    found = replace(found, served=_served(model, draft, registry))
    try:
        decode(model, draft)
    except Exception as error:
        return replace(found, decoding=_short(error))
    return found


def _served(model: PreTrainedModel, draft: BaseDraft, registry: Registry) -> dict[str, str | None]:
    """By engine that says which targets it captures hidden states of: why it does not serve the draft behind this one; None if it does."""
    reasons, name = {}, type(model).__name__
    for engine in (cls() for _, cls in sorted(registry.engines().items()) if cls.targets is not None):
        known = {target.replace("_", "") for target in engine.targets}  # Kimi_K25 here is KimiK25 there, and in checkpoints
        unknown = None if name.replace("_", "") in known else f"it hands on no hidden states of {name}"
        reasons[engine.name] = unknown or engine.refuses(draft.config.to_dict())
    return reasons


MEANT = (
    "*Trains*: on a tiny random model of the family, hidden states and head were understood, and an EAGLE-3 step on two packed documents "
    "gave every trainable parameter a gradient. *Decodes*: greedy decoding with the draft, and with drafts half right, gave the target's "
    "own text. *Served*: the engine hands on hidden states of the class (read from its source, see its plugin), and takes the draft that "
    "was trained; no engine was run for it. None of it says how well a draft does. Written by `foredraft targets --write docs/targets.md`."
)


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """The page `docs/targets.md`."""
    trained = [v for v in verdicts if v.problem is None]
    engines = sorted({engine for v in trained for engine in v.served})
    columns = ["model_type", "adapter", "trains", "decodes in transformers", *(f"served by {engine}" for engine in engines)]
    rows = [
        [f"{v.model_type} (as {v.text_type})" if v.text_type != v.model_type else v.model_type, v.adapter or ""]
        + (
            ["yes", v.decoding or "yes", *(v.served[e] or "yes" for e in engines)]
            if v.problem is None
            else [v.problem, *["" for _ in engines], ""]
        )
        for v in verdicts
    ]
    table = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in [columns, ["---"] * len(columns), *rows])
    own = sum(v.adapter != "generic" for v in trained)
    served = ", ".join(f"{sum(v.served[e] is None for v in trained)} by {e}" for e in engines)
    return (
        f"# Targets\n\nOf the {len(verdicts)} model types that transformers {metadata.version('transformers')} offers as language models, "
        f"with or without images, drafts can be trained for {len(trained)}: {own} by an adapter of their own, the others by the generic "
        f"one. Inside transformers {sum(v.decoding is None for v in trained)} of these decode with one; served are {served}.\n\n"
        f"{MEANT}\n\n"
        f"{table}\n"
    )


def _text(length: int) -> Tensor:
    """The ids of a text [1, length] that repeats itself, so that drafts are both taken and rejected."""
    return torch.tensor([[3 + (i * i) % 5 + 7 * (i % 3) for i in range(length)]])


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if isinstance(error, ForedraftError) else f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}")[:200]
