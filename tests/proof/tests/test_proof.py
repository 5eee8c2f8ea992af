"""foredraft's conformance kit on every plugin of this package."""

from typing import Any

import pytest
from foredraft_proof.adapter import ParallelDraft
from foredraft_proof.algorithm import PerStep
from foredraft_proof.drafter import Echo
from foredraft_proof.engine import Server
from foredraft_proof.form import Boxed
from transformers import StableLmConfig

from foredraft.testing import AdapterTests, AlgorithmTests, DrafterTests, EngineTests, FormatTests

SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}


def stablelm() -> StableLmConfig:
    """The config of a tiny target."""
    return StableLmConfig(**SHAPE, num_key_value_heads=2, use_parallel_residual=True, initializer_range=0.3, max_position_embeddings=256)


class TestParallel(AdapterTests):
    @pytest.fixture
    def adapter(self) -> Any:
        return ParallelDraft

    @pytest.fixture
    def target_config(self) -> Any:
        return stablelm()


class TestPerStep(AlgorithmTests):
    @pytest.fixture
    def algorithm(self) -> Any:
        return PerStep


class TestPerStepOnParallel(TestPerStep):
    """Both at once, under objectives of this package."""

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"steps": 2, "loss": {"ce": 0.5, "proof_top_k": 1.0, "proof_nla": 0.5}}

    @pytest.fixture
    def target_config(self) -> Any:
        return stablelm()


class TestServer(EngineTests):
    @pytest.fixture
    def engine(self) -> Any:
        return Server

    @pytest.fixture
    def served(self) -> dict[str, Any]:
        return {"architectures": ["PerStepDraftModel"]}


class TestEcho(DrafterTests):
    @pytest.fixture
    def algorithm(self) -> Any:
        return Echo


class TestBoxed(FormatTests):
    @pytest.fixture
    def form(self) -> Any:
        return Boxed
