"""Targets that keep states of fixed size: trained a document a row, decoded losslessly by copies of the states; and those with streams."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from replay import Oracle
from tiny import tiny_batch, tiny_rows
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from foredraft import ForedraftError, Target, TreeShape, auto_draft, generate
from foredraft.decoding import DraftingStats, states
from foredraft.decoding.families import tiny_model
from foredraft.decoding.states import MOST_REPLAYED
from foredraft.target.capture import in_one

# Mamba-2, and attention that layers share; layers that keep their states in themselves, read token by token; a cache of a family's own.
FAST = ("zamba2", "recurrent_gemma", "minimax")
# Convolutions, which can be cut (lfm2); a list of states (rwkv); several states in a layer (qwen4_exp); compressors (deepseek_v4).
SLOW = ("lfm2_moe", "rwkv", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "kimi_linear", "falcon_h1", "bamba")
SLOW += ("granitemoehybrid", "olmo_hybrid", "lfm2", "nemotron_h", "deepseek_v4", "glm5_next", "zaya", "mamba2")
SLOW += ("jamba", "zamba", "mamba", "falcon_mamba", "xlstm")  # Mamba-1, read token by token; a cache that is none of transformers'
ROUNDED = [("lfm2", torch.float64), ("falcon_h1", torch.float64), *((family, torch.float32) for family in ("zamba2", *SLOW))]
FAMILIES = [
    ("zamba2", torch.float64),
    ("recurrent_gemma", torch.float32),
    ("minimax", torch.float32),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ROUNDED),
]
TRAINED = sorted({*FAST, *SLOW} - {"zamba2", "rwkv"})
IDS = torch.tensor([[3, 9, 4, 3, 9, 4, 8, 5]])
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}


def target_of(family: str) -> PreTrainedModel:
    model = tiny_model(CONFIG_MAPPING[family])
    if family == "minimax":  # as published ones begin, not by the config's defaults
        config = deepcopy(model.config)
        config.layer_types = config.layer_types[::-1]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_whatever_is_accepted_the_text_is_the_targets(family: str, dtype: torch.dtype) -> None:
    """Nothing, some and all of what was drafted; sampled, too: one seed, one text. In float32 a tie could fall otherwise: none does."""
    model, greedy = deepcopy(target_of(family)).to(dtype), {**GREEDY, "max_new_tokens": 16}
    plain = model.generate(IDS, **greedy)
    taus = []
    for wrong in (0.0, 0.3, 1.0):
        stats = DraftingStats()
        assert torch.equal(generate(model, Oracle(plain, wrong), IDS, num_draft_tokens=4, stats=stats, **greedy), plain)
        taus.append(stats.tau)
    assert taus[0] > taus[1] > taus[2] == 1.0
    assert torch.equal(generate(model, "prompt_lookup", IDS, **greedy), plain)
    sampling = {**greedy, "do_sample": True, "temperature": 0.7}
    torch.manual_seed(1)
    sample = model.generate(IDS, **sampling)
    for wrong in (0.3, 1.0):
        torch.manual_seed(1)
        assert torch.equal(generate(model, Oracle(sample, wrong), IDS, num_draft_tokens=3, **sampling), sample)


@pytest.mark.parametrize("family", ["zamba2", *(pytest.param(family, marks=pytest.mark.slow) for family in TRAINED)])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    """Positions tell recurrent layers nothing: they see a document a row, and so each one's states are those of the document alone."""
    model = deepcopy(target_of(family)).double()  # some keep float32 within, of which a final norm makes more
    model.set_experts_implementation("eager")  # grouped products take no float64
    draft = auto_draft(model.config)
    target = Target(model, draft.config.aux_layers)
    assert not target._packs
    batch = tiny_batch(draft.algorithm, tiny_rows([["uaaaa", "uuaaaaaaaa"], ["uuaaaa"]]))
    signal = target.capture(batch)
    for row, start, end in ((0, 0, 5), (0, 5, 15), (1, 0, 6)):
        alone = target.capture({"input_ids": batch["input_ids"][row : row + 1, start:end], "positions": torch.arange(end - start)[None]})
        assert_close(signal.aux_BSA[row : row + 1, start:end], alone.aux_BSA, rtol=0, atol=2e-6 * float(alone.aux_BSA.abs().max()))
        assert_close(signal.hidden_BST[row : row + 1, start:end], alone.hidden_BST, rtol=0, atol=1e-5)


