"""The conformance kit catches broken plugins, each with a message that names the cause; it lets sound ones pass in test_conformance.py."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import ArceeConfig

from foredraft import DrafterBase, DraftSpec, ForedraftError, FormatBase
from foredraft.adapters.llama import LlamaDraft
from foredraft.contracts.algorithm import Plan, Step
from foredraft.contracts.draft import Layout
from foredraft.contracts.engine import EngineBase, unknown_architecture
from foredraft.contracts.finding import note
from foredraft.contracts.options import Frozen
from foredraft.decoding import AutoregressiveDrafter
from foredraft.draft.attention import Causal, Full, GroupedQueryAttention, Unrolled
from foredraft.loss import Teacher, chunked
from foredraft.plugins.eagle3 import Eagle3
from foredraft.testing import AdapterTests, AlgorithmTests, DrafterTests, EngineTests, FormatTests
from foredraft.testing.case import SUPERVISORS, Case
from foredraft.testing.passes import Probe, build


class CannotSee(GroupedQueryAttention):
    """Looks where `look` says, or keeps no cache."""

    def __init__(self, *arguments: Any, look: Any = None, cached: bool = True):
        super().__init__(*arguments)
        self.look, self.cached = look, cached

    def forward(self, x: Tensor, rotary: Any, pattern: Any, cache: Any, rows: Any) -> Tensor:
        return super().forward(x, rotary, self.look or pattern, cache if self.cached else None, rows)


def attending(**settings: Any) -> dict[str, Any]:
    return {"make_attention": lambda self, layer, size: CannotSee(self.config, layer, size, **settings)}


def with_extra(self: Any, config: Any, algorithm: Any = None) -> None:
    LlamaDraft.__init__(self, config, algorithm)
    self.extra = nn.Linear(2, 2)


def with_half_norm(self: Any, fn: Any, recurse: bool = True) -> Any:
    LlamaDraft._apply(self, fn, recurse)
    self.norm.weight.data = self.norm.weight.data.float()
    return self


def without_steps(self: Any, embeds: Tensor, context: Tensor, layout: Layout, cache: Any = None) -> Tensor:
    later = isinstance(layout.pattern, Unrolled) and layout.rows is None
    return LlamaDraft.backbone(self, embeds, context, replace(layout, positions=layout.positions - int(later)), cache)


def at_other_rows(self: Any, embeds: Tensor, context: Tensor, layout: Layout, cache: Any = None) -> Tensor:
    rows = None if layout.rows is None else layout.rows.flip(1)
    return LlamaDraft.backbone(self, embeds, context, replace(layout, rows=rows), cache)


class SameLayer(CannotSee):
    def __init__(self, config: Any, layer: int, size: int):
        super().__init__(config, 0, size)


class NoRotation(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.size = config.head_dim

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(*positions.shape, self.size), torch.zeros(*positions.shape, self.size)


@classmethod  # type: ignore[misc]
def initialising_anew(cls: Any, *arguments: Any, **settings: Any) -> Any:
    draft, info = super(LlamaDraft, cls).from_pretrained(*arguments, **settings)
    nn.init.normal_(draft.fc.weight)
    return draft, info


class TwiceAsMuch(LlamaDraft.mlp_class):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class CarelessConfig(LlamaDraft.config_class):
    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "target_hidden_size": None, "num_hidden_layers": 8}


ADAPTERS = {
    "wrong shapes": (
        {"compute_logits": lambda self, hidden: LlamaDraft.compute_logits(self, hidden)[..., 1:]},
        "test_shapes",
        r"compute_logits must give \(2, 8, 50\) for 8 inputs in 2 rows, found \(2, 8, 49\)",
    ),
    "future leak": (attending(look=Full()), "test_no_future_leak", "inputs from 1 on did: the future leaks into the past"),
    "document leak": (attending(look=Causal()), "test_no_document_leak", "documents leak into each other, or positions are counted over"),
    "no positions": (
        {"rotary_class": NoRotation},
        "test_positions_are_read",
        "outputs do not depend on layout.positions: apply the `rotary`",
    ),
    "no cache": (
        attending(cached=False),
        "test_cache_parity",
        r"decoding with a cache differs .* hand keys \(after rotation\) and values to",
    ),
    "one cache for all layers": (
        {"make_attention": lambda self, layer, size: SameLayer(self.config, layer, size)},
        "test_cache_parity",
        r"cache.extend\(layer, k, v\) under the layer's own number",
    ),
    "no step positions": (
        {"backbone": without_steps},
        "test_unrolled_steps",
        "step 1 of training-time test differs from decoding: slot 1 must see the causal keys of step 0",
    ),
    "other rows": (
        {"backbone": at_other_rows},
        "test_rows_select",
        "outputs at layout.rows differ from those of all inputs",
    ),
    "unused parameter": (
        {"__init__": with_extra},
        "test_every_parameter_learns",
        "no gradient reaches extra.weight, extra.bias: the forward",
    ),
    "initialised anew": (
        {"from_pretrained": initialising_anew},
        "test_save_and_load",
        "loaded, fc.weight differ from what was saved: something initialises weights anew after loading",
    ),
    "careless config": (
        {"config_class": CarelessConfig},
        "test_config_on_disk",
        "target_hidden_size must be an integer, found None; num_hidden_layers must be the draft's 2, not the target's: found 8",
    ),
    "unknown names": ({"__init__": with_extra}, "test_names_on_disk", "they would ignore extra.bias, extra.weight and miss nothing"),
    "mixed dtypes": ({"_apply": with_half_norm}, "test_dtypes", r"these still have another dtype: norm.weight \(torch.float32\)"),
    "another feed-forward": (
        {"mlp_class": TwiceAsMuch},
        "test_a_fresh_draft_is_the_targets_last_layer",
        r"a fresh draft gives logits that differ by .*%: do activation, norms, rotary embedding, scales",
    ),
    "trained embedding": (
        {"start_from": lambda self, target: (LlamaDraft.start_from(self, target), self.embed_tokens.requires_grad_(True))},
        "test_starts_from_the_target",
        "the embedding is trained: it must stay the target's",
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_broken_adapters(case: str, tmp_path: Path) -> None:
    fields, check, message = ADAPTERS[case]
    broken = type("Broken", (LlamaDraft,), {"name": "broken", **fields})
    arguments = (build(broken, tiny_config(), Probe(case="fused")),)
    if check == "test_a_fresh_draft_is_the_targets_last_layer":
        arguments = (broken, tiny_config())
    extra = {
        "test_save_and_load": {"tmp_path": tmp_path},
        "test_config_on_disk": {"tmp_path": tmp_path},
        "test_names_on_disk": {"tmp_path": tmp_path},
        "test_dtypes": {"dtype": torch.bfloat16},
        "test_starts_from_the_target": {"target_config": tiny_config()},
    }.get(check, {})
    with pytest.raises(AssertionError, match=message):
        getattr(AdapterTests(), check)(*arguments, **extra)


def test_layers_that_are_not_the_familys() -> None:
    """Of Arcee's feed-forward, which has no gate, not all can be the target's."""
    config = ArceeConfig(**{**tiny_config().to_dict(), "model_type": "arcee"})
    with pytest.raises(pytest.skip.Exception, match=r"do not share mlp.gate_proj.weight: the draft's layers"):
        AdapterTests().test_a_fresh_draft_is_the_targets_last_layer(LlamaDraft, config)


def test_an_adapter_that_is_not_found() -> None:
    with pytest.raises(AssertionError, match="LlamaDraft is not found for targets of model_type 'other'"):
        AdapterTests().test_registers(LlamaDraft, type("Config", (type(tiny_config()),), {"model_type": "other"})())


class Short(Eagle3):
    """EAGLE-3 with two steps: what the broken ones below start from."""

    name = "broken"

    class Options(Eagle3.Options):
        ttt_steps: int = 2


def unrolling(change: Callable[[Any, dict[str, Any], Tensor], tuple[dict[str, Any], Tensor]]) -> dict[str, Any]:
    """The training pass over another batch or other features."""
    return {"unroll": lambda self, draft, batch, aux: Eagle3.unroll(self, draft, *change(self, batch, aux))}


def changing(change: Callable[[Step, dict[str, Any]], Step]) -> dict[str, Any]:
    """Another loss or other metrics."""
    return {"loss": lambda self, draft, batch, signal: change(Eagle3.loss(self, draft, batch, signal), batch)}


class Drafter(AutoregressiveDrafter):
    """Drafts otherwise than it says."""

    def __init__(self, draft: Any, fault: str):
        super().__init__(draft)
        self.fault = fault

    def propose(self, ids: Tensor, aux: Tensor, limit: int, choose: Any) -> Any:
        if self.fault == "forgets all":
            for layer in self.cache._cache.layers:
                layer.values.zero_()
        if self.fault == "too many":
            return super().propose(ids, aux, limit + 1, choose)
        tokens, scores = super().propose(ids, aux, limit, choose)
        if self.fault == "other logits":
            return tokens, [torch.zeros_like(s) for s in scores]
        return tokens, scores


def drafting(fault: str) -> dict[str, Any]:
    return {"drafter": lambda self, draft: Drafter(draft, fault)}


def drawing(self: Any, batch: dict[str, Any], generators: Any) -> Plan:
    plan = Eagle3.plan(self, batch, generators)
    return replace(plan, added={**plan.added, "drawn": torch.rand(3)})


def sharing(self: Any, batch: dict[str, Any], generators: Any) -> Plan:
    plan = Eagle3.plan(self, batch, generators)
    return replace(plan, counts=plan.counts * len(batch["row"]))


def over_the_end(self: Any, batch: dict[str, Any], generators: Any) -> Plan:
    """All slots of a row, as if it were one span."""
    return Eagle3.plan(
        self, {**batch, "spans": torch.zeros_like(batch["spans"]), "documents": torch.zeros_like(batch["spans"])}, generators
    )


class Undescribed(Frozen):
    width: int = 3


ALGORITHMS = {
    "undescribed option": ({"Options": Undescribed, "spec": DraftSpec()}, "test_contract", "Options: describe width"),
    "torch's own generator": (
        {"plan": drawing},
        "test_plan_is_deterministic",
        "two plans of one batch differ: draw from the generator of each",
    ),
    "rows not apart": (
        {"plan": sharing},
        "test_plan_is_deterministic",
        r"counts of two rows are .* together and .* apart: plan each row by",
    ),
    "over the turn's end": ({"plan": over_the_end}, "test_plan_has_what_others_read", r"teacher_rows \[.*\] do not come right before an"),
    "future leak": (
        unrolling(lambda self, batch, aux: (batch, aux.roll(-1, dims=1))),
        "test_no_future_leak",
        "the loss on 3 assistant tokens changed when the target's features of the last two did, or the tokens after",
    ),
    "document leak": (
        unrolling(lambda self, batch, aux: ({**batch, "documents": torch.zeros_like(batch["documents"]), "segments": None}, aux)),
        "test_no_document_leak",
        "the loss changed when the document before it did: hand `documents` to the pattern",
    ),
    "spans over documents": ({"plan": over_the_end}, "test_packing", "slots may not reach over the end of a document"),
    "own counts": (
        {
            "loss": lambda self, draft, batch, signal: Eagle3.loss(
                self, draft, {**batch, "counts": torch.tensor([len(q) for q in batch["queries"]])}, signal
            )
        },
        "test_accumulation",
        "divide by the `counts` that loss",
    ),
    "unused parameter": (
        {"modules": lambda self, draft: {"extra": nn.Linear(2, 2)}},
        "test_every_parameter_learns",
        "no gradient reaches extra.weight, extra.bias",
    ),
    "NaN with padding": (
        changing(lambda step, batch: Step(step.loss / (batch["documents"] >= 0).all(), step.metrics)),
        "test_padding",
        "the loss is not finite where a row is padded: does a query of padding see no key at all",
    ),
    "NaN without supervision": (
        changing(lambda step, batch: Step(step.loss + 0 * (batch["counts"][0] / batch["counts"][0]), step.metrics)),
        "test_padding",
        "the loss of a batch without a supervised token is nan: clamp counts",
    ),
    "lacking metrics": (changing(lambda step, batch: Step(step.loss, {})), "test_metrics", "metrics lack 'count'"),
    "half precision": (
        changing(lambda step, batch: Step(step.loss.half() * 1e6, step.metrics)),
        "test_half_precision",
        "the loss is inf in bfloat16",
    ),
    "trained otherwise": (
        unrolling(lambda self, batch, aux: ({**batch, "positions": 2 * batch["positions"]}, aux)),
        "test_training_is_decoding",
        "step 1 of training has a cross-entropy of .* differ in what they read, see or where it sits",
    ),
    "forgets all": (
        drafting("forgets all"),
        "test_drafting_again",
        "after 4 tokens in several calls the drafter proposes .* forget what was",
    ),
    "too many": (drafting("too many"), "test_drafter_keeps_its_word", "asked for at most 1 tokens .* it drafted 2"),
    "other logits": (drafting("other logits"), "test_drafter_keeps_its_word", "sampling would no longer follow the target's distribution"),
    "other distribution": (
        drafting("other logits"),
        "test_sampling_is_lossless",
        "300 sampled tokens follow the target's distribution with",
    ),
}


@pytest.mark.parametrize("case", ALGORITHMS)
def test_broken_algorithms(case: str) -> None:
    fields, check, message = ALGORITHMS[case]
    broken = type("Broken", (Short,), {"name": "broken", **fields})
    extra = {
        "test_half_precision": {"precision": "bfloat16"},
        "test_training_is_decoding": {"draft_vocab_size": None, "supervisors": SUPERVISORS},
    }.get(check, {})
    arguments = (broken, {}) if check == "test_contract" else (Case.of(broken),)
    with pytest.raises(AssertionError, match=re.compile(message, re.S)):
        getattr(AlgorithmTests(), check)(*arguments, **extra)


class Likely(Teacher):
    """The target's five likeliest tokens."""

    def at(self, rows: Any, draft_ids_W: Tensor) -> Any:
        taught = super().at(rows, draft_ids_W)
        return replace(taught, p_RW=taught.p_RW * (taught.p_RW >= taught.p_RW.topk(5).values[:, -1:]))


