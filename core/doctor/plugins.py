"""What plugins say of a draft: the algorithm that made it, the format that it is written in, engines; a plugin that stumbles is named."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from ..contracts.algorithm import AlgorithmBase
from ..contracts.finding import Finding, warning
from ..files.spellings import flat
from .subject import Subject


def algorithms(s: Subject) -> Iterator[Finding]:
    """The findings of the algorithm that made it; of a peer's draft, of all, as what is lacking may be what would tell its own."""
    draft: Any = SimpleNamespace(config=flat(s.fields), tensors={name: s.draft.tensors[file] for name, file in s.names.items()})
    known = [cls for cls in s.registry.algorithms().values() if issubclass(cls, AlgorithmBase)]
    for cls in [s.algorithm] if s.made and s.algorithm else known:
        yield from stumbling(cls, lambda asked: asked.findings(draft))


def formats(s: Subject) -> Iterator[Finding]:
    """The findings of the formats that recognise it."""
    for form in s.forms if not s.made else ():
        yield from stumbling(form, lambda asked: asked.findings(s.draft))


def stumbling(plugin: Any, ask: Callable[[Any], Iterable[Finding]]) -> list[Finding]:
    """What a plugin says, or that its checks failed."""
    try:
        return list(ask(plugin))
    except Exception as error:  # it may stumble over what it did not expect
        text = f"its checks failed: {type(error).__name__}: {error}"[:300]
        return [warning(f"{plugin.name}-checks", text, f"nothing is known of what {plugin.name} looks at", "report it to the plugin")]


CHECKS = (algorithms, formats)
