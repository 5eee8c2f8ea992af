"""Every adapter, algorithm, engine and format of this repository under the kit that third parties use."""

from typing import Any, ClassVar

import pytest
import torch
from tiny import tiny_config
from transformers import DeepseekV2Config, DeepseekV3Config, HYV4Config, Phi3Config, Qwen2Config, Qwen3Config, StableLmConfig

from foredraft import auto_draft, default_registry
from foredraft.adapters.deepseek_v3 import DeepseekV3Draft, DeepseekV3MoEDraft
from foredraft.adapters.generic import GenericDraft
from foredraft.adapters.llama import LlamaDraft
from foredraft.adapters.phi3 import Phi3Draft
from foredraft.adapters.qwen3 import Qwen3Draft
from foredraft.adapters.streams import StreamsDraft
from foredraft.plugins.dflash import DFlash
from foredraft.plugins.dflash2 import DFlash2
from foredraft.plugins.domino import Domino
from foredraft.plugins.dspark import DSpark
from foredraft.plugins.eagle import Eagle
from foredraft.plugins.eagle3 import Eagle3, Eagle31
from foredraft.plugins.gguf import GGUF, INSIDE
from foredraft.plugins.hf import Transformers
from foredraft.plugins.llamacpp import LlamaCpp
from foredraft.plugins.medusa import Medusa
from foredraft.plugins.medusa_model import MedusaModel
from foredraft.plugins.mlp_speculator import MLPSpeculator
from foredraft.plugins.mtp import MTP
from foredraft.plugins.mtp_head import TargetsOwn
from foredraft.plugins.nemo import NeMo
from foredraft.plugins.peagle import PEagle
from foredraft.plugins.plain import Plain
from foredraft.plugins.prompt_lookup import PromptLookup
from foredraft.plugins.safeailab import SafeAILab
from foredraft.plugins.sglang import SGLang
from foredraft.plugins.speculators import Speculators
from foredraft.plugins.suffix import Suffix
from foredraft.plugins.vllm import VLLM
from foredraft.testing import AdapterTests, AlgorithmTests, DrafterTests, EngineTests, FormatTests
from foredraft.testing.case import Case

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0}}
DENSE = {"first_k_dense_replace": 8, "n_group": None, "topk_group": None}


class OneConfig(AdapterTests):
    """An adapter and a target's config, stated as class attributes."""

    cls: Any
    config: Any
    cases: ClassVar[tuple[str, ...]] = ("fused", "prefix")  # flags of wirings do not meet a family: all on Llama and latent attention
    test_with_every_algorithm = None  # test_matrix.py trains and decodes each pair at length

    @pytest.fixture
    def adapter(self) -> Any:
        return self.cls

    @pytest.fixture
    def target_config(self) -> Any:
        return self.config


class TestLlama(OneConfig):
    cls, config = LlamaDraft, tiny_config()
    cases = AdapterTests.cases
    test_with_every_algorithm = AdapterTests.test_with_every_algorithm


class TestPhi3(OneConfig):
    cls, config = Phi3Draft, Phi3Config(**TINY)


class TestQwen3(OneConfig):
    cls, config = Qwen3Draft, Qwen3Config(**TINY, head_dim=16)


class TestGeneric(OneConfig):
    cls, config = GenericDraft, StableLmConfig(**TINY)


@pytest.mark.slow  # a Llama-shaped draft, as many others
class TestStreams(OneConfig):
    cls = StreamsDraft
    config = HYV4Config(**{**TINY, **LATENT}, head_dim=8, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)


class TestDeepseekV3(OneConfig):
    cls, config = DeepseekV3Draft, DeepseekV3Config(**{**TINY, **LATENT}, first_k_dense_replace=8)
    cases = AdapterTests.cases


class TestDeepseekV3MoE(OneConfig):
    """Two layers of experts send some of the inputs elsewhere in bfloat16."""

    cls = DeepseekV3MoEDraft
    config = DeepseekV3Config(
        **{**TINY, **LATENT},
        first_k_dense_replace=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    )
    expected_failures: ClassVar[dict[str, str]] = {}


class OneMethod(AlgorithmTests):
    """An algorithm and its options, stated as class attributes."""

    cls: Any
    small: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def algorithm(self) -> Any:
        return self.cls

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return self.small


class TestEagle3(OneMethod):
    cls, small = Eagle3, {"ttt_steps": 3}


class TestEagle3OfTwoLayers(OneMethod):
    cls, small = Eagle3, {"ttt_steps": 2, "num_layers": 2, "qk_norm": True}


class TestEagle(OneMethod):
    """HASS: the same with more steps, and the rest of its loss."""

    cls, small = Eagle, {"noise": 0, "ttt_steps": 3, "loss": {"ce": 0.1, "top10": 1.0}}


class TestMTP(OneMethod):
    """MiMo's: the state before the final norm, in front of the embedding, which counts for nothing at position 0."""

    cls, small = MTP, {"ttt_steps": 3}

    @pytest.fixture
    def target_config(self) -> Any:
        return Qwen2Config(**TINY, architectures=["MiMoForCausalLM"])


class TestEagle31(OneMethod):
    cls, small = Eagle31, {"ttt_steps": 3}


class TestEagle3OnLatentAttention(OneMethod):
    cls, small = Eagle3, {"ttt_steps": 2}

    @pytest.fixture(params=["V3", "V2, YaRN"])
    def target_config(self, request: pytest.FixtureRequest) -> Any:
        return TestDeepseekV3.config if request.param == "V3" else DeepseekV2Config(**{**TINY, **LATENT, **DENSE, **YARN})


class TestPEagle(OneMethod):
    cls, small = PEagle, {"num_depths": 3, "num_layers": 1, "fc_norm": True, "qk_norm": True}


