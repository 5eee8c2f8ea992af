"""Decoding with a draft: greedy outputs are the target's own, samples have its distribution, and transformers' options hold."""

import functools
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rigged import letter_tokenizer, predictable_target, trainer_of, written_rows
from tiny import Document, tiny_batch, tiny_config, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from foredraft import ForedraftError, TreeShape, evaluate, generate
from foredraft.decoding import DraftingStats, load_prompts
from foredraft.decoding.checks import check_target
from foredraft.decoding.evaluate import Evaluation
from foredraft.decoding.families import SMALL
from foredraft.decoding.report import demand_identical, plot_acceptance, table
from foredraft.testing.tiny import tiny_model

VOCAB = 30
GREEDY = {"do_sample": False, "pad_token_id": 0}
PROMPT = torch.tensor([[11, 18]])
SHAPES = [None, TreeShape(depth=3, top_k=3, num_nodes=12)]
"""A chain, and a tree: one loop verifies both."""


@functools.cache
def target_of(seed: int, attention: str = "sdpa") -> Any:
    return tiny_target(layers=4, vocab=VOCAB, seed=seed, eos_token_id=None, attn_implementation=attention)


def shape(depth: int, top_k: int, num_nodes: int) -> TreeShape:
    return TreeShape(depth=depth, top_k=top_k, num_nodes=num_nodes)


