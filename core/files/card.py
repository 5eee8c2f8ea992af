"""What a draft's directory holds for people and for transformers, beside config and weights: a model card and `custom_generate`."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from ..contracts.algorithm import tokens_to_draft
from ..errors import ForedraftError
from ..registry import default_registry
from .hub import ID
from .reading import most_tokens
from .writing import write_text

CARD = "README.md"


def accompany(fields: Mapping[str, Any], directory: Path, before: Path) -> None:
    """Write the card and `custom_generate/generate.py` of a draft with the config `fields` to `directory`, the next content of `before`."""
    write_text(directory / CARD, _kept(before) or card(fields))
    write_text(directory / "custom_generate" / "generate.py", _template("generate.py"))


def renew_card(fields: Mapping[str, Any], directory: Path, before: Mapping[str, Any]) -> None:
    """Tell what changed since the config was `before`, unless somebody has edited the card."""
    file = directory / CARD
    if file.exists() and file.read_text(encoding="utf-8") == card(before):
        write_text(file, card(fields))


def card(fields: Mapping[str, Any]) -> str:
    """The model card of a draft with this `config.json`: what it is, where it comes from, how it is served."""
    from huggingface_hub import ModelCard, ModelCardData

    made = fields["foredraft"]
    name, recorded = made["target"]["name"] or "", made.get("data")
    data = ModelCardData(
        library_name="foredraft",
        pipeline_tag="text-generation",
        base_model=name if _public(name) else None,
        datasets=[source for source in recorded["sources"] if _public(source)] or None if recorded else None,
        tags=["speculative-decoding", "draft-model", made["algorithm"]],
    )
    target = public_name(name) or made["target"]["model_type"]
    text = ModelCard.from_template(
        data,
        template_str=_template("card.md"),
        title=f"{made['algorithm']} draft for {target}",
        target=target,
        made=made,
        data=f"{', '.join(recorded['sources'])}: {recorded['packed']}" if recorded else "not recorded",
        measured=made.get("measured", {}),
        layers=fields["eagle_aux_hidden_state_layer_ids"],
        draft_vocab_size=fields["draft_vocab_size"],
        vocab_size=fields["vocab_size"],
        commands=_commands(fields, target),
    )
    return f"{str(text).rstrip()}\n"


def public_name(name: str) -> str:
    """What to call a target or data set in public: its id on the hub, or the last part of a local path."""
    return name if _public(name) else Path(name).name


def _commands(fields: Mapping[str, Any], target: str) -> dict[str, str]:
    """How each engine that takes the draft serves it; what is made at once is drafted whole."""
    tokens = tokens_to_draft(None, most_tokens(fields))
    commands = {}
    for cls in (r.cls for r in default_registry().registered if r.kind == "engine"):
        with suppress(Exception):  # an engine is a plugin, and a draft is saved whatever it stumbles over
            engine = cls()
            if not engine.refuses(fields):
                lines = (engine.prepare(fields, "DRAFT", target), engine.arguments(fields, "DRAFT", target, tokens))
                commands[engine.summary or engine.name] = "\n".join(shlex.join(words) for words in lines if words)
    return commands


def _kept(directory: Path) -> str | None:
    """The card in `directory` if somebody has edited it: what people wrote is not replaced."""
    from .reading import read_config

    file = directory / CARD
    try:
        text = file.read_text(encoding="utf-8")
        return None if text == card(read_config(directory)) else text
    except FileNotFoundError:
        return None
    except (ForedraftError, KeyError, TypeError, AttributeError):  # of a config that does not say whose draft it is
        return text


def _public(name: str) -> bool:
    """Whether a name is an id on the hub, as far as can be told here."""
    return bool(ID.fullmatch(name)) and not Path(name).exists()


def _template(name: str) -> str:
    return (resources.files("foredraft") / "templates" / f"{name}.txt").read_text(encoding="utf-8")
