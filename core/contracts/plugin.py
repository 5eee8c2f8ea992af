"""What all kinds of plugins share: a name, and a check of what a class still lacks, made before it is used."""

import inspect
from abc import ABC
from typing import Any, ClassVar


class Plugin(ABC):
    """A class that a plugin offers. Its required methods are abstract; `lacking` names those that are missing, all at once."""

    name: ClassVar[str]
    """By which it is asked for."""
    summary: ClassVar[str] = ""
    """A line for `foredraft plugins`."""

    @classmethod
    def lacking(cls) -> list[str]:
        """What the class still needs, a text each."""
        texts = [] if isinstance(getattr(cls, "name", None), str) else ["name: the name it is asked for by"]
        return texts + [_signature(cls, method) for method in sorted(cls.__abstractmethods__)]


def _signature(cls: type, method: str) -> str:
    """How an abstract method is to be written."""
    found: Any = inspect.getattr_static(cls, method)
    function: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    signature = inspect.signature(function)
    parameters = ", ".join(signature.parameters)
    return f"{'@property ' if isinstance(found, property) else ''}def {method}({parameters}) -> {signature.return_annotation}"