@functools.cache
def draft_of(seed: int, size: int | None = None, layers: int = 1, norm_output: bool = False, fc_norm: bool = False) -> Any:
    options = {"num_layers": layers, "norm_output": norm_output, "fc_norm": fc_norm, "num_aux": 2, "aux_layers": (1, 3)}
    return tiny_draft(target_of(seed), draft_vocab_size=size, **options).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A predictable target, and a draft trained on its text: much is accepted, not all."""
    target = predictable_target()
    target.generation_config.eos_token_id = None
    draft = tiny_draft(target, ttt_steps=5)
    trainer_of(draft, target, tmp_path_factory.mktemp("pair"), written_rows(target, 16, 24), max_steps=40, logging_steps=40).train()
    return target, draft.eval()


def plain(target: Any, ids: Tensor, **kwargs: Any) -> Any:
    return target.generate(ids, **{**GREEDY, "max_new_tokens": 20, **kwargs})


def drafted(target: Any, draft: Any, ids: Tensor, **kwargs: Any) -> Any:
    return generate(target, draft, ids, **{**GREEDY, "max_new_tokens": 20, **kwargs})


class TestGreedy:
    @given(
        seed=st.integers(0, 3),
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        k=st.integers(1, 6),
        size=st.sampled_from([None, 12, 1]),
        layers=st.sampled_from([1, 2]),
        norms=st.sampled_from([(False, False), (True, True)]),
        new=st.one_of(st.sampled_from([1, 2]), st.integers(0, 1).map(lambda n: -n), st.just(17)),
        eos_after=st.one_of(st.none(), st.integers(0, 16)),
        tree=st.one_of(st.none(), st.builds(shape, st.integers(1, 5), st.integers(1, 5), st.integers(1, 40))),
        attention=st.sampled_from(["sdpa", "eager"]),
    )
    @example(0, [5], 6, 12, 2, (True, True), 17, 0, None, "sdpa")
    @example(0, [5], 6, 12, 2, (True, True), 17, 0, TreeShape(depth=4, top_k=40, num_nodes=40), "eager")
    @settings(max_examples=40, deadline=None, derandomize=True)
    def test_is_the_targets_own(
        self,
        seed: int,
        prompt: list[int],
        k: int,
        size: int | None,
        layers: int,
        norms: tuple[bool, bool],
        new: int,
        eos_after: int | None,
        tree: TreeShape | None,
        attention: str,
    ) -> None:
        """`new` 0 and -1 stand for k and k + 1 tokens; `eos_after`: a token the target does write ends the text."""
        target, draft, how = target_of(seed, attention), draft_of(seed, size, layers, *norms), {"num_draft_tokens": k, "tree": tree}
        ids, new = torch.tensor([prompt]), new if new > 0 else k - new
        expected = plain(target, ids, max_new_tokens=new)
        if eos_after is not None:
            assume(eos_after < new)
            ends = int(expected[0, ids.shape[1] + eos_after])
            expected = plain(target, ids, max_new_tokens=new, eos_token_id=ends)
            assert expected.shape[1] <= ids.shape[1] + eos_after + 1
            ours = drafted(target, draft, ids, max_new_tokens=new, eos_token_id=ends, **how)
        else:
            ours = drafted(target, draft, ids, max_new_tokens=new, **how)
        assert ours.tolist() == expected.tolist()

    @pytest.mark.parametrize("k", range(1, 7))
    def test_what_is_accepted(self, pair: tuple[Any, Any], k: int) -> None:
        """With drafts that are right: many lengths, so that the limit falls on every place of an accepted chain."""
        target, draft = pair
        stats = DraftingStats()
        expected = plain(target, PROMPT)
        for new in (*range(1, 10), 20):
            ours = drafted(target, draft, PROMPT, max_new_tokens=new, num_draft_tokens=k, stats=stats)
            assert ours.tolist() == expected[:, : 2 + new].tolist()
        assert sum(stats.accepted) > 0.4 * sum(stats.drafted) > 0
        assert stats.accepted[-1] > 0  # whole chains
        assert stats.tau > 1.5

    def test_what_is_accepted_and_what_is_not(self, pair: tuple[Any, Any]) -> None:
        target, draft = pair
        stats = DraftingStats()
        for i in range(5):
            ids = torch.tensor([[6 * i + 1, 2 * i + 2]])
            assert drafted(target, draft, ids, num_draft_tokens=i + 1, stats=stats).tolist() == plain(target, ids).tolist()
        assert 0.2 < stats.acceptance[0] < 1

    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize("after", range(7))
    def test_end_of_text_within_what_is_accepted(self, pair: tuple[Any, Any], after: int, tree: TreeShape | None) -> None:
        target, draft = pair
        ends, stats = [int(plain(target, PROMPT)[0, 2 + after]), 0], DraftingStats()
        ours = drafted(target, draft, PROMPT, eos_token_id=ends, tree=tree, stats=stats)
        assert ours.tolist() == plain(target, PROMPT, eos_token_id=ends).tolist()
        assert ours.shape[1] == 2 + after + 1
        assert stats.emitted == after

    def test_a_draft_of_another_dtype(self, pair: tuple[Any, Any]) -> None:
        """Drafting in bfloat16 changes what is proposed, not what is said."""
        target, draft = pair
        half = tiny_draft(target, ttt_steps=5).to(torch.bfloat16).eval()
        half.load_state_dict(draft.state_dict())
        stats = DraftingStats()
        assert drafted(target, half, PROMPT, stats=stats).tolist() == plain(target, PROMPT).tolist()
        assert sum(stats.accepted) > 0

    @pytest.mark.parametrize("form", ["max_length", "generation_config", "min_new_tokens", "attention_mask", "past_key_values"])
    def test_other_ways_to_say_it(self, pair: tuple[Any, Any], form: str) -> None:
        target, draft = pair
        ends = int(plain(target, PROMPT)[0, 6])
        kwargs: dict[str, Any] = {
            "max_length": {"max_length": 9, "max_new_tokens": None},
            "generation_config": {"generation_config": GenerationConfig(max_new_tokens=9, pad_token_id=0), "max_new_tokens": None},
            "min_new_tokens": {"min_new_tokens": 8, "max_new_tokens": 12, "eos_token_id": ends},
            "attention_mask": {"attention_mask": torch.ones_like(PROMPT)},
            "past_key_values": {},
        }[form]
        kwargs = {**GREEDY, "max_new_tokens": 20, **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        expected = target.generate(PROMPT, **kwargs).tolist()
        for tree in SHAPES:
            stats = DraftingStats()
            kwargs |= {"past_key_values": DynamicCache()} if form == "past_key_values" else {}
            assert generate(target, draft, PROMPT, stats=stats, tree=tree, **kwargs).tolist() == expected
            assert stats.passes > 0


class Checked:
    """A drafter that, at every call, holds its proposal against a drafter without a cache, and notes the logits it chose from."""

    def __init__(self, make: Callable[[], Any], made: list["Checked"]):
        self.inner, self.make, self.aux = make(), make, []
        self.calls: list[tuple[int, list[int], list[Tensor]]] = []
        made.append(self)

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Any) -> Any:
        self.aux.append(aux_1NA)
        seen: list[list[Tensor]] = [[], []]

        def noting(where: list[Tensor]) -> Any:
            return lambda logits_W, so_far: (where.append(logits_W.clone()), choose(logits_W, so_far))[1]

        ours = self.inner.propose(ids, aux_1NA, limit, noting(seen[0]))
        fresh = self.make().propose(ids, torch.cat(self.aux, dim=1), limit, noting(seen[1]))
        assert ours[0] == fresh[0], "the cache holds something else than the confirmed history"
        assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)
        assert len(self.inner.cache) == len(ids) - 1 + len(ours[0]) - 1  # confirmed slots, and the drafted ones that were fed back
        self.calls.append((len(ids), ours[0], seen[0]))
        return ours


def checked(monkeypatch: pytest.MonkeyPatch, draft: Any) -> list[Checked]:
    made: list[Checked] = []
    make = type(draft.algorithm).drafter
    monkeypatch.setattr(type(draft.algorithm), "drafter", lambda algorithm, draft: Checked(lambda: make(algorithm, draft), made))
    return made


class TestDrafter:
    @pytest.mark.parametrize("k", [1, 3, 5])
    def test_the_cache_after_rejections(self, pair: tuple[Any, Any], k: int, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = pair
        made = checked(monkeypatch, draft)
        stats = DraftingStats()
        for i in range(6):
            drafted(target, draft, torch.tensor([[3 * i + 1, 30, i + 2]]), num_draft_tokens=k, stats=stats)
        assert 0 < stats.accepted[0] < stats.drafted[0]  # both happened
        assert all(len(drafter.calls) > 2 for drafter in made)

    @pytest.mark.parametrize("layers", [1, 2])
    def test_the_cache_of_a_random_draft(self, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        draft = draft_of(1, None, layers, False, False)
        made = checked(monkeypatch, draft)
        drafted(target_of(1), draft, torch.tensor([[7, 8, 9]]), num_draft_tokens=4)
        assert len(made[0].calls) > 5

    @pytest.mark.parametrize("norms", [(False, False), (True, True)])
    @pytest.mark.parametrize("layers", [1, 2])
    def test_decoding_sees_what_training_sees(self, layers: int, norms: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
        """A chain that is the text itself (drafts rigged to be right): its logits are those of training on that text."""
        target, steps = target_of(2), 4
        draft = draft_of(2, 20, layers, *norms)
        prompt = torch.tensor([[4, 9, 2]])
        text = plain(target, prompt)[0].tolist()
        made = checked(monkeypatch, draft)
        monkeypatch.setattr(
            "foredraft.decoding.loop.Chooser.choose",
            lambda chooser, logits, so_far: (text[chooser.ids.shape[1] + len(so_far)], None),
        )
        stats = DraftingStats()
        out = drafted(target, draft, prompt, num_draft_tokens=steps, stats=stats)
        assert out[0].tolist() == text
        assert stats.accepted == stats.drafted
        batch = tiny_batch(draft.algorithm, tiny_rows([[Document(text, "uu" + "a" * (len(text) - 2))]]))
        states = draft.algorithm.unroll(draft, batch, tiny_signal(target, draft, batch).aux_BSA)
        slots = batch["slots"][0].tolist()
        compared = 0
        for length, _, logits in made[0].calls:
            slot = length - 2  # it holds the features of the last token but one, and reads the last
            for k, logits_W in enumerate(logits):
                assert_close(logits_W, draft.compute_logits(states[k][0, slots.index(slot)]), rtol=1e-3, atol=1e-3)
                compared += 1
        assert compared > 10


def p_value(chi_square: float, degrees: int) -> float:
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(chi_square / 2)))


@functools.cache
def sampled_pair(family: str = "llama") -> tuple[Any, Any]:
    """Twelve tokens, of which the draft can name eight; behind a state, and full attention, in a hybrid."""
    sizes: dict[str, Any] = {"initializer_range": 0.2, "eos_token_id": None}
    if family == "llama":
        target: Any = tiny_target(layers=2, vocab=12, hidden=16, **sizes)
    else:
        sizes |= {"vocab_size": 12, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        known = CONFIG_MAPPING[family]().to_dict()
        target = tiny_model(CONFIG_MAPPING[family](**{**{n: v for n, v in SMALL.items() if n in known}, **sizes}))
        target.generation_config.eos_token_id = None
    return target, tiny_draft(target, aux_layers=(1,), num_aux=1, draft_vocab_size=8, ttt_steps=2).eval()


class Only(LogitsProcessor):
    """Lets only some tokens through, and nothing where none of them has a chance."""

    def __init__(self, allowed: Callable[[Tensor], list[int]]):
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = torch.full_like(scores, float("-inf"))
        mask[:, self.allowed(input_ids[0])] = 0
        return scores + mask


class TestSampling:
    SETTINGS: dict[str, tuple[dict[str, Any], list[Any]]] = {  # noqa: RUF012
        "plain": ({"top_k": 0}, []),
        "hot": ({"top_k": 0, "temperature": 1.5}, [TemperatureLogitsWarper(1.5)]),
        "top k": ({"top_k": 5, "temperature": 1.3}, [TemperatureLogitsWarper(1.3), TopKLogitsWarper(5)]),
        "top p": ({"top_k": 0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    }

    @staticmethod
    def sample(k: int, new: int, stats: DraftingStats, family: str = "llama", **kwargs: Any) -> list[int]:
        out = generate(
            *sampled_pair(family),
            torch.tensor([[3, 4, 5]]),
            num_draft_tokens=k,
            max_new_tokens=new,
            do_sample=True,
            pad_token_id=0,
            stats=stats,
            **kwargs,
        )
        assert out.shape[1] == 3 + new
        return out[0].tolist()

    @staticmethod
    def exact(ids: Tensor, processors: list[Any], family: str = "llama") -> Tensor:
        """The target's processed distribution after every prefix of `ids` [L]: [L, V]."""
        with torch.no_grad():
            logits_LV = sampled_pair(family)[0](ids[None]).logits[0].float()
        return LogitsProcessorList(processors)(ids[None].expand(len(ids), -1), logits_LV).softmax(-1)

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "samples"), [("top k", 1500)])
    def test_joint_distribution(self, name: str, samples: int) -> None:
        """The second and third token, drafted together: χ² against the exact probabilities."""
        torch.manual_seed(0)
        kwargs, processors = self.SETTINGS[name]
        stats = DraftingStats()
        counts = Counter(tuple(self.sample(2, 4, stats, **kwargs)[4:6]) for _ in range(samples))
        assert 0.2 < stats.acceptance[0] < 0.95
        assert stats.accepted[1] > 100
        joint = torch.zeros(12, 12, dtype=torch.double)
        for first in range(12):
            weight = self.exact(torch.tensor([3, 4, 5]), processors)[-1, first].double()
            for second in range(12):
                p_LV = self.exact(torch.tensor([3, 4, 5, first, second]), processors).double()
                joint[second] += weight * p_LV[3, second] * p_LV[4]
        expected = joint.flatten() * samples
        observed = torch.tensor([counts[divmod(i, 12)] for i in range(144)], dtype=torch.double)
        assert observed[expected == 0].sum() == 0
        rare = expected < 5
        groups = torch.where(rare, 0, rare.logical_not().cumsum(0))  # cells too rare for χ² are one cell
        expected, observed = (torch.zeros(int(groups.max()) + 1, dtype=torch.double).index_add(0, groups, x) for x in (expected, observed))
        assert len(expected) > 20
        chi_square = float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum())
        assert p_value(chi_square, len(expected) - 1) > 1e-3

    @pytest.mark.parametrize(
        ("name", "k", "family"),
        [
            pytest.param("plain", 4, "llama", marks=pytest.mark.slow),  # the conformance kit samples so, too
            pytest.param("hot", 1, "llama", marks=pytest.mark.slow),
            ("top k", 4, "llama"),
            ("top p", 2, "llama"),
            ("top k", 3, "qwen3_next"),
        ],
    )
    def test_conditional_distributions(self, name: str, k: int, family: str) -> None:
        """Long samples: F(token) under the target's exact distribution after its own prefix is uniform, token for token.

        Tokens that the draft can name stand first, so that a preference for them shows.
        """
        torch.manual_seed(k)
        kwargs, processors = self.SETTINGS[name]
        stats, values = DraftingStats(), []
        order = sampled_pair(family)[1].t2d.logical_not().long().argsort(stable=True)
        for _ in range(15):
            ids = torch.tensor(self.sample(k, 40, stats, family, **kwargs))
            p_LV = self.exact(ids, processors, family)[2:-1][:, order]
            at = (order == ids[3:, None]).long().argmax(-1, keepdim=True)
            assert p_LV.gather(1, at).gt(0).all()
            values.append((p_LV.cumsum(-1).gather(1, at) - p_LV.gather(1, at) * torch.rand(len(at), 1)).flatten())
        counts = torch.histc(torch.cat(values), 12, 0, 1)
        assert counts.sum() == 600
        assert 0.2 < stats.acceptance[0] < 0.95
        assert p_value(float(((counts - 50) ** 2 / 50).sum()), 11) > 1e-3

    def test_the_same_seed_gives_the_same_sample(self) -> None:
        samples = []
        for _ in range(2):
            torch.manual_seed(3)
            samples.append(self.sample(3, 12, DraftingStats(), top_k=0))
        assert samples[0] == samples[1]

    def test_nothing_the_draft_can_name_is_allowed(self) -> None:
        allowed = [i for i in range(12) if not sampled_pair()[1].t2d[i]]
        stats = DraftingStats()
        out = self.sample(3, 10, stats, logits_processor=LogitsProcessorList([Only(lambda _: allowed)]))
        assert set(out[3:]) <= set(allowed)
        assert (sum(stats.drafted), stats.tau) == (0, 1.0)
        assert set(self.sample(3, 10, stats, prefix_allowed_tokens_fn=lambda *_: allowed)[3:]) <= set(allowed)


