"""Every key of a run file and every option of every plugin, told by their schemas."""

import dataclasses
import json
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..registry import Registered, Registry
from ..training.settings import RunConfig

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

Row = tuple[str, str, str, str]
"""Key, type, default (as YAML), what it is."""


def run_keys() -> list[Row]:
    """The keys of a run file; those of a section dotted, sorted."""
    return sorted(_rows(RunConfig))


def training_keys() -> list[Row]:
    """The training arguments whose defaults are not those of transformers, sorted."""
    from ..training import DraftTrainingArguments

    own = [f for f in dataclasses.fields(DraftTrainingArguments) if f.name in vars(DraftTrainingArguments)["__annotations__"]]
    return sorted((f"training.{f.name}", _type(f.type), json.dumps(f.default), f.metadata["help"]) for f in own if f.name != "output_dir")


def options(r: Registered) -> list[Row]:
    """The options of a plugin's class, sorted; none where it takes none."""
    schema = getattr(r.cls, "Options", None)
    return sorted(_rows(schema)) if schema is not None else []


def offered(registry: Registry, name: str | None = None, distribution: str | None = None) -> list[Registered]:
    """What plugins offer, sorted by kind and name: all of it, or what bears a name, or what a distribution brings."""
    found = [r for r in registry.registered if name in (None, r.name) and distribution in (None, r.distribution)]
    return sorted(found, key=lambda r: (r.kind, r.name, r.distribution))


def about(r: Registered) -> str:
    """What a plugin's class says of itself."""
    types = getattr(r.cls, "model_types", ())
    return r.cls.summary + (f" (model_type {', '.join(types)})" if types else "")


def as_markdown(registry: Registry) -> str:
    """The page `docs/reference/keys.md`: run files, then all that foredraft itself brings."""
    parts = [
        "# Keys and options\n\n"
        "Every key of a run file (`foredraft train RUN.yaml KEY=VALUE ...`), and every option of what foredraft brings.\n"
        "`foredraft train --keys` prints the same with the plugins that are installed, `foredraft info NAME` tells of one.\n"
        "Written from the schemas by `foredraft plugins --write docs/reference/keys.md`.\n",
        f"## Run file\n\n{_table(run_keys())}",
        "## Training arguments\n\nAll fields of transformers' `TrainingArguments` are keys of `training`, but for `output_dir` and "
        f"`resume_from_checkpoint`. These have other defaults here:\n\n{_table(training_keys())}",
    ]
    kind = ""
    for r in offered(registry, distribution="foredraft"):
        if r.kind != kind:
            kind = r.kind
            parts.append(f"## {kind.capitalize()}s\n")
        parts.append(f"### {r.name}\n\n{about(r)}\n\n{_table(rows) if (rows := options(r)) else 'It takes no options.'}\n")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _rows(model: type[BaseModel], prefix: str = "") -> Iterable[Row]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True), default=str)
            yield f"{prefix}{name}", _type(field.annotation) + _bounds(field), default, field.description or ""


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in arguments if a is not types.NoneType)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is list or origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _bounds(field: FieldInfo) -> str:
    limits = [f" {sign} {getattr(m, name)}" for name, sign in BOUNDS.items() for m in field.metadata if hasattr(m, name)]
    return ",".join(limits)


def _table(rows: Sequence[Row]) -> str:
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for key, kind, default, text in rows:
        shown = default if default == "required" else f"`{default}`"
        lines.append(f"| `{key}` | {kind.replace('|', '/')} | {shown} | {text.replace('|', '/')} |")
    return "\n".join(lines)
