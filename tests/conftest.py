"""Settings for all tests: one thread, no network, no progress bars."""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

# Read once, when the libraries are first imported: not here, for the process that only hands tests to workers needs none of them.
os.environ.update(
    OMP_NUM_THREADS="1",  # tests run side by side, and start processes of their own
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)

gc.disable()  # until all is loaded, see below

collect_ignore = ["proof"]  # a package of its own, whose suite runs where it is installed


def pytest_collection_finish() -> None:
    """What the libraries have made stays: each look for garbage among it takes a quarter of a second, and more as tests go on."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


ENVIRONMENT = os.environ


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """datasets puts a copy in the place of `os.environ` when it starts processes; rich goes on reading the one it was imported with."""
    yield
    os.environ = ENVIRONMENT  # noqa: B003


@pytest.fixture(autouse=True)
def rehearsed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `gpu` are rehearsed with a pretended device where there is none."""
    if request.node.get_closest_marker("gpu"):
        import torch
        from pretended import pretended

        with nullcontext() if torch.cuda.is_available() else pretended():
            yield
    else:
        yield


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`foredraft info` leaves the training step out, which takes seconds to count: TestDescribe has it."""
    monkeypatch.setattr("foredraft.cli.describe._step", lambda *_: {})