class LearnsTheLikely(Short):
    """Trained otherwise than the kit expects, unless it is told."""

    def loss(self, draft: Any, batch: Any, signal: Any) -> Step:
        states = [s.flatten(0, 1)[query] for s, query in zip(self.unroll(draft, batch, signal.aux_BSA), batch["queries"], strict=True)]
        teacher = Likely.of(signal, batch["teacher_rows"])
        return chunked(draft, states, teacher, batch["teachers"], [0.5 / count.clamp(min=1) for count in batch["counts"]])


def test_what_training_learns_from_may_be_told() -> None:
    check, case = AlgorithmTests().test_training_is_decoding, Case.of(LearnsTheLikely)
    with pytest.raises(AssertionError, match=r"against the target and .* against the text: .*say so by the fixture `supervisors`"):
        check(case, SUPERVISORS, None)
    check(case, {"the likely": lambda signal, ids_L, draft_ids_W: Likely.of(signal, torch.arange(len(ids_L)))}, None)


class Counts(DrafterBase):
    """Drafts tokens one after another: what the broken ones below start from."""

    name = "counts"
    summary = "counts on"

    def drafter(self, draft: Any) -> Any:
        return type(self)()

    def propose(self, ids: Tensor, aux: Tensor, limit: int, choose: Any) -> Any:
        return [(int(ids[-1]) + i) % 50 for i in range(limit)], []


