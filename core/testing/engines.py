"""`EngineTests`: what every engine must do, whatever it serves; see `docs/testing.md`."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from ..contracts.engine import EngineBase
from ..contracts.finding import Finding, Severity
from .common import Conformance, missing, registry_of

UNKNOWN = {"architectures": ["DraftThatNobodyKnows"]}
ODD: tuple[Any, ...] = (None, [], {}, "", "x", -1, 10**30, 0.5, True, [[]], [None], {"x": None})
"""What stands in configs that were written by hand, by other programs or by other versions."""


@dataclass
class OnDisk:
    """A draft's files, of which nothing but the config is known."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)

    def tensor(self, name: str) -> Any:
        """None can be loaded."""
        raise KeyError(name)


class EngineTests(Conformance):
    """Subclass it as `class TestMine(EngineTests)` and supply the fixtures `engine` and `served`."""

    @pytest.fixture
    def engine(self) -> type[EngineBase]:
        """The engine under test."""
        raise missing(self, "engine", "the engine under test, a class", "MyEngine")

    @pytest.fixture
    def served(self) -> dict[str, Any]:
        """The `config.json` of a draft that it serves."""
        raise missing(self, "served", "the config.json of a draft that it serves", '{"architectures": ["LlamaForCausalLMEagle3"], ...}')

    def test_registers(self, engine: type[EngineBase]) -> None:
        """The registry takes it, and `foredraft plugins` has a line to show."""
        assert registry_of(engine).engines() == {engine.name: engine}
        assert engine.summary, f"{engine.__name__} needs a `summary`: `foredraft plugins` shows it"

    def test_serves(self, engine: type[EngineBase], served: dict[str, Any]) -> None:
        """It serves what it is said to serve."""
        reason = engine().refuses(served)
        assert reason is None, f"refuses() gives {reason!r} for `served`, a draft that the engine is said to serve: it must give None"

    @pytest.mark.parametrize("config", [{}, UNKNOWN], ids=["empty", "unknown"])
    def test_refuses_with_a_reason(self, engine: type[EngineBase], config: dict[str, Any]) -> None:
        """What it does not know is refused, in words, and doctor is told the same."""
        reason = engine().refuses(config)
        assert reason is not None, f"refuses({config}) gives None: users would be given a command for a draft that the engine cannot load"
        assert isinstance(reason, str), f"refuses({config}) gives {reason!r}: a reason is a text"
        assert len(reason.split()) > 3, f"refuses({config}) gives {reason!r}: say what was found, and what the engine takes"
        assert "\n" not in reason, f"refuses({config}) gives {reason!r}: it is shown in a table, in one line"
        found = engine().findings(OnDisk(config))
        assert any(reason in f.found for f in found), f"findings() does not say why the draft is refused ({reason!r}): begin with super()'s"

    def test_arguments(self, engine: type[EngineBase], served: dict[str, Any]) -> None:
        """A list of words that name draft and target, spaces included, and how many tokens to draft."""
        arguments = engine().arguments(served, "my drafts/one", "my targets/two", 3)
        check_arguments(arguments)
        for path in ("my drafts/one", "my targets/two"):
            assert any(path in word for word in arguments), f"no argument holds '{path}', in {arguments}: it may be cut at its spaces"
        others = engine().arguments(served, "my drafts/one", "my targets/two", 5)
        assert others != arguments, f"the command for 5 tokens is that for 3: {arguments}"

    def test_odd_configs(self, engine: type[EngineBase], served: dict[str, Any]) -> None:
        """Whatever stands in a field, the draft is served or refused with a reason; nothing is raised, and the config stays as it was."""
        subject = engine()
        for name, value, config in changed(served):
            before = deepcopy(config)
            try:
                reason = subject.refuses(config)
                arguments = None if reason else subject.arguments(config, "DRAFT", "TARGET", 4)
                subject.findings(OnDisk(config))
            except Exception as error:
                raise AssertionError(f"{name} = {value!r} raises {type(error).__name__}: {error}. Check types before use") from error
            assert reason is None or (isinstance(reason, str) and reason), f"{name} = {value!r}: refuses() gives {reason!r}, no reason"
            if arguments is not None:
                check_arguments(arguments)
            assert config == before, f"{name} = {value!r}: the engine has changed the config it was given"

    def test_findings(self, engine: type[EngineBase], served: dict[str, Any]) -> None:
        """Each says what is there, what it breaks and what to do, under an id that begins with the engine's name."""
        for _, _, config in changed(served):
            for found in engine().findings(OnDisk(config)):
                assert isinstance(found, Finding), f"findings() gives {found!r}: it must give foredraft.contracts.Finding objects"
                assert found.id.startswith(f"{engine.name}-"), (
                    f"the finding '{found.id}' must be called '{engine.name}-...': ids are global"
                )
                assert found.severity in get_args(Severity), f"the finding '{found.id}' has severity {found.severity!r}"
                empty = [part for part in ("found", "breaks", "mend") if not getattr(found, part)]
                assert not empty, f"the finding '{found.id}' does not say {', '.join(empty)}"


def check_arguments(arguments: Any) -> None:
    """They are words, as a shell would hand them over."""
    assert isinstance(arguments, list), f"arguments() gives {type(arguments).__name__}: it must be a list, one argument each"
    wrong = [word for word in arguments if not isinstance(word, str) or not word]
    assert arguments, "arguments() gives an empty list: the first one is the program"
    assert not wrong, f"arguments() gives {wrong}: every one must be a text that is not empty (str() of a number)"


def changed(served: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(field, odd value, config) for every field of a config, and the config without it."""
    for name in served:
        yield name, "nothing", {key: deepcopy(value) for key, value in served.items() if key != name}
        for value in ODD:
            yield name, value, {**deepcopy(dict(served)), name: deepcopy(value)}
