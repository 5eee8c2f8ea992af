"""Finds adapters, algorithms, engines and formats through entry points; a broken plugin is reported, never fatal."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

import pluggy
from pydantic import ValidationError

from .contracts import AlgorithmBase, DrafterBase, DraftModel, EngineBase, FormatBase, ObjectiveBase, hookspecs
from .contracts.plugin import Plugin
from .errors import ForedraftError, describe_validation, nearest

KINDS: dict[str, type[Plugin]] = {
    "adapter": DraftModel,
    "algorithm": DrafterBase,
    "engine": EngineBase,
    "format": FormatBase,
    "objective": ObjectiveBase,
}
"""What plugins bring, by the hooks `foredraft_adapters`, `foredraft_algorithms`, ..., and the contract of each."""
DEFAULT_ALGORITHM = "eagle3"


@dataclass(frozen=True)
class Registered:
    """One class that a plugin offers."""

    kind: str
    name: str
    cls: Any
    distribution: str


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be used, and why."""

    name: str
    distribution: str
    error: str

    def __str__(self) -> str:
        return f"{self.name} (from {self.distribution}): {self.error}"


@dataclass
class Registry:
    """What is installed. Build your own in tests: `Registry(entry_points=[])`, then `register(module)`.

    `prefer` maps a name to the distribution that may own it when two claim it.
    """

    entry_points: Iterable[Any] | None = None
    prefer: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.broken: list[Broken] = []
        self.registered: list[Registered] = []
        points = metadata.entry_points(group=hookspecs.GROUP) if self.entry_points is None else self.entry_points
        for point in sorted(points, key=lambda p: p.name):
            distribution = point.dist.name if point.dist is not None else "an unknown distribution"
            self._load(point.load, point.name, distribution)

    def register(self, module: object, distribution: str = "this process") -> None:
        """Add a plugin that has no entry point (tests, notebooks). `module` is any object with hook implementations."""
        before = len(self.broken)
        self._load(lambda: module, getattr(module, "__name__", type(module).__name__), distribution)
        if len(self.broken) > before:
            raise ForedraftError(f"plugin {self.broken.pop()}")

    def adapters(self) -> dict[str, Any]:
        """Adapter classes by name."""
        return {r.name: r.cls for r in self._unique("adapter")}

    def algorithms(self) -> dict[str, Any]:
        """Algorithm classes by name."""
        return {r.name: r.cls for r in self._unique("algorithm")}

    def engines(self) -> dict[str, Any]:
        """Engine classes by name."""
        return {r.name: r.cls for r in self._unique("engine")}

    def formats(self) -> dict[str, Any]:
        """Format classes by name."""
        return {r.name: r.cls for r in self._unique("format")}

    def objectives(self) -> dict[str, Any]:
        """Objective classes by name."""
        return {r.name: r.cls for r in self._unique("objective")}

    def adapter(self, name: str) -> Any:
        """The adapter class called `name`. Raises `ForedraftError` if there is none, or if two distributions claim it."""
        return self._get("adapter", name)

    def algorithm(self, name: str) -> Any:
        """The algorithm class called `name`. Raises `ForedraftError` if there is none, or if two distributions claim it."""
        return self._get("algorithm", name)

    def engine(self, name: str) -> Any:
        """The engine class called `name`. Raises `ForedraftError` if there is none, or if two distributions claim it."""
        return self._get("engine", name)

    def format(self, name: str) -> Any:
        """The format class called `name`. Raises `ForedraftError` if there is none, or if two distributions claim it."""
        return self._get("format", name)

    def objective(self, name: str) -> Any:
        """The objective class called `name`. Raises `ForedraftError` if there is none, or if two distributions claim it."""
        return self._get("objective", name)

    def make_algorithm(self, name: str, options: Mapping[str, Any]) -> Any:
        """The algorithm `name` with its options checked. Raises `ForedraftError` that lists every wrong one."""
        return self._make("algorithm", name, options)

    def make_format(self, name: str, options: Mapping[str, Any]) -> Any:
        """The format `name` with the options of an export checked. Raises `ForedraftError` that lists every wrong one."""
        return self._make("format", name, options)

    def adapter_for(self, model_type: str, target: Any = None) -> Any:
        """The adapter class for targets of a `model_type`; where none lists it, a generic one that takes the config `target`.

        Raises `ForedraftError` that names what was asked, what is known, which plugins failed, and how to write one.
        """
        claims = [r for r in self._of("adapter") if model_type in r.cls.model_types]
        refusals = ""
        for r in self._of("adapter") if not claims and target is not None else ():
            if r.cls.generic and (reason := r.cls.refuses(target)):
                refusals += f"  adapter '{r.name}' cannot take it: {reason}\n"
            elif r.cls.generic:
                claims.append(r)
        if not claims:
            known = {t: r.name for r in self._of("adapter") for t in r.cls.model_types}
            raise ForedraftError(
                f"no adapter for targets of model_type '{model_type}'{nearest(model_type, known)}\n"
                f"  known: {', '.join(f'{t} ({a})' for t, a in sorted(known.items())) or 'none'}\n"
                f"{refusals}{self._broken_text()}"
                "  to add one: subclass foredraft.BaseDraft, list the model_type in `model_types`, and return the class from the hook\n"
                "  foredraft_adapters() of a package with an entry point in the group 'foredraft' (see adapters/llama.py)"
            )
        return self._one(claims, f"targets of model_type '{model_type}'").cls

    def double_claims(self) -> list[str]:
        """What two plugins claim at once, a text each."""
        problems = []
        for kind, name in sorted({(r.kind, r.name) for r in self.registered}):
            try:
                self._one([r for r in self._of(kind) if r.name == name], f"the {kind} name '{name}'")
            except ForedraftError as error:
                problems.append(str(error))
        return problems

    def _get(self, kind: str, name: str) -> Any:
        claims = [r for r in self._of(kind) if r.name == name]
        if not claims:
            known = sorted({r.name for r in self._of(kind)})
            raise ForedraftError(
                f"unknown {kind} '{name}'{nearest(name, known)}\n  known: {', '.join(known) or 'none'}\n{self._broken_text()}".rstrip()
            )
        return self._one(claims, f"the {kind} name '{name}'").cls

    def _make(self, kind: str, name: str, options: Mapping[str, Any]) -> Any:
        cls = self._get(kind, name)
        try:
            made = cls(cls.Options(**options))
            if isinstance(made, AlgorithmBase):
                _ = made.spec
            return made
        except ValidationError as error:
            raise ForedraftError(f"{kind} '{name}': " + describe_validation(error, cls.Options.model_fields)) from error

    def _of(self, kind: str) -> list[Registered]:
        return [r for r in self.registered if r.kind == kind]

    def _unique(self, kind: str) -> list[Registered]:
        names = sorted({r.name for r in self._of(kind)})
        return [self._one([r for r in self._of(kind) if r.name == n], f"the {kind} name '{n}'") for n in names]

    def _one(self, claims: list[Registered], what: str) -> Registered:
        preferred = [r for r in claims if self.prefer.get(r.name) == r.distribution]
        if len(claims) == 1 or len(preferred) == 1:
            return (preferred or claims)[0]
        owners = " and ".join(f"'{r.name}' of {r.distribution}" for r in claims)
        raise ForedraftError(
            f"{what} is claimed twice: by {owners}\n"
            f"  uninstall one, or choose: FOREDRAFT_PREFER={claims[-1].name}={claims[-1].distribution} (or Registry(prefer={{...}}))"
        )

    def _broken_text(self) -> str:
        return "".join(f"  plugin that failed to load: {b}\n" for b in self.broken)

    def _load(self, load: Callable[[], Any], name: str, distribution: str) -> None:
        try:
            offered = _offered(load())
            for kind, cls in offered:
                if problems := _lacking(kind, cls):
                    raise TypeError(f"{kind} {getattr(cls, '__name__', cls)} needs\n    " + "\n    ".join(problems))
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            if isinstance(error, KeyboardInterrupt):
                raise
            self.broken.append(Broken(name, distribution, f"{type(error).__name__}: {error}"))
        else:
            self.registered += [Registered(kind, cls.name, cls, distribution) for kind, cls in offered]