def proposing(change: Callable[[Any, Tensor, int], Any]) -> dict[str, Any]:
    return {"propose": lambda self, ids, aux, limit, choose: change(self, ids, limit)}


DRAFTERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no summary": ({"summary": ""}, "test_contract", "Broken needs a `summary`"),
    "too many": (
        proposing(lambda self, ids, limit: ([1] * (limit + 1), [])),
        "test_keeps_its_word",
        "asked for at most 2 tokens, it drafted 3",
    ),
    "tensors": (proposing(lambda self, ids, limit: (list(ids[:limit]), [])), "test_keeps_its_word", r"it drafted \[tensor.* are ints"),
    "a logit too few": (
        proposing(lambda self, ids, limit: ([1] * limit, [torch.zeros(50)])),
        "test_keeps_its_word",
        "2 tokens with 1 logits",
    ),
    "remembers": (
        proposing(lambda self, ids, limit: (vars(self).setdefault("seen", [int(ids[-1])]), [])),
        "test_drafting_again",
        "keep nothing of its own drafts",
    ),
}


@pytest.mark.parametrize("case", DRAFTERS)
def test_broken_drafters(case: str) -> None:
    fields, check, message = DRAFTERS[case]
    broken = type("Broken", (Counts,), {"name": "broken", **fields})
    arguments: tuple[Any, ...] = {"test_contract": (broken, {}), "test_keeps_its_word": (broken(), 2)}.get(check, (broken(),))
    with pytest.raises(AssertionError, match=message):
        getattr(DrafterTests(), check)(*arguments)


