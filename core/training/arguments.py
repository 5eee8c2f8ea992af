"""The keys under `training:` and their types, read from the source of transformers: importing it would take seconds."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, create_model

from ..contracts.options import Frozen
from ..errors import describe_validation, nearest

LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "num_train_epochs": 0,
}
"""What transformers takes in silence, or stumbles over later."""
WIDER = {"fsdp": bool | str | None}
"""What it takes beyond its annotation."""


@cache
def training_schema() -> type[Frozen]:
    """Every field of TrainingArguments: optional, of its type where that is one of Python's own, and within reason."""
    package = find_spec("transformers")
    assert package is not None and package.submodule_search_locations  # noqa: PT018 it is a dependency
    source = Path(package.submodule_search_locations[0], "training_args.py").read_text(encoding="utf-8")
    (cls,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    fields: dict[str, Any] = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            name = node.target.id
            annotation = WIDER.get(name) or eval(ast.unparse(node.annotation), {}, _Types())
            fields[name] = (annotation, Field(None, ge=LEAST.get(name)))
    return create_model("TrainingFields", __base__=Frozen, **fields)


def check_training(training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(training arguments in their types, what is wrong with them)."""
    known = training_schema().model_fields
    problems = [
        f"unknown training argument '{key}'{nearest(str(key), known)} (see transformers.TrainingArguments)"
        for key in training
        if key not in known
    ]
    try:
        typed = training_schema().model_validate({key: value for key, value in training.items() if key in known})
    except ValidationError as error:
        return {}, [*problems, describe_validation(error, known, "training.")]
    return typed.model_dump(exclude_unset=True), problems


class _Types(dict[str, Any]):
    """What names in annotations stand for; transformers' own classes for anything."""

    def __missing__(self, name: str) -> Any:
        return {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict, "Literal": Literal}.get(name, Any)
