"""What all suites share: declared failures, fixtures that must be supplied, random weights, and comparing."""

from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ..contracts.hookspecs import GROUP, hookimpl
from ..contracts.options import Frozen
from ..contracts.plugin import Plugin
from ..errors import nearest
from ..registry import KINDS, Registry

TOLERANCE = 1e-4
"""What rounding may do in float32, relative to the largest value."""


class Conformance:
    """A suite to subclass. Checks that the thing under test cannot do are skipped, with the reason."""

    expected_failures: ClassVar[dict[str, str]] = {}
    """{name of a test, or test[case]: why it fails}. A declared failure that passes is an error: take it off the list."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises `TypeError` where a failure is declared for a test that does not exist."""
        super().__init_subclass__(**kwargs)
        tests = [name for name in dir(cls) if name.startswith("test_")]
        for name in cls.expected_failures:
            if name.split("[")[0] not in tests:
                raise TypeError(f"{cls.__name__}.expected_failures names '{name}', which is no test{nearest(name, tests)}")

    @pytest.fixture(autouse=True)
    def declared_failures(self, request: pytest.FixtureRequest) -> None:
        """Marks the tests in `expected_failures`."""
        for name in (request.node.name, request.node.originalname):
            if reason := self.expected_failures.get(name):
                request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def missing(suite: Any, fixture: str, what: str, example: str) -> NotImplementedError:
    """The error for a fixture that a subclass must supply."""
    return NotImplementedError(
        f"{type(suite).__name__} must supply {what}:\n\n    @pytest.fixture\n    def {fixture}(self):\n        return {example}\n"
    )


def registry_of(*classes: type[Plugin]) -> Registry:
    """A registry that knows these plugins, and nothing else."""
    registry = Registry(entry_points=[])
    offered = {f"foredraft_{kind}s": [cls for cls in classes if issubclass(cls, base)] for kind, base in KINDS.items()}
    hooks = {name: hookimpl(lambda classes=classes: classes, specname=name) for name, classes in offered.items()}
    registry.register(SimpleNamespace(__name__="under test", **hooks))
    return registry


@cache
def shipped() -> Registry:
    """What foredraft itself brings: the checks do not depend on what else is installed."""
    return Registry(entry_points=[p for p in metadata.entry_points(group=GROUP) if p.dist is not None and p.dist.name == "foredraft"])


@torch.no_grad()
def randomize(draft: Any, seed: int = 1) -> Any:
    """Random values for every parameter, so that nothing hides behind zeros, ones or copies; vectors stay near one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    return draft.eval()


def gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; infinite where shapes differ or a value is not finite."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def check_options(algorithm: Any) -> None:
    """They are strict and described, and the algorithm has a summary."""
    assert issubclass(algorithm.Options, Frozen), f"{algorithm.__name__}.Options must be a subclass of foredraft.contracts.Frozen"
    silent = [name for name, field in algorithm.Options.model_fields.items() if not field.description]
    assert not silent, f"{algorithm.__name__}.Options: describe {', '.join(silent)} (Field(..., description=...))"
    assert algorithm.summary, f"{algorithm.__name__} needs a `summary`: `foredraft plugins` shows it"


def check_gradients(draft: Any) -> None:
    """Every trainable parameter has a finite gradient, and one that is not all zeros."""
    trained = {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}
    none = [name for name, grad in trained.items() if grad is None or not bool(grad.any())]
    assert not none, (
        f"no gradient reaches {', '.join(none)}: the forward pass never uses them, or cuts the graph (detach, no_grad, argmax); "
        "what is not trained must say so by requires_grad_(False)"
    )
    bad = [name for name, grad in trained.items() if grad is not None and not bool(grad.isfinite().all())]
    assert not bad, f"the gradient of {', '.join(bad)} is not finite"


def check_dtype(draft: Any, dtype: torch.dtype) -> None:
    """All parameters are of one dtype."""
    others = [f"{name} ({p.dtype})" for name, p in draft.named_parameters() if p.is_floating_point() and p.dtype != dtype]
    assert not others, (
        f"after draft.to({dtype}) these still have another dtype: {', '.join(others)}; make no tensor with a dtype of its own"
    )