class Server(EngineBase):
    """Serves drafts of one architecture: what the broken ones below start from."""

    name = "server"
    summary = "a server"

    def refuses(self, config: Any) -> str | None:
        return unknown_architecture(config, ("MyDraft",))

    def arguments(self, config: Any, draft: str, target: str, num_tokens: int) -> list[str]:
        return ["serve", target, "--draft", draft, "--width", str(config["hidden_size"]), "--tokens", str(num_tokens)]


def saying(found: Any) -> dict[str, Any]:
    return {"findings": lambda self, files: super(Server, self).findings(files) or [found]}


ENGINES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no summary": ({"summary": ""}, "test_registers", "Broken needs a `summary`"),
    "refuses what it serves": ({"refuses": lambda self, config: "I do not know"}, "test_serves", "said to serve: it must give None"),
    "serves anything": (
        {"refuses": lambda self, config: None},
        "test_refuses_with_a_reason",
        "a command for a draft that the engine cannot",
    ),
    "no reason": ({"refuses": lambda self, config: "no"}, "test_refuses_with_a_reason", "gives 'no': say what was found"),
    "silent in doctor": ({"findings": lambda self, files: []}, "test_refuses_with_a_reason", "does not say why the draft is refused"),
    "one text": ({"arguments": lambda self, *asked: "serve"}, "test_arguments", "gives str: it must be a list"),
    "a number": ({"arguments": lambda self, c, d, t, n: ["serve", t, d, n]}, "test_arguments", r"gives \[3\]: every one must be a text"),
    "as many as ever": (
        {"arguments": lambda self, c, d, t, n: ["serve", t, d]},
        "test_arguments",
        "the command for 5 tokens is that for 3",
    ),
    "cut at spaces": (
        {"arguments": lambda self, c, d, t, n: ["serve", *t.split(), d]},
        "test_arguments",
        "no argument holds 'my targets/two'",
    ),
    "trusting": ({}, "test_odd_configs", "hidden_size = 'nothing' raises KeyError: 'hidden_size'. Check types before use"),
    "another's finding": (saying(note("vllm-x", "a", "b", "c")), "test_findings", "'vllm-x' must be called 'broken-...'"),
    "half a finding": (saying(note("broken-x", "a", "b", "")), "test_findings", "'broken-x' does not say mend"),
}