class TestPEagleDrawingAll(OneMethod):
    cls, small = PEagle, {"num_depths": 3, "num_layers": 2, "ratio": 1.0}


class TestDFlash(OneMethod):
    cls, small = DFlash, {"block_size": 4, "num_layers": 2}


class TestDSpark(OneMethod):
    cls, small = DSpark, {"block_size": 3, "num_layers": 2, "markov_rank": 6}


class TestDSparkWithMemory(OneMethod):
    cls, small = (
        DSpark,
        {"block_size": 3, "num_layers": 1, "markov_rank": 6, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    )


class TestDomino(OneMethod):
    cls, small = Domino, {"block_size": 3, "num_layers": 2, "emb_dim": 6, "gru_hidden_dim": 7, "base_ratio": 0.0}


class TestDFlash2(OneMethod):
    """All tokens are candidates: else the drafter's logits are no distribution that training scores."""

    cls, small = DFlash2, {"block_size": 4, "num_layers": 2, "selector_rank": 6, "selector_top_k": 50}


class TestMedusa(OneMethod):
    cls, small = Medusa, {"num_heads": 3}


class TestMedusaAsServed(OneMethod):
    cls, small = Medusa, {"num_heads": 2, "served": True, "num_blocks": 2}


class TestMLPSpeculator(OneMethod):
    cls, small = MLPSpeculator, {"num_stages": 3}


class TestWithoutWeights(DrafterTests):
    @pytest.fixture(params=[PromptLookup, Suffix])
    def algorithm(self, request: pytest.FixtureRequest) -> Any:
        return request.param


MADE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "eagle3": (tiny_config(), "eagle3", {}),
    "eagle3 of two layers": (tiny_config(), "eagle3", {"num_layers": 2, "draft_vocab_size": 20}),
    "eagle3 on latent attention": (TestDeepseekV3.config, "eagle3", {}),
    "dflash": (tiny_config(), "dflash", {"num_layers": 1}),
}
"""Drafts that all our engines serve: target, algorithm, options."""


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    target, algorithm, options = MADE[request.param]
    with torch.device("meta"):
        config = auto_draft(target, algorithm, **options).config
    return {**config.to_dict(), "speculators_model_type": None, "ptd_token_id": None}


class OneEngine(EngineTests):
    """An engine, stated as a class attribute."""

    cls: Any

    @pytest.fixture
    def engine(self) -> Any:
        return self.cls

    @pytest.fixture
    def served(self, made: dict[str, Any]) -> dict[str, Any]:
        return made


class TestVLLM(OneEngine):
    cls = VLLM


class TestSGLang(OneEngine):
    cls = SGLang


class TestTransformers(OneEngine):
    cls = Transformers


class TestLlamaCpp(OneEngine):
    """Of drafts of ours and of files."""

    cls = LlamaCpp

    @pytest.fixture(params=["eagle3", "dflash", "file"])
    def made(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        with torch.device("meta"):
            draft = auto_draft(tiny_config(), "eagle3" if request.param == "file" else request.param)
        if request.param != "file":
            return draft.config.to_dict()
        fields = GGUF().write(draft, {}, "eagle3", 3)[0][INSIDE]
        return {INSIDE: {name: value for name, value in fields.items() if not name.startswith("tokenizer")}, "other": None}


class OneForm(FormatTests):
    """A format whose files hold our own fields; how it calls the tensors, if otherwise, is stated."""

    cls: Any
    ours, theirs = "", ""
    """How a name begins, here and there."""
    unsaid: tuple[str, ...] = ()
    """Fields that mean something else there."""

    @pytest.fixture
    def form(self) -> Any:
        return self.cls

    def write(self, form: Any, draft: Any, tensors: Any) -> Any:
        fields = {name: value for name, value in draft.config.to_dict().items() if name not in ("foredraft", *self.unsaid)}
        named = {name: self.theirs + name.removeprefix(self.ours) if name.startswith(self.ours) else name for name in tensors}
        return fields, {named[name]: tensor for name, tensor in tensors.items()}


class TestPlain(OneForm):
    cls = Plain


class TestNeMo(OneForm):
    cls, theirs = NeMo, "model."


class TestSafeAILab(OneForm):
    cls, ours, theirs = SafeAILab, "layers.0.", "midlayer."
    unsaid = ("norm_output",)


class TestSpeculators(FormatTests):
    @pytest.fixture(params=["eagle3", "peagle", "dflash"])
    def algorithm(self, request: pytest.FixtureRequest) -> Any:
        return default_registry().algorithm(request.param)

    @pytest.fixture
    def form(self) -> Any:
        return Speculators


class TestTargetsOwn(FormatTests):
    @pytest.fixture
    def form(self) -> Any:
        return TargetsOwn

    @pytest.fixture
    def case(self) -> Any:
        return Case.of(MTP, {}, TestDeepseekV3MoE.config)

    @pytest.mark.slow  # a model is built for every field that is tried
    def test_odd_configs(self, form: Any, checkpoint: Any) -> None:
        super().test_odd_configs(form, checkpoint)


class TestMedusaModel(FormatTests):
    @pytest.fixture
    def form(self) -> Any:
        return MedusaModel

    @pytest.fixture
    def case(self) -> Any:
        return Case.of(Medusa, {"num_heads": 2, "served": True, "num_blocks": 2})


class TestGGUF(FormatTests):
    @pytest.fixture(params=["eagle3", "dflash", "dspark"])
    def algorithm(self, request: pytest.FixtureRequest) -> Any:
        return default_registry().algorithm(request.param)

    @pytest.fixture
    def form(self) -> Any:
        return GGUF