class TestProcessors:
    CASES: dict[str, dict[str, Any]] = {  # noqa: RUF012
        "repetition penalty": {"repetition_penalty": 1.8},
        "no repeated pairs": {"no_repeat_ngram_size": 2},
        "bad words": {"bad_words_ids": [[25], [32], [39, 46], [46]]},
        "suppressed": {"suppress_tokens": [25, 46]},
        "some allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1]) // 2, (int(ids[-1]) + 7) % 50]},
    }

    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize("case", CASES)
    def test_draft_and_target_obey(self, pair: tuple[Any, Any], case: str, tree: TreeShape | None) -> None:
        target, draft = pair
        stats = DraftingStats()
        ours = drafted(target, draft, PROMPT, stats=stats, tree=tree, **self.CASES[case])
        assert ours.tolist() == plain(target, PROMPT, **self.CASES[case]).tolist()
        assert sum(stats.accepted) > 0

    def test_reduced_vocabulary(self) -> None:
        target, draft = target_of(0), draft_of(0, 12, 1, False, False)
        for case in ({"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 1}):
            assert drafted(target, draft, PROMPT, **case).tolist() == plain(target, PROMPT, **case).tolist()

    def test_nothing_the_draft_can_name_is_allowed(self) -> None:
        target, draft = target_of(0), draft_of(0, 12, 1, False, False)
        allowed = [i for i in range(VOCAB) if not draft.t2d[i]]
        stats = DraftingStats()
        kwargs: dict[str, Any] = {"logits_processor": LogitsProcessorList([Only(lambda _: allowed)]), "max_new_tokens": 10}
        assert drafted(target, draft, PROMPT, stats=stats, **kwargs).tolist() == plain(target, PROMPT, **kwargs).tolist()
        assert (stats.passes, stats.emitted, sum(stats.drafted)) == (9, 9, 0)
        # transformers' own way to say it gives every allowed token the same chance where none has one: drafts of no worth, same text.
        kwargs = {"prefix_allowed_tokens_fn": lambda *_: allowed}
        assert drafted(target, draft, PROMPT, **kwargs).tolist() == plain(target, PROMPT, **kwargs).tolist()

    def test_allowed_only_at_the_start_of_the_chain(self) -> None:
        """The draft's chain ends where nothing may follow that it can name."""
        target = target_of(0)
        draft = draft_of(0, 12, 1, False, False)
        named = draft.draft_ids.tolist()
        unnamed = [i for i in range(VOCAB) if i not in named]
        kwargs = {"logits_processor": LogitsProcessorList([Only(lambda ids: named if len(ids) % 3 else unnamed)])}
        stats = DraftingStats()
        assert drafted(target, draft, PROMPT, stats=stats, **kwargs).tolist() == plain(target, PROMPT, **kwargs).tolist()
        assert 0 < len(stats.drafted) < 4


class Until(StoppingCriteria):
    """Ends with the token, from some length on."""

    def __init__(self, token: int, least: int = 0):
        self.token, self.least = token, least

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] == self.token) & torch.tensor(input_ids.shape[1] >= self.least)


