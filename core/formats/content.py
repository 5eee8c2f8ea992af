"""What a checkpoint holds, told by its content: in whose format it is written, and the algorithm that made it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contracts.algorithm import AlgorithmBase
from ..contracts.engine import Config
from ..contracts.format import FormatBase
from ..errors import ForedraftError, few
from ..registry import Registry

Names = Collection[str]


@dataclass(frozen=True)
class Content:
    """A peer's checkpoint in our words."""

    form: FormatBase
    algorithm: str
    config: Mapping[str, Any]
    """All fields that describe the draft side by side."""
    names: Mapping[str, str]
    """Its tensors' names by ours."""


def recognise(config: Config, names: Names, registry: Registry) -> Content:
    """What a checkpoint with this `config.json` and these tensors is.

    Raises `ForedraftError` with what was seen if it is nobody's or two formats', if the names mix two formats, or if the config tells
    another algorithm than the tensors do.
    """
    form = _form(config, names, registry)
    told, flat = form.algorithm(config), form.flatten(config)
    ours: dict[str, list[str]] = {}
    for name in names:
        if (mine := form.rename(name)) is not None:
            ours.setdefault(mine, []).append(name)
    if twice := [" and ".join(theirs) for theirs in ours.values() if len(theirs) > 1]:
        raise ForedraftError(f"tensors of two formats in one checkpoint: {'; '.join(twice[:5])}\n{seen(config, names)}")
    algorithm = algorithm_of(ours, registry, told)
    if algorithm is None and told and not _told_by(registry.algorithm(told)):
        algorithm = told  # its own tensors do not tell it
    if algorithm is None:
        raise ForedraftError(f"names as {form.name} writes them, but not a draft's\n{_known(registry)}\n{seen(config, names)}")
    if told not in (None, algorithm):
        raise ForedraftError(f"config.json says '{told}', but the tensors are those of {algorithm}\n{seen(config, names)}")
    return Content(form, algorithm, flat, {mine: theirs[0] for mine, theirs in ours.items()})


def algorithm_of(names: Names, registry: Registry, told: str | None = None) -> str | None:
    """The algorithm whose draft holds tensors of these names, ours: of those whose tensors are all there, the one that names most.

    A variant counts before its parent, unless it inherits what tells it. Of two that remain the one that the config has `told` counts.
    Raises `ForedraftError` if it tells none of them.
    """
    held = {name: cls for name, cls in registry.algorithms().items() if _told_by(cls) and set(names) >= _told_by(cls)}
    best = [name for name, cls in held.items() if not any(_before(other, cls) for other in held.values())]
    if told in best:
        return told
    if len(best) > 1:
        raise ForedraftError(f"two algorithms made it, by its tensors: {' and '.join(best)}; uninstall the one that did not")
    return best[0] if best else None


def _before(one: Any, other: Any) -> bool:
    if _told_by(one) == _told_by(other):
        return one is not other and issubclass(other, one)
    return _told_by(one) > _told_by(other) or issubclass(one, other)


def known_by(forms: Iterable[FormatBase], names: Names, config: Config) -> list[FormatBase]:
    """The formats that recognise a checkpoint."""
    return [form for form in forms if form.recognises(names, config)]


def _form(config: Config, names: Names, registry: Registry) -> FormatBase:
    forms: list[FormatBase] = [cls() for cls in registry.formats().values()]
    claims = known_by(forms, names, config)
    claims = [form for form in claims if form.priority == max(c.priority for c in claims)]
    if not claims:
        known = "\n".join(f"    {form.name}: {form.sign}" for form in forms)
        raise ForedraftError(f"this is no draft in a format that foredraft reads\n  known, by\n{known}\n{seen(config, names)}")
    if len(claims) > 1:
        both = " and ".join(f"{form.name} ({form.sign})" for form in claims)
        raise ForedraftError(f"two formats claim this checkpoint: {both}\n  uninstall the one that is not meant\n{seen(config, names)}")
    return claims[0]


def _told_by(cls: Any) -> frozenset[str]:
    """Nothing tells what has no weights."""
    return cls.told_by if issubclass(cls, AlgorithmBase) else frozenset()


def _known(registry: Registry) -> str:
    told = {name: ", ".join(sorted(_told_by(cls))) for name, cls in registry.algorithms().items()}
    return "\n".join(["  known, by", *(f"    {name}: {tensors}" for name, tensors in told.items() if tensors)])


def seen(config: Config, names: Names, most: int = 24) -> str:
    """What a checkpoint holds, two lines."""

    def some(items: Names) -> str:
        return few([item[:80] for item in sorted(items)], most) or "nothing"

    return f"  seen: tensors {some(names)}\n        config fields {some(config)}"
