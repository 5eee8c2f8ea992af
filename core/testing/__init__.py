"""The conformance kit: test classes that the suite of an adapter, an algorithm, an engine or a format subclasses. Needs pytest."""

import pytest

# Messages are written out; should one be forgotten, pytest still shows the values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("adapters", "algorithms", "case", "common", "disk", "drafters", "engines", "formats", "passes"))
)

from .adapters import AdapterTests  # noqa: E402
from .algorithms import AlgorithmTests  # noqa: E402
from .drafters import DrafterTests  # noqa: E402
from .engines import EngineTests  # noqa: E402
from .formats import FormatTests  # noqa: E402

__all__ = ["AdapterTests", "AlgorithmTests", "DrafterTests", "EngineTests", "FormatTests"]