class Recorder(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class TestStopping:
    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize("after", [*range(7), None])
    def test_criteria_and_streamers_meet_every_token(self, pair: tuple[Any, Any], after: int | None, tree: TreeShape | None) -> None:
        """As without a draft: also where the text ends within what was accepted, or no criterion is ever met."""
        target, draft = pair
        token = -1 if after is None else int(plain(target, PROMPT)[0, 2 + after])
        criteria, streamers = StoppingCriteriaList([Until(token)]), (Recorder(), Recorder())
        ours = drafted(target, draft, PROMPT, stopping_criteria=[Until(token)], streamer=streamers[0], tree=tree)
        assert ours.tolist() == plain(target, PROMPT, stopping_criteria=criteria, streamer=streamers[1]).tolist()
        assert streamers[0].chunks == streamers[1].chunks
        assert streamers[0].ended == 1

    def test_end_of_text_before_the_criterion(self, pair: tuple[Any, Any]) -> None:
        target, draft = pair
        text = plain(target, PROMPT)[0].tolist()
        ours = drafted(target, draft, PROMPT, stopping_criteria=[Until(text[9])], eos_token_id=text[7])
        assert ours[0].tolist() == text[:8]

    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize(("at", "length"), [(3, 3), (6, 1), (9, 2)])
    def test_stop_strings(self, pair: tuple[Any, Any], at: int, length: int, tree: TreeShape | None) -> None:
        target, draft = pair
        tokenizer = letter_tokenizer()
        text = plain(target, PROMPT)[0].tolist()
        stop = {"stop_strings": [tokenizer.decode(text[at : at + length]), "zzz"]}
        expected = plain(target, PROMPT, tokenizer=tokenizer, **stop)
        assert expected.shape[1] < 22
        for kwargs in (stop, {"generation_config": GenerationConfig(max_new_tokens=20, pad_token_id=0, **stop)}):
            assert drafted(target, draft, PROMPT, tokenizer=tokenizer, tree=tree, **kwargs).tolist() == expected.tolist()

    def test_one_stop_string_and_a_criterion(self, pair: tuple[Any, Any]) -> None:
        target, draft = pair
        tokenizer = letter_tokenizer()
        text = plain(target, PROMPT)[0].tolist()
        kwargs = {"stop_strings": tokenizer.decode([text[9]]), "tokenizer": tokenizer}
        ours = drafted(target, draft, PROMPT, stopping_criteria=StoppingCriteriaList([Until(text[7])]), **kwargs)
        assert ours[0].tolist() == text[:8]
        assert drafted(target, draft, PROMPT, stopping_criteria=[Until(text[11])], **kwargs)[0].tolist() == text[:10]

    def test_stop_strings_without_a_tokenizer(self, pair: tuple[Any, Any]) -> None:
        with pytest.raises(ForedraftError, match="stop_strings need the tokenizer"):
            drafted(*pair, PROMPT, stop_strings=["x"])

    def test_a_tokenizer_without_stop_strings(self, pair: tuple[Any, Any]) -> None:
        target, draft = pair
        assert drafted(target, draft, PROMPT, tokenizer=letter_tokenizer()).tolist() == plain(target, PROMPT).tolist()


class TestOutputs:
    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize("stop", [None, *range(0, 8, 2)])
    def test_dictionary(self, pair: tuple[Any, Any], stop: int | None, tree: TreeShape | None) -> None:
        """Everything that plain generation returns, the cache included, cut where it would have stopped."""
        target, draft = pair
        kwargs: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 12}
        kwargs |= {"output_scores": True, "output_logits": True, "output_hidden_states": True}
        if stop is not None:
            kwargs["stopping_criteria"] = StoppingCriteriaList([Until(int(plain(target, PROMPT)[0, 2 + stop]))])
        stats = DraftingStats()
        ours, theirs = drafted(target, draft, PROMPT, stats=stats, tree=tree, **kwargs), plain(target, PROMPT, **kwargs)
        assert sum(stats.accepted) > 0 or stop is not None
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        new = theirs.sequences.shape[1] - 2
        assert len(ours.scores) == len(ours.logits) == len(ours.hidden_states) == new
        assert_close(ours.scores, theirs.scores, rtol=1e-3, atol=1e-3)
        assert_close(ours.logits, theirs.logits, rtol=1e-3, atol=1e-3)
        for mine, others in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert_close(mine, others, rtol=1e-3, atol=1e-3)
        assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == new + 1
        for mine, others in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
            assert_close(mine.keys, others.keys, rtol=1e-3, atol=1e-3)
            assert_close(mine.values, others.values, rtol=1e-3, atol=1e-3)
        bare = drafted(target, draft, PROMPT, tree=tree, return_dict_in_generate=True)
        assert (bare.scores, bare.logits, bare.hidden_states) == (None, None, None)

    def test_hidden_states_without_a_dictionary(self, pair: tuple[Any, Any]) -> None:
        target, draft = pair
        stats = DraftingStats()
        assert drafted(target, draft, PROMPT, output_hidden_states=True, stats=stats).tolist() == plain(target, PROMPT).tolist()
        assert sum(stats.accepted) > 0

    def test_streamed_text(self, pair: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
        tokenizer = letter_tokenizer()
        out = drafted(*pair, PROMPT, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out == tokenizer.decode(out[0, 2:]) + "\n"

    @pytest.mark.parametrize("window", [None, 6])
    def test_attentions(self, window: int | None) -> None:
        """Of each token over its text, or over its window; a cache that keeps no more than the window goes back all the same."""
        fields = {"attn_implementation": "eager", "eos_token_id": None}
        config = tiny_config(4, VOCAB) if window is None else MistralConfig(**tiny_config(4, VOCAB).to_diff_dict(), sliding_window=window)
        config.update(fields)
        target = tiny_model(config, seed=1)
        draft = tiny_draft(target, num_aux=2, aux_layers=(1, 3)).eval()
        stats, kwargs = DraftingStats(), {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 16}
        ours, theirs = drafted(target, draft, PROMPT, stats=stats, **kwargs), plain(target, PROMPT, **kwargs)
        assert 0 < sum(stats.accepted) < sum(stats.drafted)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert len(ours.attentions) == len(theirs.attentions) == 16
        for mine, others in zip(ours.attentions, theirs.attentions, strict=True):
            for a, b in zip(mine, others, strict=True):
                assert_close(a[..., -b.shape[-1] :], b, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("tree", SHAPES)
    def test_no_keys_are_copied(self, pair: tuple[Any, Any], tree: TreeShape | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """The target has 2 key heads for 4 query heads; transformers repeats them where there is a mask."""
        target, draft = pair
        expected = plain(target, PROMPT).tolist()
        monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)
        assert drafted(target, draft, PROMPT, tree=tree).tolist() == expected


class TestErrors:
    def test_a_batch(self, pair: tuple[Any, Any]) -> None:
        with pytest.raises(ForedraftError, match="one sequence at a time, found a batch of 2"):
            drafted(*pair, PROMPT.expand(2, -1))

    def test_padding(self, pair: tuple[Any, Any]) -> None:
        with pytest.raises(ForedraftError, match="attention mask hides tokens"):
            drafted(*pair, PROMPT, attention_mask=torch.tensor([[0, 1]]))

    def test_another_target(self, pair: tuple[Any, Any]) -> None:
        with pytest.raises(ForedraftError, match="made for another target") as caught:
            drafted(tiny_target(layers=4, vocab=40, hidden=16), pair[1], PROMPT)
        for name, ours, theirs in (("hidden_size", 32, 16), ("num_hidden_layers", 8, 4), ("vocab_size", 50, 40)):
            assert f"{name}: the draft expects {ours}, the target has {theirs}" in str(caught.value)

    def test_the_target_is_restored(self, pair: tuple[Any, Any]) -> None:
        """Whatever happens."""
        target, draft = pair
        hooks = [set(layer._forward_hooks) for layer in target.model.layers]

        class Broken(StoppingCriteria):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("the user's own")

        drafted(target, draft, PROMPT)
        with pytest.raises(RuntimeError, match="the user's own"):
            drafted(target, draft, PROMPT, stopping_criteria=[Broken()])
        assert [set(layer._forward_hooks) for layer in target.model.layers] == hooks
        assert target.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("tree", SHAPES)
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_beams": 2}, "num_beams=2: a draft decodes one sequence at a time"),
            ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: this way of decoding takes no draft"),
            ({"use_cache": False}, "it keeps no cache"),
            ({"cache_implementation": "static"}, "a StaticCache cannot go back to before a rejected token"),
            ({"past_key_values": StaticCache(config=tiny_config(), max_cache_len=40)}, "a StaticCache cannot go back"),
        ],
    )
    def test_what_cannot_go_back(self, pair: tuple[Any, Any], settings: dict[str, Any], message: str, tree: TreeShape | None) -> None:
        with pytest.raises(ForedraftError, match=message):
            drafted(*pair, PROMPT, tree=tree, **settings)

    def test_a_quantised_cache(self, pair: tuple[Any, Any]) -> None:
        cache = QuantizedCache.__new__(QuantizedCache)
        with pytest.raises(ForedraftError, match="LlamaForCausalLM cannot verify drafted tokens: a QuantizedCache cannot go back"):
            check_target(pair[0], GenerationConfig(), {"past_key_values": cache}, tree=False)


class TestStats:
    def test_definitions(self) -> None:
        stats = DraftingStats()
        assert (stats.tau, stats.acceptance) == (1.0, [])
        for drafted_, accepted in ((3, 3), (3, 0), (2, 1), (0, 0)):
            stats.add(drafted_, accepted)
        assert (stats.passes, stats.emitted) == (4, 8)
        assert stats.tau == 2.0
        assert stats.drafted == [3, 3, 2]
        assert stats.accepted == [2, 1, 1]
        assert stats.acceptance == pytest.approx([2 / 3, 1 / 3, 1 / 2])

    @pytest.mark.parametrize("new", [1, 2, 5, 20])
    def test_prefill_is_not_counted(self, pair: tuple[Any, Any], new: int) -> None:
        """Every new token but prefill's is one of a counted pass."""
        stats = DraftingStats()
        for _ in range(2):
            drafted(*pair, PROMPT, max_new_tokens=new, stats=stats)
        assert stats.emitted == 2 * (new - 1)
        assert stats.passes <= stats.emitted
        assert len(stats.drafted) <= 4

    def test_counts_the_targets_passes(self, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = pair
        calls: list[int] = []
        forward = target.model.forward
        monkeypatch.setattr(target.model, "forward", lambda *a, **k: (calls.append(1), forward(*a, **k))[1])
        stats = DraftingStats()
        drafted(target, draft, PROMPT, stats=stats)
        assert stats.passes == len(calls) - 1
        assert stats.tau == 19 / (len(calls) - 1)


ASKED = [[{"role": "user", "content": text}] for text in ("ho", "v", "CJQbi", "pw")]


class TestEvaluate:
    @pytest.fixture(scope="class")
    @staticmethod
    def result(pair: tuple[Any, Any]) -> tuple[Evaluation, list[int]]:
        seen: list[int] = []
        progress = lambda n, stats: seen.append(n)  # noqa: E731
        found = evaluate(*pair, letter_tokenizer(), ASKED, num_draft_tokens=3, max_new_tokens=24, progress=progress)
        return found, seen

    def test_result(self, result: tuple[Evaluation, list[int]], pair: tuple[Any, Any]) -> None:
        found, seen = result
        assert (found.prompts, found.identical, found.different, seen) == (4, 4, [], [1, 2, 3, 4])
        assert found.emitted == 4 * 24
        assert 1.5 < found.tau <= 4
        assert len(found.acceptance) == 3
        assert all(0 < a <= 1 for a in found.acceptance)
        assert found.tokens_per_second > 0
        assert found.plain_tokens_per_second
        assert found.speedup == found.tokens_per_second / found.plain_tokens_per_second
        expected = {"shape": "chain", "num_draft_tokens": 3, "max_new_tokens": 24, "temperature": 0.0, "dtype": "float32", "device": "cpu"}
        assert expected.items() <= found.settings.items()

    def test_tau_is_micro_averaged(self, result: tuple[Evaluation, list[int]], pair: tuple[Any, Any]) -> None:
        stats = DraftingStats()
        for (message,) in ASKED:
            ids = torch.tensor([letter_tokenizer()(f"<{message['content']}>")["input_ids"]])
            drafted(*pair, ids, num_draft_tokens=3, max_new_tokens=24, stats=stats)
        assert result[0].tau == stats.tau
        assert result[0].acceptance == stats.acceptance

    def test_json_and_table_and_plot(self, result: tuple[Evaluation, list[int]], tmp_path: Path) -> None:
        found = result[0]
        fields = json.loads(json.dumps(found.to_dict()))
        assert fields["tau"] == found.tau
        assert fields["speedup"] == found.speedup
        assert fields["settings"]["num_draft_tokens"] == 3
        plot_acceptance({"a": found, "b": found}, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        out = io.StringIO()
        Console(file=out, width=200).print(table({"some": found}))
        assert "mean" not in out.getvalue()
        Console(file=out, width=200).print(table({"some": found, "other": found}))
        assert "mean" in out.getvalue()
        for part in ("some (4)", f"{found.tau:.2f}", "4/4", "chain, 3 drafted tokens, temperature 0, ≤ 24 new tokens, float32 on cpu"):
            assert part in out.getvalue()

    def test_sampling(self, pair: tuple[Any, Any]) -> None:
        run = functools.partial(evaluate, *pair, letter_tokenizer(), ASKED[:2], max_new_tokens=6, temperature=1.0, seed=7)
        found, again = run(), run()
        assert found.identical is None
        assert found.different == []
        assert found.settings["temperature"] == 1.0
        assert (found.tau, found.acceptance) == (again.tau, again.acceptance)

    def test_without_the_baseline(self, pair: tuple[Any, Any]) -> None:
        found = evaluate(*pair, letter_tokenizer(chat=False), ASKED[:1], max_new_tokens=6, baseline=False)
        assert (found.identical, found.plain_tokens_per_second, found.speedup) == (None, None, None)
        assert json.loads(json.dumps(found.to_dict()))["speedup"] is None
        out = io.StringIO()
        Console(file=out, width=200).print(table({"x": found}))
        assert "x (1)" in out.getvalue()

    def test_a_prompt_that_holds_the_padding_token(self, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """It is read like any other: transformers would hide it where no attention mask is given."""
        target, seen = pair[0], []
        forward = target.model.forward
        monkeypatch.setattr(target.model, "forward", lambda *a, **k: (seen.append(k.get("attention_mask")), forward(*a, **k))[1])
        tokenizer = letter_tokenizer()
        tokenizer.pad_token = "h"
        evaluate(*pair, tokenizer, ASKED[:1], max_new_tokens=4)
        assert all(mask is None or bool((mask != 0).all()) for mask in seen)

    def test_a_difference_is_found(self, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(*args: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
            out = generate(*args, input_ids=input_ids, **kwargs)
            return out.flip(-1) if input_ids.shape[1] == 4 else out  # prompts of two letters

        monkeypatch.setattr(sys.modules["foredraft.decoding.evaluate"], "generate", wrong)
        found = evaluate(*pair, letter_tokenizer(), ASKED, max_new_tokens=4)
        assert (found.identical, found.different) == (2, [0, 3])

    def test_demand_identical(self, result: tuple[Evaluation, list[int]]) -> None:
        fields = {**vars(result[0]), "identical": 2, "different": [1, 3]}
        demand_identical({"good": result[0]})
        with pytest.raises(ForedraftError, match=r"differ from plain decoding on prompts {'bad': \[1, 3\]}"):
            demand_identical({"good": result[0], "bad": Evaluation(**fields)})
        demand_identical({"bad": Evaluation(**{**fields, "settings": {**fields["settings"], "dtype": "bfloat16"}})})


class TestPrompts:
    def load(self, tmp_path: Path, *lines: Any, **kwargs: Any) -> Any:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return load_prompts(file, **kwargs)

    def test_forms(self, tmp_path: Path) -> None:
        turns = [("user", "d"), ("assistant", "e"), ("user", "f"), ("assistant", "g")]
        found = self.load(
            tmp_path,
            {"prompt": "a"},
            "",
            {"turns": ["b", "c"], "category": "x"},
            {"messages": [{"role": role, "content": text} for role, text in turns]},
            {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "i"}]},
        )
        assert [[(m["role"], m["content"]) for m in prompt] for prompt in found] == [
            [("user", "a")],
            [("user", "b")],
            turns[:3],
            [("user", "h")],
        ]

    def test_limit(self, tmp_path: Path) -> None:
        assert len(self.load(tmp_path, *({"prompt": str(i)} for i in range(5)), limit=2)) == 2

    BAD: dict[str, tuple[Any, str]] = {  # noqa: RUF012
        "no JSON": ('{"prompt": ', "no JSON"),
        "none of the fields": ({"question": "x", "answer": "y"}, "no turns: expected .*found"),
        "a list": ([5], "a turn that is no object"),
        "a text": ('"x"', "a bare text"),
        "no question": ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn to answer"),
        "messages without roles": ({"messages": [{"text": "x"}]}, "a turn without 'role'"),
        "turns that are no texts": ({"turns": "what"}, "no turns"),
    }

    @pytest.mark.parametrize("case", BAD)
    def test_bad_lines_are_named(self, tmp_path: Path, case: str) -> None:
        """Skipped among others; with `strict`, or alone, an error."""
        line, message = self.BAD[case]
        assert len(self.load(tmp_path, {"prompt": "fine"}, line)) == 1
        with pytest.raises(ForedraftError, match=f"line 2: {message}"):
            self.load(tmp_path, {"prompt": "fine"}, line, strict=True)
        with pytest.raises(ForedraftError, match=r"(?s)holds none.*(line 1|record 0): "):
            self.load(tmp_path, line)

    def test_no_prompts(self, tmp_path: Path) -> None:
        with pytest.raises(ForedraftError, match="holds none"):
            self.load(tmp_path, "")
        with pytest.raises(ForedraftError, match="no such file"):
            load_prompts(tmp_path / "nothing.jsonl")