@pytest.mark.parametrize("case", ENGINES)
def test_broken_engines(case: str) -> None:
    fields, check, message = ENGINES[case]
    broken, served = type("Broken", (Server,), {"name": "broken", **fields}), {"architectures": ["MyDraft"], "hidden_size": 8}
    arguments: dict[str, Any] = {"test_registers": {}, "test_refuses_with_a_reason": {"config": {}}}.get(check, {"served": served})
    with pytest.raises(AssertionError, match=message):
        getattr(EngineTests(), check)(broken, **arguments)


class Prefixed(FormatBase):
    """Ours under other names: what the broken ones below start from."""

    name = "prefixed"
    summary = "drafts under a prefix"
    sign = "names that begin with 'mine.'"

    def recognises(self, names: Any, config: Any) -> bool:
        return any(name.startswith("mine.") for name in names)

    def rename(self, name: str) -> str | None:
        return name.removeprefix("mine.")

    def write(self, draft: Any, tensors: Any, algorithm: str | None, num_tokens: int) -> Any:
        fields = {name: value for name, value in draft.config.to_dict().items() if name != "foredraft"}
        return fields, {f"mine.{name}": tensor for name, tensor in tensors.items()}


def writing(change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> dict[str, Any]:
    """Other fields or tensors."""
    return {"write": lambda self, *asked: change(*Prefixed.write(self, *asked))}


FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "claims all": (
        {"recognises": lambda self, names, config: True, "priority": 2},
        "test_recognises_its_own",
        "recognises\\(\\) claims too much",
    ),
    "too modest": ({"recognises": lambda self, names, config: False}, "test_recognises_its_own", "no draft in a format|is taken for"),
    "rounded": (
        writing(lambda fields, tensors: (fields, {n: t.half().to(t.dtype) for n, t in tensors.items()})),
        "test_round_trip",
        "bit for bit",
    ),
    "in place": (
        writing(lambda fields, tensors: (fields, {n: t.neg_() if n == "mine.norm.weight" else t for n, t in tensors.items()})),
        "test_round_trip",
        "norm.weight",
    ),
    "a field lost": (
        writing(lambda fields, tensors: ({**fields, "rms_norm_eps": 0.5}, tensors)),
        "test_round_trip",
        "proposes from other logits: a field",
    ),
    "trusting": (
        {"flatten": lambda self, config: {**config, "hidden_size": 0 + config["hidden_size"]}},
        "test_odd_configs",
        "hidden_size = 'nothing' raises KeyError",
    ),
    "finds fault": (
        {"findings": lambda self, files: [note("x", "it is odd", "b", "c")]},
        "test_findings",
        "of a checkpoint that is as it should be: it is odd",
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_broken_formats(case: str, tmp_path: Path) -> None:
    fields, check, message = FORMATS[case]
    broken, suite = type("Broken", (Prefixed,), {"name": "broken", **fields}), FormatTests()
    pair = Case.of(Eagle3)
    arguments: dict[str, Any] = {"case": pair, "size": None, "dtype": torch.float32, "tmp_path": tmp_path}
    if check != "test_round_trip":
        arguments = {"checkpoint": suite.written(broken, pair.draft, tmp_path / "theirs")}
        arguments |= {"case": pair} if check == "test_recognises_its_own" else {}
    with pytest.raises((AssertionError, ForedraftError), match=message):
        getattr(suite, check)(broken, **arguments)


def test_failures_are_declared_by_name() -> None:
    with pytest.raises(TypeError, match="names 'test_paking', which is no test; did you mean 'test_packing'"):
        type("TestMine", (AlgorithmTests,), {"expected_failures": {"test_paking": "typo"}})


SUITES = """
import pytest
from foredraft.plugins.eagle3 import Eagle3
from foredraft.testing import AlgorithmTests

class TestNothing(AlgorithmTests):
    pass

class TestDeclared(AlgorithmTests):
    expected_failures = {"test_contract": "it has no summary", "test_half_precision[autocast]": "wrongly declared"}

    @pytest.fixture
    def algorithm(self):
        return type("Mine", (Eagle3,), {"name": "mine", "summary": ""})
"""


def test_fixtures_and_declared_failures(pytester: pytest.Pytester) -> None:
    """As pytest reports them."""
    pytester.makepyfile(SUITES)
    done = pytester.runpytest_inprocess("-rxf", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "contract or half")
    shown = str(done.stdout)
    assert "TestNothing must supply the algorithm under test, a class:" in shown
    assert re.search("XFAIL .*::TestDeclared::test_contract - it has no summary", shown)
    assert "[XPASS(strict)] wrongly declared" in shown
    done.assert_outcomes(failed=1, passed=1, xfailed=1, errors=3)
