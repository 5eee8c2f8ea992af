"""`AdapterTests`: what every draft class must do, whatever its family; see `docs/testing.md`."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ..contracts.algorithm import AlgorithmBase
from ..contracts.draft import Layout
from ..draft.attention import Causal, Unrolled, UnrolledCache
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..files.ours import save_draft
from ..target.target import Target
from .common import TOLERANCE, Conformance, check_dtype, check_gradients, gap, missing, registry_of, shipped
from .disk import check_config, check_names, check_round_trip
from .passes import ASCENDING, CASES, DOCUMENTS, ONE, POSITIONS, Probe, build, chain, check_lossless, decode, everywhere, fused, inputs
from .tiny import tiny_batch, tiny_model, tiny_rows, tiny_signal


class AdapterTests(Conformance):
    """Subclass it as `class TestMine(AdapterTests)` and supply the fixtures `adapter` and `target_config`."""

    cases: ClassVar[tuple[str, ...]] = tuple(CASES)
    """The drafts that algorithms ask for, by name: take away what the family cannot have."""

    @pytest.fixture
    def adapter(self) -> type[BaseDraft]:
        """The draft class under test."""
        raise missing(self, "adapter", "the draft class under test", "MyDraft")

    @pytest.fixture
    def target_config(self) -> Any:
        """The config of a tiny target of the family."""
        raise missing(
            self,
            "target_config",
            "the config of a tiny target (8 layers, 50 tokens)",
            "MyConfig(num_hidden_layers=8, ...)",
        )

    @pytest.fixture
    def draft(self, adapter: type[BaseDraft], target_config: Any, case: str) -> BaseDraft:
        """A draft with random weights, for each case that the adapter takes."""
        try:
            return build(adapter, target_config, Probe(case=case))
        except ForedraftError as error:
            if case == self.cases[0]:
                raise  # with no draft at all, skipping would pass for success
            pytest.skip(str(error))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """All cases, and one per algorithm that foredraft brings: what else is installed fails in its own suite."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases)
        if "algorithm_name" in metafunc.fixturenames:
            trained = [name for name, cls in shipped().algorithms().items() if issubclass(cls, AlgorithmBase)]
            metafunc.parametrize("algorithm_name", sorted(trained))

    def test_registers(self, adapter: type[BaseDraft], target_config: Any) -> None:
        """The registry takes it, and finds it for its targets; one that lists no model_type is asked for by name."""
        text, registry = target_config.get_text_config(), registry_of(adapter, Probe)
        if not adapter.model_types and not adapter.generic:
            assert registry.adapter(adapter.name) is adapter
            return
        try:
            found = registry.adapter_for(text.model_type, target_config)
        except ForedraftError as error:
            raise AssertionError(f"{adapter.__name__} is not found for targets of model_type '{text.model_type}': {error}") from error
        assert found is adapter

    def test_shapes(self, draft: BaseDraft) -> None:
        """The four methods give what the contract says."""
        config, (embeds, context) = draft.config, inputs(draft)
        aux = torch.randn(2, 8, config.num_aux_hidden_states * config.target_hidden_size)
        hidden = everywhere(draft, embeds, context, ONE, ASCENDING)
        for name, found, size in (
            ("embed_input_ids", draft.embed_input_ids(ONE), config.hidden_size),
            ("project_hidden_states", draft.project_hidden_states(aux), config.hidden_size),
            ("backbone", hidden, config.hidden_size),
            ("compute_logits", draft.compute_logits(hidden), config.draft_vocab_size),
        ):
            assert found.shape == (2, 8, size), f"{name} must give (2, 8, {size}) for 8 inputs in 2 rows, found {tuple(found.shape)}"

    def test_no_future_leak(self, draft: BaseDraft) -> None:
        """What comes later changes nothing before it."""
        embeds, context = inputs(draft)
        before = everywhere(draft, embeds, context, ONE, ASCENDING)
        for t in (1, 4, 7):
            other_embeds, other_context = (torch.cat([x[:, :t], torch.randn_like(x[:, t:])], dim=1) for x in (embeds, context))
            after = everywhere(draft, other_embeds, other_context, ONE, ASCENDING)
            assert gap(after[:, :t], before[:, :t]) < TOLERANCE, (
                f"outputs before position {t} changed when inputs from {t} on did: the future leaks into the past. "
                "The attention must leave who sees whom to pattern.attend(q, keys, values, scale)"
            )
            assert gap(after[:, t:], before[:, t:]) > TOLERANCE, f"outputs from position {t} on do not depend on their own inputs"

    def test_no_document_leak(self, draft: BaseDraft) -> None:
        """Packed documents give what they give alone, and no gradient crosses from one to the other."""
        embeds, context = (x.requires_grad_() for x in inputs(draft))
        packed = everywhere(draft, embeds, context, DOCUMENTS, POSITIONS)[:1]
        alone = everywhere(draft, embeds[:1, 4:], context[:1, 4:], ONE[:1, :4], ASCENDING[:1, :4])
        assert gap(packed[:, 4:], alone) < TOLERANCE, (
            "a document packed behind another gives other outputs than alone: documents leak into each other, or positions are counted "
            "over the row instead of read from layout.positions"
        )
        leaks = [x[:, :4] for x in torch.autograd.grad(packed[:, 4:].square().sum(), (embeds, context))]
        assert not any(bool(x.any()) for x in leaks), "the second document's loss has a gradient in the first: documents leak"

    def test_positions_are_read(self, draft: BaseDraft) -> None:
        """Other positions, other outputs: the rotary embedding is applied, to what the layout says."""
        embeds, context = inputs(draft)
        near, far = (everywhere(draft, embeds, context, ONE, ASCENDING * stride) for stride in (1, 3))
        assert gap(far, near) > TOLERANCE, "outputs do not depend on layout.positions: apply the `rotary` given to the attention to q and k"

    def test_rows_select(self, draft: BaseDraft) -> None:
        """`layout.rows` gives the same numbers for fewer inputs."""
        embeds, context = inputs(draft)
        rows = torch.tensor([[1, 4, 6], [0, 2, 5]])
        every, some = (everywhere(draft, embeds, context, DOCUMENTS, POSITIONS, r) for r in (None, rows))
        expected = every.gather(1, rows[..., None].expand(-1, -1, every.shape[-1]))
        assert gap(some, expected) < TOLERANCE, "outputs at layout.rows differ from those of all inputs: rotate queries as their rows say"

    def test_cache_parity(self, draft: BaseDraft) -> None:
        """Decoding step by step with a cache, taking back what was not accepted, gives what one pass gives."""
        embeds, context = inputs(draft)
        once, stepwise = (decode(draft, embeds, context, cuts) for cuts in ([8], [3, 4, 8]))
        assert gap(stepwise, once) < TOLERANCE, (
            "decoding with a cache differs from one pass over the same inputs: hand keys (after rotation) and values to "
            "cache.extend(layer, k, v) under the layer's own number, and attend over what it returns"
        )

    def test_unrolled_steps(self, draft: BaseDraft) -> None:
        """Training-time test equals drafting each slot alone, from scratch, as serving does."""
        fused(draft)
        embeds, context = inputs(draft)
        rows = torch.tensor([[1, 2, 6], [0, 2, 5]])
        fed = torch.randn(3, 2, 3, embeds.shape[-1])  # embeddings of the tokens fed at steps 1 and 2
        cache, pattern = UnrolledCache(), Unrolled(DOCUMENTS, rows)
        hidden = draft.backbone(embeds, context, Layout(POSITIONS, pattern, rows), cache)
        states = [hidden]
        for k in (1, 2):
            hidden = draft.backbone(fed[k], hidden, Layout(POSITIONS.gather(1, rows) + k, pattern), cache)
            states.append(hidden)
        for b, q in [(0, 0), (0, 2), (1, 1), (1, 2)]:
            expected = chain(draft, embeds[b], context[b], DOCUMENTS[b], int(rows[b, q]), [f[b, q] for f in fed[1:]])
            for k, (state, reference) in enumerate(zip(states, expected, strict=True)):
                assert gap(state[b, q], reference) < TOLERANCE, (
                    f"step {k} of training-time test differs from decoding: slot {int(rows[b, q])} must see the causal keys of step 0 and "
                    "its own keys of later steps under one softmax, at position slot + step"
                )

    def test_every_parameter_learns(self, draft: BaseDraft) -> None:
        """A gradient reaches every trainable parameter."""
        config = draft.config
        aux = torch.randn(2, 8, config.num_aux_hidden_states * config.target_hidden_size)
        context = draft.project_hidden_states(aux)
        hidden = everywhere(draft, inputs(draft)[0], context, DOCUMENTS, POSITIONS)
        draft.compute_logits(hidden).square().mean().backward()
        check_gradients(draft)

    def test_save_and_load(self, draft: BaseDraft, tmp_path: Path) -> None:
        """Saved and loaded: the same weights bit for bit, and the same outputs."""
        again = check_round_trip(draft, registry_of(type(draft), Probe), tmp_path / "draft")
        embeds, context = inputs(draft)
        before, after = (d.compute_logits(everywhere(d, embeds, context, DOCUMENTS, POSITIONS)) for d in (draft, again))
        assert gap(after, before) == 0, "the loaded draft has the saved weights but other logits: a buffer or a config field is not saved"

    def test_config_on_disk(self, draft: BaseDraft, tmp_path: Path) -> None:
        """`config.json` as engines read it."""
        check_config(save_draft(draft, tmp_path), draft)

    def test_names_on_disk(self, draft: BaseDraft, tmp_path: Path) -> None:
        """Tensor names as engines read them."""
        fused(draft)
        check_names(save_draft(draft, tmp_path), draft)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_dtypes(self, draft: BaseDraft, dtype: torch.dtype) -> None:
        """Forward and backward are finite in either precision, and near each other."""
        embeds, context = inputs(draft)
        exact = everywhere(draft, embeds, context, DOCUMENTS, POSITIONS).detach()
        draft.to(dtype)
        check_dtype(draft, dtype)
        hidden = everywhere(draft, embeds.to(dtype), context.to(dtype), DOCUMENTS, POSITIONS)
        assert hidden.dtype == dtype, f"backbone gave {hidden.dtype} for inputs of {dtype}"
        assert gap(hidden, exact) < (TOLERANCE if dtype == torch.float32 else 0.1), f"outputs in {dtype} are far from those in float32"
        hidden.float().square().mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in draft.parameters() if p.grad is not None), f"a gradient in {dtype} is not finite"

    def test_gradient_checkpointing(self, draft: BaseDraft) -> None:
        """What is computed again in training, or all of a layer under the switch, changes no gradient."""
        if not draft.supports_gradient_checkpointing:
            pytest.skip("supports_gradient_checkpointing is False")
        embeds, context = inputs(draft)
        found = []
        for prepare in (draft.eval, draft.train, draft.gradient_checkpointing_enable):
            prepare()
            everywhere(draft, embeds, context, DOCUMENTS, POSITIONS).square().mean().backward()
            found.append({n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None})
            draft.zero_grad()
        other = {n for n, grad in found[0].items() if any(gap(again[n], grad) > TOLERANCE for again in found[1:])}
        assert not other, f"where activations are computed again the gradients of {', '.join(sorted(other))} are others"

    def test_starts_from_the_target(self, draft: BaseDraft, target_config: Any) -> None:
        """Embedding (frozen) and head are the target's own."""
        model = tiny_model(target_config)
        draft.start_from(model)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert torch.equal(draft.embed_tokens.weight, embedding), "after start_from the embedding is not the target's"
        assert not draft.embed_tokens.weight.requires_grad, "the embedding is trained: it must stay the target's"
        assert torch.equal(draft.lm_head.weight, head[draft.draft_ids]), "after start_from the head is not the target's"
        bad = [n for n, p in draft.named_parameters() if not bool(p.isfinite().all())]
        assert not bad, f"after start_from {', '.join(bad)} hold values that are not finite (never initialised?)"

    @torch.no_grad()
    def test_a_fresh_draft_is_the_targets_last_layer(self, adapter: type[BaseDraft], target_config: Any) -> None:
        """Where its layers have the parameters of the target's: on that layer's own input, and no token, the target's own logits."""
        model = tiny_model(target_config)
        apart: list[list[str]] = []
        for case in ("fused", "qk_norm"):
            draft = build(adapter, target_config, Probe(case=case))
            if (bias := getattr(draft.layers[0].input_layernorm, "bias", None)) is not None:
                bias.zero_()  # as in a fresh draft: no token is to be nothing
            before = {name: parameter.clone() for name, parameter in draft.layers[0].named_parameters()}
            draft.start_from(model)
            mine, theirs = dict(draft.layers[0].named_parameters()), draft.weights_of(Target(model, ()).layers[-len(draft.layers)])
            random = [name for name in mine if torch.equal(mine[name], before[name]) and not name.startswith("input_layernorm.")]
            apart.append(sorted({*random, *(theirs.keys() - draft.layers[0].state_dict().keys())}))
            if not apart[-1]:
                break
        else:
            least: list[str] = min(apart, key=len)
            pytest.skip(f"draft and target do not share {', '.join(least)}: the draft's layers are not the family's own")
        out = model(ids := torch.arange(1, 10)[None], output_hidden_states=True)
        context = out.hidden_states[-1 - len(draft.layers)]
        hidden = draft.backbone(torch.zeros_like(context), context, Layout(torch.arange(ids.shape[1])[None], Causal()))
        difference = gap(draft.compute_logits(hidden), out.logits)
        assert difference < TOLERANCE, (
            f"with all its weights from the target's last layer, on that layer's input, a fresh draft gives logits that differ by "
            f"{difference:.1%}: do activation, norms, rotary embedding, scales and residuals do what the family's do?"
        )

    def test_with_every_algorithm(self, adapter: type[BaseDraft], target_config: Any, algorithm_name: str) -> None:
        """Each of foredraft's own algorithms trains on it, and decodes the target's own text."""
        try:
            draft = build(adapter, target_config, shipped().make_algorithm(algorithm_name, {}))
        except ForedraftError as error:
            pytest.skip(str(error))
        model = tiny_model(target_config)
        draft.start_from(model)
        batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaaa", "uubbbb"], ["uaaaaaaaaaaaaaau"]], high=49))
        loss = draft(batch, tiny_signal(model, draft, batch))["loss"]
        assert bool(loss.isfinite()), f"the loss of '{algorithm_name}' is {float(loss)}"
        loss.backward()
        check_gradients(draft)
        check_lossless(model, draft)