def _offered(module: object) -> list[tuple[str, Any]]:
    """What the hooks of one plugin return: (kind, class)."""
    plugins = pluggy.PluginManager(hookspecs.GROUP)
    plugins.add_hookspecs(hookspecs)
    plugins.register(module)
    plugins.check_pending()
    offered = []
    for kind in KINDS:
        hook = getattr(plugins.hook, f"foredraft_{kind}s")
        results = hook()
        if len(results) < len(hook.get_hookimpls()):  # pluggy leaves None out
            raise TypeError(f"foredraft_{kind}s() returned None: it must return a list of classes")
        offered += [(kind, cls) for classes in results for cls in classes]
    return offered


def _lacking(kind: str, cls: Any) -> list[str]:
    """What a class still needs to be a plugin of this kind, a text each."""
    base = KINDS[kind]
    if not isinstance(cls, type) or not issubclass(cls, base):
        advised = {DraftModel: "BaseDraft", DrafterBase: "AlgorithmBase"}.get(base, base.__name__)
        return [f"to be a subclass of foredraft.{advised}"]
    return cls.lacking()


@cache
def default_registry() -> Registry:
    """The registry of all installed plugins. `FOREDRAFT_PREFER=name=distribution,...` settles double claims."""
    pairs = [p.split("=", 1) for p in os.environ.get("FOREDRAFT_PREFER", "").split(",") if "=" in p]
    return Registry(prefer=dict(pairs))