class TestReplay:
    @torch.no_grad()
    def test_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where every draft is refused, some passes take none, and the states catch up; what is put out is that of the text's own rows."""
        model, widths = target_of("zamba2"), []
        plain = model.generate(IDS, **GREEDY)
        generate(model, "prompt_lookup", IDS, **{**GREEDY, "max_new_tokens": 1})  # a model is looked at once
        forward = model.model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            widths.append(kwargs["input_ids"].shape[1])
            return forward(*args, **kwargs)

        monkeypatch.setattr(model.model, "forward", watched)
        asked = {**GREEDY, "output_hidden_states": True, "return_dict_in_generate": True}
        ours = generate(model, Oracle(plain, 1.0), IDS, num_draft_tokens=3, **asked)
        assert widths[1 : MOST_REPLAYED + 4] == [*(i + 3 for i in range(1, MOST_REPLAYED + 1)), MOST_REPLAYED + 1, 4, 5]
        assert torch.equal(ours.sequences, plain)
        whole = model(ours.sequences, output_hidden_states=True, use_cache=False).hidden_states  # a step at a time rounds otherwise
        for step, mine in enumerate(ours.hidden_states[1:], IDS.shape[1]):
            for a, b in zip(mine, whole, strict=True):
                assert_close(a, b[:, step : step + 1], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("placed", [False, True])
    def test_modules_that_read_in_turn(self, placed: bool) -> None:
        """Token by token what is as long as the text, the rest as it is; afterwards as before, also where accelerate has hooked in."""
        seen: list[Any] = []

        def forward(x: torch.Tensor, *, mask: torch.Tensor, cache: str) -> tuple[torch.Tensor, None]:
            seen.append((x.shape[1], mask.tolist(), cache))
            return 2 * x, None

        module = type("Mixer", (torch.nn.Module,), {"forward": lambda self, *a, **k: forward(*a, **k)})()
        if placed:
            module.forward = forward
        before, x = dict(vars(module)), torch.randn(1, 3, 4)
        with states._in_turn([module]):
            out, none = module(x, mask=torch.tensor([[1, 2, 3]]), cache="held")
        assert_close(out, 2 * x)
        assert none is None
        assert seen == [(1, [[i]], "held") for i in (1, 2, 3)]
        assert vars(module) == before

    def test_where_several_tokens_are_not_read_as_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing that writes states was found, and so nothing reads them in turn: the probe sees that the text would be another."""
        model, watched = deepcopy(target_of("jamba")), states._watched
        monkeypatch.setattr(states, "_watched", lambda *given: (watched(*given)[0], (), ()))
        with pytest.raises(ForedraftError, match="behind a state it does not read several tokens as it does in one go"):
            generate(model, "prompt_lookup", IDS, **GREEDY)

    def test_a_model_that_leaves_its_cache_empty(self) -> None:
        with pytest.raises(ForedraftError, match="it keeps no cache"):
            generate(target_of("openai-gpt"), "prompt_lookup", IDS, **GREEDY)

    @pytest.mark.parametrize("family", ["zamba2", "minimax"])
    def test_no_trees(self, family: str) -> None:
        model = target_of(family)
        draft = auto_draft(model.config)
        draft.start_from(model)
        with pytest.raises(ForedraftError, match=r"branches of a tree (would run into each other|need layers that keep every token apart)"):
            generate(model, draft, IDS, tree=TreeShape(depth=2), **GREEDY)


class TestStreams:
    @pytest.mark.parametrize("shape", [(1, 2, 3, 4), (1, 2, 12)])
    def test_the_mean(self, shape: tuple[int, ...]) -> None:
        states = torch.randn(shape)
        assert_close(in_one(states, 4), states.view(1, 2, 3, 4).mean(2))
        assert in_one(states[..., :4].reshape(1, -1, 4), 4).shape[2:] == (4,)

    @torch.no_grad()
    def test_is_what_a_draft_reads(self) -> None:
        model = target_of("hy_v4")
        draft = auto_draft(model.config)
        assert type(draft).name == "streams"
        batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaa"]]))
        seen = model.model(batch["input_ids"], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([seen[i].mean(2) for i in draft.config.aux_layers], dim=-1)
        assert_close(Target(model, draft.config.aux_layers).capture(batch).aux_BSA, expected)
