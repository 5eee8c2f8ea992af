"""Finding plugins: what is broken is told and never fatal, what is claimed twice is settled, and who may import whom."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_config

from foredraft import AlgorithmBase, BaseDraft, ForedraftError, Registry, auto_draft, default_registry, hookimpl
from foredraft.registry import KINDS

ROOT = Path(__file__).parents[1]


def plugin(*classes: Any) -> SimpleNamespace:
    """A module-like object that offers classes: drafts as adapters, all else as algorithms."""

    @hookimpl
    def foredraft_adapters() -> list[Any]:
        return [c for c in classes if issubclass(c, BaseDraft)]

    @hookimpl
    def foredraft_algorithms() -> list[Any]:
        return [c for c in classes if not issubclass(c, BaseDraft)]

    return SimpleNamespace(__name__="throw-away", foredraft_adapters=foredraft_adapters, foredraft_algorithms=foredraft_algorithms)


def algorithm(name: str) -> type[AlgorithmBase]:
    return type("Algorithm", (default_registry().algorithm("eagle3"),), {"name": name})


def adapter(name: str, *model_types: str) -> type[BaseDraft]:
    return type("Adapter", (default_registry().adapter("llama"),), {"name": name, "model_types": model_types})


def point(module: Any, name: str = "plugin", distribution: str | None = "some-package") -> SimpleNamespace:
    """An entry point; `module` may be an exception to raise on loading."""

    def load() -> Any:
        if isinstance(module, BaseException):
            raise module
        return module

    return SimpleNamespace(name=name, dist=distribution and SimpleNamespace(name=distribution), load=load)


class Unnamed(AlgorithmBase):
    spec = plan = drafter = None


@hookimpl
def forgets_to_return() -> None: ...


@hookimpl
def exits() -> None:
    sys.exit(3)


NEEDS_ALGORITHM = """TypeError: algorithm Unnamed needs
    name: the name it is asked for by
    def loss(self, draft, batch, signal) -> Step
    @property def wiring(self) -> Wiring"""
NEEDS_ADAPTER = """TypeError: adapter Untyped needs
    def shape(cls, target) -> dict[str, Any]
    model_types: a tuple of the targets' model_type names
    architecture: the name engines know the draft by
    config_class: a class XConfig(DraftConfigMixin, family's config)
    norm_class: the family's norm
    rotary_class: the family's rotary embedding"""
BROKEN = {
    "ImportError: No module named 'flash'": ImportError("No module named 'flash'"),
    "SystemExit: 3": SystemExit(3),
    "SystemExit: 3 (in the hook)": SimpleNamespace(foredraft_algorithms=exits),
    NEEDS_ALGORITHM: plugin(Unnamed),
    "TypeError: algorithm int needs\n    to be a subclass of foredraft.AlgorithmBase": plugin(int),
    "TypeError: foredraft_algorithms() returned None: it must return a list of classes": SimpleNamespace(
        foredraft_algorithms=forgets_to_return
    ),
    NEEDS_ADAPTER: plugin(type("Untyped", (BaseDraft,), {"name": "untyped", "model_types": "llama", "make_mlp": print})),
}


class TestBroken:
    @pytest.mark.parametrize("error", BROKEN)
    def test_is_reported_and_the_others_work(self, error: str) -> None:
        good = plugin(algorithm("good"), adapter("fine", "llama"))
        registry = Registry(entry_points=[point(BROKEN[error], "bad"), point(good, "good", "good-package")])
        assert [str(b) for b in registry.broken] == [f"bad (from some-package): {error.removesuffix(' (in the hook)')}"]
        assert registry.algorithms().keys() == {"good"}
        assert registry.adapter_for("llama").name == "fine"

    def test_is_named_in_unknown_messages(self) -> None:
        registry = Registry(entry_points=[point(ImportError("no flash"), "bad", None)])
        for ask in (lambda: registry.algorithm("x"), lambda: registry.adapter("x"), lambda: registry.adapter_for("x")):
            with pytest.raises(
                ForedraftError, match="plugin that failed to load: bad \\(from an unknown distribution\\): ImportError: no flash"
            ):
                ask()

    def test_an_interrupt_is_no_broken_plugin(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            Registry(entry_points=[point(KeyboardInterrupt())])


class TestDoubleClaims:
    points = (
        point(plugin(algorithm("eagle"), adapter("one", "llama")), "a", "first-package"),
        point(plugin(algorithm("eagle"), adapter("two", "llama")), "b", "second-package"),
    )

    def test_the_error_names_both_distributions(self) -> None:
        registry = Registry(entry_points=self.points)
        both = "is claimed twice: by 'eagle' of first-package and 'eagle' of second-package"
        with pytest.raises(ForedraftError, match=f"the algorithm name 'eagle' {both}"):
            registry.algorithm("eagle")
        with pytest.raises(ForedraftError, match=f"{both}\n  uninstall one, or choose: FOREDRAFT_PREFER=eagle=second-package"):
            registry.algorithms()
        with pytest.raises(
            ForedraftError, match=r"(?s)targets of model_type 'llama' is claimed twice: by 'one' of .*FOREDRAFT_PREFER=two=second-package"
        ):
            registry.adapter_for("llama")
        assert registry.adapter("one").name == "one"
        assert len(registry.double_claims()) == 1

    def test_prefer(self) -> None:
        registry = Registry(entry_points=self.points, prefer={"eagle": "second-package", "one": "first-package"})
        assert registry.algorithm("eagle") is registry.registered[-1].cls
        assert registry.algorithms() == {"eagle": registry.registered[-1].cls}
        assert registry.adapter_for("llama").name == "one"
        assert registry.double_claims() == []

    def test_prefer_by_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FOREDRAFT_PREFER", "eagle=second-package,one=first-package,nonsense")
        assert default_registry.__wrapped__().prefer == {"eagle": "second-package", "one": "first-package"}


class TestUnknown:
    def test_architecture(self) -> None:
        """Asked, known, broken, and how to add one."""
        module = plugin(adapter("llama", "llama"), adapter("qwen", "qwen2", "qwen3"))
        registry = Registry(entry_points=[point(module), point(ImportError("no flash"), "bad")])
        with pytest.raises(ForedraftError) as raised:
            registry.adapter_for("qwen4")
        assert str(raised.value) == (
            "no adapter for targets of model_type 'qwen4'; did you mean 'qwen3'?\n"
            "  known: llama (llama), qwen2 (qwen), qwen3 (qwen)\n"
            "  plugin that failed to load: bad (from some-package): ImportError: no flash\n"
            "  to add one: subclass foredraft.BaseDraft, list the model_type in `model_types`, and return the class from the hook\n"
            "  foredraft_adapters() of a package with an entry point in the group 'foredraft' (see adapters/llama.py)"
        )

    def test_names(self) -> None:
        registry = Registry(entry_points=[point(plugin(algorithm("eagle3"), algorithm("dflash")))])
        with pytest.raises(ForedraftError, match=r"^unknown algorithm 'eagel3'; did you mean 'eagle3'\?\n  known: dflash, eagle3$"):
            registry.algorithm("eagel3")
        with pytest.raises(ForedraftError, match=r"^unknown adapter 'x'\n  known: none$"):
            registry.adapter("x")


class TestRegister:
    def test_a_throw_away_plugin(self) -> None:
        registry = Registry(entry_points=[])
        ours = default_registry().adapter("llama")
        mine = type("Mine", (ours,), {"name": "mine", "model_types": ("llama",)})
        registry.register(plugin(mine, default_registry().algorithm("eagle3")))
        draft = auto_draft(tiny_config(), registry=registry)
        assert type(draft) is mine
        assert draft.config.foredraft["adapter"] == "mine"
        assert {r.distribution for r in registry.registered} == {"this process"}
        assert auto_draft(tiny_config()).config.foredraft["adapter"] == "llama"  # no other registry knows of it

    def test_a_broken_one_raises(self) -> None:
        registry = Registry(entry_points=[])
        with pytest.raises(ForedraftError, match="plugin throw-away \\(from this process\\): TypeError: algorithm Unnamed needs"):
            registry.register(plugin(Unnamed))
        assert registry.broken == []

    def test_no_hooks_at_all(self) -> None:
        registry = Registry(entry_points=[])
        registry.register(SimpleNamespace(__name__="empty"))
        assert registry.registered == []

    def test_a_misspelt_hook(self) -> None:
        @hookimpl
        def foredraft_algoritms() -> list[Any]:
            return []

        with pytest.raises(ForedraftError, match="foredraft_algoritms"):
            Registry(entry_points=[]).register(SimpleNamespace(__name__="typo", foredraft_algoritms=foredraft_algoritms))


def test_our_own_plugins_come_through_entry_points() -> None:
    registry = Registry()
    found = {(r.kind, r.name) for r in registry.registered if r.distribution == "foredraft"}
    assert {("adapter", "llama"), ("algorithm", "eagle3")} <= found
    assert [str(b) for b in registry.broken if b.distribution == "foredraft"] == []
    assert registry.adapter_for("llama").__module__ == "foredraft.adapters.llama"


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after `code`."""
    program = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return {name.split(".")[0] for name in done.stderr.split()}


def test_import_is_light() -> None:
    assert not {"torch", "transformers", "datasets", "pydantic"} & loaded_by("import foredraft; dir(foredraft); foredraft.ForedraftError")


def test_help_is_light() -> None:
    code = "sys.argv = ['foredraft', '--help']\nfrom foredraft.cli import main\ntry: main()\nexcept SystemExit as end: assert not end.code"
    assert not {"torch", "transformers", "datasets", "matplotlib"} & loaded_by(code)


def test_unknown_public_name() -> None:
    import foredraft

    with pytest.raises(AttributeError, match="module 'foredraft' has no attribute 'auto_daft'; public names: AlgorithmBase"):
        foredraft.auto_daft  # noqa: B018
    assert all(getattr(foredraft, name) is not None for name in foredraft.__all__)


def test_what_is_stable_is_listed() -> None:
    """On its page: the public names, those of the kit, and the hooks; no other name stands in the first list."""
    import foredraft
    from foredraft import testing

    page = (ROOT / "docs/reference/stable.md").read_text()
    listed = re.findall(r"`(\w+)`", page.split("`from foredraft import ...`:")[1].split("`from foredraft.testing")[0])
    assert listed == foredraft.__all__
    hooks = [f"foredraft_{kind}s" for kind in KINDS]
    assert not [name for name in (*testing.__all__, *hooks) if f"`{name}`" not in page]


@pytest.mark.parametrize("folder", ["core", "adapters", "plugins"])
def test_no_other_name(folder: str) -> None:
    """`import core` from the repository's root would be a second copy of the package."""
    spec = importlib.util.spec_from_file_location(folder, ROOT / folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"this package is 'foredraft.*', not '{folder}'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(file, absolute module) of every import statement under a folder, in functions too."""
    package = {"core": "foredraft"}.get(folder, f"foredraft.{folder}")
    for file in sorted((ROOT / folder).rglob("*.py")):
        here = [package, *file.relative_to(ROOT / folder).parent.parts]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((str(file), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parts = ".".join(here).split(".")
                base = parts[: len(parts) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from ((str(file), f"{module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [("core", ("foredraft.adapters", "foredraft.plugins")), ("adapters", ("foredraft.plugins",)), ("plugins", ("foredraft.adapters",))],
)
def test_direction_of_imports(folder: str, forbidden: tuple[str, ...]) -> None:
    found = list(imports(folder))
    assert any(module.startswith("foredraft.") for _, module in found)
    assert [(file, module) for file, module in found if module.startswith(forbidden)] == []
