"""Draft trees: they hold the best paths, each node is what its path alone gives, and the output is the target's own."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigged import letter_tokenizer
from test_decoding import GREEDY, VOCAB, Only, draft_of, plain, shape, target_of
from tiny import tiny_draft, tiny_target
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MistralConfig,
    Qwen3NextConfig,
    StoppingCriteriaList,
)
from typer.testing import CliRunner

from foredraft import ForedraftError, TreeShape, generate
from foredraft.decoding import AutoregressiveDrafter, DraftingStats
from foredraft.decoding.checks import check_target
from foredraft.decoding.loop import Chooser, DecodingLoop
from foredraft.decoding.states import keep_rows
from foredraft.decoding.tree import DraftTree
from foredraft.target.capture import AuxCapture

PROMPT = torch.tensor([[3, 4, 5]])
EVERYTHING = TreeShape(depth=2, top_k=12, num_nodes=12 + 144)
"""Of a vocabulary of twelve: whatever the target says is in the tree."""


@functools.cache
def small_pair(size: int | None = None) -> tuple[Any, Any]:
    """Twelve tokens, of which the draft can name `size`."""
    target = tiny_target(layers=2, vocab=12, hidden=16, initializer_range=0.2, eos_token_id=None)
    return target, tiny_draft(target, aux_layers=(1,), num_aux=1, draft_vocab_size=size).eval()


def drafted(target: Any, draft: Any, ids: Tensor, tree: TreeShape = EVERYTHING, **kwargs: Any) -> Any:
    return generate(target, draft, ids, tree=tree, **{**GREEDY, "max_new_tokens": 20, **kwargs})


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each row; the root's is empty."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths


trees = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, VOCAB - 1)), max_size=12).map(
    lambda nodes: DraftTree([token for _, token in nodes], [place % (row + 1) for row, (place, _) in enumerate(nodes)])
)


def raw_rank(draft: Any) -> Any:
    """A `Rank` of the draft's own probabilities, all in the target's vocabulary; notes what it was asked."""

    def rank(logits_NW: Tensor, drafted_NK: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rank.asked += list(zip(drafted_NK.tolist(), logits_NW, strict=True))  # type: ignore[attr-defined]
        log_p, best = logits_NW.log_softmax(-1).topk(min(count, logits_NW.shape[-1]))
        return draft.draft_ids[best], log_p

    rank.asked = []  # type: ignore[attr-defined]
    return rank


def along(draft: Any, ids: Tensor, aux: Tensor, path: Sequence[int]) -> list[Tensor]:
    """The reference: the draft's logits at the root and after each token of `path`, as a chain drafted without history."""
    logits: list[Tensor] = []

    def forced(logits_W: Tensor, so_far: list[int]) -> tuple[int, None] | None:
        logits.append(logits_W)
        return (path[len(so_far)], None) if len(so_far) < len(path) else None

    AutoregressiveDrafter(draft).propose(ids, aux, len(path) + 1, forced)
    return logits


def aux_of(target: Any, draft: Any, ids: Tensor) -> Tensor:
    """The target's aux states of all tokens but the newest."""
    with torch.no_grad(), AuxCapture(target, draft.config.aux_layers) as captured:
        target(ids[None, :-1])
    return captured.aux_BSA


class TestGrowing:
    @pytest.mark.parametrize(("layers", "norms"), [(1, False), (2, False), (1, True)])
    @torch.no_grad()
    def test_every_node_is_what_its_path_alone_gives(self, layers: int, norms: bool) -> None:
        """Logits after every expanded path, over several calls: the cache forgets trees and keeps the text."""
        target, draft = target_of(0), draft_of(0, 20, layers, norms, norms)
        text = plain(target, torch.tensor([[7, 8, 9]]))[0]
        drafter, known = AutoregressiveDrafter(draft), 0
        for length in (3, 4, 7, 12):
            aux = aux_of(target, draft, text[:length])
            rank = raw_rank(draft)
            drafter.propose_tree(text[:length], aux[:, known:], shape(4, 3, 20), rank)
            known = length - 1
            assert [len(path) for path, _ in rank.asked] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
            assert len({tuple(path) for path, _ in rank.asked}) == 10
            for path, logits_W in rank.asked:
                assert_close(logits_W, along(draft, text[:length], aux, path)[-1], rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_a_chain_after_a_tree(self) -> None:
        target, draft = target_of(0), draft_of(0)
        text = torch.tensor([7, 8, 9, 1, 2])
        aux = aux_of(target, draft, text)
        drafter = AutoregressiveDrafter(draft)
        drafter.propose_tree(text[:3], aux[:, :2], shape(3, 3, 9), raw_rank(draft))
        best = lambda logits_W, so_far: (int(logits_W.argmax()), None)  # noqa: E731
        assert drafter.propose(text, aux[:, 2:], 4, best) == AutoregressiveDrafter(draft).propose(text, aux, 4, best)

    @pytest.mark.parametrize(("depth", "top_k", "nodes"), [(3, 5, 5), (3, 3, 2), (2, 6, 42), (2, 6, 20), (2, 6, 7), (1, 6, 3)])
    @pytest.mark.parametrize("seed", range(2))
    @torch.no_grad()
    def test_holds_the_best_of_all_paths(self, seed: int, depth: int, top_k: int, nodes: int) -> None:
        """Against every path of the whole tree, wherever growing cannot lose one: `num_nodes` ≤ `top_k`, or all children at depth 2."""
        target, draft = target_of(seed), draft_of(seed, 6)
        ids = torch.tensor([5, 1, 2])
        aux = aux_of(target, draft, ids)
        names = draft.draft_ids.tolist()
        values: dict[tuple[int, ...], float] = {(): 0.0}
        for path in (path for length in range(depth) for path in itertools.product(names, repeat=length)):
            after_W = along(draft, ids, aux, path)[-1].log_softmax(-1).tolist()
            values |= {(*path, token): values[path] + more for token, more in zip(names, after_W, strict=True)}
        best = sorted(values, key=lambda path: -values[path])[1 : nodes + 1]
        tree = AutoregressiveDrafter(draft).propose_tree(ids, aux, shape(depth, top_k, nodes), raw_rank(draft))
        assert len(tree.tokens) == nodes
        assert set(paths_of(tree)[1:]) == set(best)

    @given(data=st.data(), nodes=st.integers(1, 30))
    @settings(max_examples=50, deadline=None, derandomize=True)
    def test_ranking(self, data: st.DataObject, nodes: int) -> None:
        """Ties included: what stays is the best, connected, parents first."""
        parents = data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
        parents = [p % (i + 1) - 1 for i, p in enumerate(parents)]
        steps = data.draw(st.lists(st.sampled_from([0.0, -1.0, -2.0, float("-inf")]), min_size=len(parents), max_size=len(parents)))
        values: list[float] = []
        for parent, step in zip(parents, steps, strict=True):
            values.append(step + (values[parent] if parent >= 0 else 0.0))
        names = torch.arange(100, 100 + len(parents))
        tree = DraftTree.ranked(names, torch.tensor(parents), torch.tensor(values), nodes)
        possible = [v for v in values if v > float("-inf")]
        assert sorted((values[t - 100] for t in tree.tokens), reverse=True) == sorted(possible, reverse=True)[:nodes]
        for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
            assert parent < row
            assert (tree.tokens[parent - 1] - 100 if parent else -1) == parents[token - 100]

    @given(tree=trees)
    @settings(max_examples=30, deadline=None, derandomize=True)
    def test_what_a_row_sees(self, tree: DraftTree) -> None:
        for row in range(len(tree.tokens) + 1):
            line, at = {row}, row
            while at:
                at = tree.parents[at - 1]
                line.add(at)
            assert tree.visible[row].nonzero().flatten().tolist() == sorted(line)
            assert int(tree.depths[row]) == len(line) - 1


def decoding(target: Any, draft: Any, ids: Tensor, **fields: Any) -> DecodingLoop:
    """A `DecodingLoop` amid a text, for its steps one by one."""
    made = DecodingLoop(draft.algorithm, draft, 1, EVERYTHING, DraftingStats(), None)
    made.model, made.ids, made.processors, made.criteria = target, ids, LogitsProcessorList(), StoppingCriteriaList()
    made.config, made.kept = GenerationConfig(max_length=200, **fields), {}
    return made


class TestVerification:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @given(tree=trees, data=st.data())
    @settings(max_examples=15, deadline=None, derandomize=True)
    @torch.no_grad()
    def test_every_row_is_what_its_path_alone_gives(self, attention: str, tree: DraftTree, data: st.DataObject) -> None:
        """The target's logits and hidden states at each row; and the cache cut to a path is that of a plain forward."""
        target, draft = target_of(0, attention), draft_of(0)
        ids, cache = torch.tensor([[7, 8, 9, 1]]), DynamicCache()
        target(ids[:, :-1], past_key_values=cache)
        with AuxCapture(target, draft.config.aux_layers) as captured:
            kwargs = {"past_key_values": cache, "use_cache": True, "position_ids": torch.arange(4)[None]}
            outputs = target(**decoding(target, draft, ids)._inputs(tree, 1, {}, kwargs))
            aux = captured.aux_BSA
            for row, path in enumerate(paths_of(tree)):
                alone = target(torch.tensor([[*ids[0].tolist(), *path]]))
                assert_close(outputs.logits[0, row], alone.logits[0, -1], rtol=1e-4, atol=1e-4)
                assert_close(aux[0, row], captured.aux_BSA[0, -1], rtol=1e-4, atol=1e-4)
        leaf = data.draw(st.integers(0, len(tree.tokens)))
        keep_rows(cache, tree.visible[leaf].nonzero().flatten().tolist(), 1 + len(tree.tokens))
        expected = target(torch.tensor([[*ids[0].tolist(), *paths_of(tree)[leaf]]])).past_key_values
        for ours, theirs in zip(cache.layers, expected.layers, strict=True):
            assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)

    def test_offering_children_one_by_one_is_the_same(self) -> None:
        """Recursive rejection of point masses, by enumeration, gives the target's distribution, and it gives no other to the children."""
        p = torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1], dtype=torch.double)
        left, rest, told = p.clone(), 1.0, torch.zeros(5, dtype=torch.double)
        for child in (2, 0, 4):
            told[child] = rest * left[child]
            rest *= 1 - left[child]
            left[child] = 0
            left = left / left.sum()
        assert_close(told + rest * left, p)

    def test_distribution(self) -> None:
        """χ² of what is emitted down a fixed tree, its target's distributions given: first token, second, and where it stops."""
        torch.manual_seed(0)
        target, draft = small_pair()
        tree = DraftTree([2, 0, 4, 1, 2], [0, 0, 1, 1, 2])
        made = decoding(target, draft, PROMPT, do_sample=True)
        outputs = SimpleNamespace(logits=torch.randn(1, 6, 5))
        p = outputs.logits[0].double().softmax(-1)
        expected: Counter[tuple[int, ...]] = Counter()

        def walk(row: int, path: tuple[int, ...], chance: float) -> None:
            for token in range(5):
                child = tree.children.get((row, token))
                if child is None:
                    expected[(*path, token)] = chance * float(p[row, token])  # type: ignore[assignment]
                else:
                    walk(child, (*path, token), chance * float(p[row, token]))

        walk(0, (), 1.0)
        samples = 4000
        observed: Counter[tuple[int, ...]] = Counter()
        for _ in range(samples):
            made.ids = PROMPT
            rows, finished = made._follow(tree, outputs)
            assert not finished
            emitted = tuple(made.ids[0, 3:].tolist())
            assert [paths_of(tree)[row] for row in rows] == [emitted[:i] for i in range(len(emitted))]
            observed[emitted] += 1
        assert sum(expected.values()) == pytest.approx(1)
        assert set(observed) <= set(expected)
        chi_square = sum((observed[path] - samples * q) ** 2 / (samples * q) for path, q in expected.items())
        assert float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(chi_square / 2))) > 1e-3


class TestGreedy:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_whole_paths_are_accepted(self, depth: int) -> None:
        """Where the tree holds everything, at every length, so that the limit falls on every place of a path."""
        target, draft = small_pair()
        expected = plain(target, PROMPT)
        for new in range(1, 13):
            stats = DraftingStats()
            tree = shape(depth, 12, 12 + 144 * (depth - 1)) if depth < 3 else shape(3, 144, 12 + 144 + 1728)
            assert drafted(target, draft, PROMPT, tree, max_new_tokens=new, stats=stats).tolist() == expected[:, : 3 + new].tolist()
            assert stats.accepted == stats.drafted
            assert stats.emitted == new - 1
            assert stats.passes == -(-(new - 1) // (depth + 1))


class TestSettings:
    SAMPLING: dict[str, dict[str, Any]] = {  # noqa: RUF012
        "plain": {"top_k": 0},
        "hot": {"top_k": 0, "temperature": 1.5},
        "top k": {"top_k": 5, "temperature": 1.3},
        "top p": {"top_k": 0, "top_p": 0.8},
        "penalty": {"top_k": 0, "repetition_penalty": 1.5},
    }

    @pytest.mark.parametrize("size", [None, 8])
    @pytest.mark.parametrize("name", SAMPLING)
    def test_samples_are_those_of_plain_decoding(self, name: str, size: int | None) -> None:
        """A random number per token, as without a draft: not only the distribution is the same, the samples are."""
        target, draft = small_pair(size)
        stats = DraftingStats()
        for seed in range(3):
            kwargs = {"do_sample": True, "max_new_tokens": 16, **self.SAMPLING[name]}
            torch.manual_seed(seed)
            ours = drafted(target, draft, PROMPT, shape(3, 4, 16), stats=stats, **kwargs)
            torch.manual_seed(seed)
            assert ours.tolist() == plain(target, PROMPT, **kwargs).tolist()
        assert 0.1 < stats.acceptance[0] < 1

    def test_what_must_not_follow_is_not_drafted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = small_pair(8)
        named = draft.draft_ids.tolist()
        unnamed = [i for i in range(12) if i not in named]
        allowed = lambda length: named[:3] if length % 3 else unnamed  # noqa: E731
        drawn: list[DraftTree] = []
        follow = DecodingLoop._follow
        monkeypatch.setattr(DecodingLoop, "_follow", lambda loop, tree, outputs: (drawn.append(tree), follow(loop, tree, outputs))[1])
        kwargs = {"logits_processor": LogitsProcessorList([Only(lambda ids: allowed(len(ids)))])}
        stats = DraftingStats()
        ids = PROMPT[:, :2]
        assert drafted(target, draft, ids, stats=stats, **kwargs).tolist() == plain(target, ids, **kwargs).tolist()
        assert {token for tree in drawn for token in tree.tokens} == set(named[:3])
        assert any(not tree.tokens for tree in drawn)
        assert max(int(tree.depths.max()) for tree in drawn) == 2

    def test_processed_logits_are_those_of_the_target_vocabulary(self) -> None:
        chooser = Chooser(torch.tensor([[0]]), LogitsProcessorList([Only(lambda _: [1, 4])]), False, torch.tensor([1, 3]), 5)
        logits = chooser.processed(torch.tensor([1.0, 2.0]), torch.tensor([]))
        assert logits.tolist() == [float("-inf"), 1.0] + 3 * [float("-inf")]


class TestOutputs:
    def test_counts_the_targets_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One forward of the target per tree, and τ and the acceptance counted by hand."""
        target, draft = small_pair()
        calls: list[int] = []
        forward = target.model.forward
        monkeypatch.setattr(target.model, "forward", lambda *a, **k: (calls.append(k["input_ids"].shape[1]), forward(*a, **k))[1])
        stats, followed = DraftingStats(), []
        follow = DecodingLoop._follow
        monkeypatch.setattr(DecodingLoop, "_follow", lambda *a, **k: (followed.append(follow(*a, **k)), followed[-1])[1])
        drafted(target, draft, PROMPT, shape(3, 4, 9), stats=stats)
        assert calls[:2] == [3, 10]
        assert stats.passes == len(calls) - 1 == len(followed) - 1
        assert stats.tau == 19 / stats.passes
        accepted = [len(rows) - 1 for rows, _ in followed[1:]]
        assert stats.accepted == [sum(n > depth for n in accepted) for depth in range(3)]
        assert stats.drafted[0] in (stats.passes, stats.passes - 1)

    def test_more_is_accepted_than_of_chains(self) -> None:
        chains, trees_ = DraftingStats(), DraftingStats()
        for seed in range(2):
            for first in range(4):
                ids = torch.tensor([[first, 2 * first]])
                generate(target_of(seed), draft_of(seed), ids, num_draft_tokens=4, stats=chains, max_new_tokens=16, **GREEDY)
                drafted(target_of(seed), draft_of(seed), ids, shape(4, 4, 16), stats=trees_, max_new_tokens=16)
        assert trees_.tau > 1.1 * chains.tau
        assert all(tree >= chain for tree, chain in zip(trees_.acceptance, chains.acceptance, strict=True))

    def test_a_tree_of_one_branch_is_a_chain(self) -> None:
        stats = DraftingStats(), DraftingStats()
        for first in range(6):
            ids = torch.tensor([[first, 2 * first]])
            generate(*small_pair(), ids, num_draft_tokens=3, stats=stats[0], max_new_tokens=16, **GREEDY)
            drafted(*small_pair(), ids, shape(3, 1, 3), stats=stats[1], max_new_tokens=16)
        assert stats[0] == stats[1]
        assert sum(stats[0].accepted) > 0


@pytest.mark.parametrize("steps", [1, 3])
def test_trees_of_drafts_that_read_the_final_state(steps: int) -> None:
    """EAGLE-1's, with EAGLE-2's trees, and HASS's."""
    target = tiny_target(eos_token_id=None)
    draft, ids = tiny_draft(target, "eagle", ttt_steps=steps).eval(), torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(generate(target, draft, ids, tree=TreeShape(depth=3), **settings), target.generate(ids, **settings))


class TestErrors:
    def refuse(self, match: str, **kwargs: Any) -> str:
        target, draft = small_pair()
        hooks = [set(layer._forward_hooks) for layer in target.model.layers]
        with pytest.raises(ForedraftError, match=match) as caught:
            drafted(target, draft, PROMPT, **kwargs)
        assert [set(layer._forward_hooks) for layer in target.model.layers] == hooks
        return str(caught.value)

    def test_settings(self) -> None:
        text = self.refuse("LlamaForCausalLM cannot verify a tree", use_cache=False, output_attentions=True, return_dict_in_generate=True)
        assert "use_cache=False" in text
        assert "output_attentions" in text

    @pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
    def test_attention(self, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(small_pair()[0].config, "_attn_implementation_internal", attention)
        text = self.refuse("LlamaForCausalLM cannot verify a tree")
        assert f"its attention is '{attention}', which takes no mask of a tree: load it with attn_implementation='sdpa'" in text

    @pytest.mark.parametrize(
        ("config", "layer"),
        [
            (MistralConfig(num_hidden_layers=2, sliding_window=8), "DynamicSlidingWindowLayer"),
            (Qwen3NextConfig(num_hidden_layers=4), "LinearAttentionLayer"),
        ],
    )
    def test_layers_that_cannot_branch(self, config: Any, layer: str) -> None:
        """Also behind a cache of the user's own that does not show it."""
        config._attn_implementation = "sdpa"
        model: Any = SimpleNamespace(config=config, _is_stateful=False, _supports_default_dynamic_cache=lambda: True)
        for cache in (DynamicCache(config=config), DynamicCache()):
            with pytest.raises(ForedraftError, match=f"keeps states in {layer}"):
                check_target(model, GenerationConfig(), {"past_key_values": cache}, tree=True)

    def test_drafters_without_trees(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(small_pair()[1].algorithm), "drafter", lambda *_: SimpleNamespace(propose=None))
        assert "algorithm 'eagle3' grow no trees: leave tree out, for a chain" in self.refuse("trees")

    @pytest.mark.parametrize("text", ["", "5", "5,8", "5,8,x", "5,8,32,1", "0,8,32", "5,8,-1"])
    def test_shapes(self, text: str) -> None:
        with pytest.raises(ForedraftError, match=f"tree '{re.escape(text)}': expected depth,top_k,num_nodes"):
            TreeShape.parse(text)
        assert TreeShape.parse("5, 8,32") == shape(5, 8, 32)


class TestMeasuring:
    @staticmethod
    @functools.cache
    def pair() -> tuple[Any, Any]:
        target = tiny_target(layers=2, vocab=50, hidden=16, eos_token_id=None)
        return target, tiny_draft(target, aux_layers=(1,), num_aux=1).eval()

    def test_command_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        from foredraft.cli import app, decode

        target, draft = self.pair()
        monkeypatch.setattr(decode, "load_target", lambda *_: (target, letter_tokenizer()))
        monkeypatch.setattr(decode, "load_draft_for", lambda *_: draft)
        (tmp_path / "some.jsonl").write_text('{"prompt": "ho"}\n')
        pair = ["--target", "t", "--draft", "d", "--max-new-tokens", "8", "--tree"]
        out = CliRunner().invoke(app, ["generate", "ho", *pair, "3,4,12"])
        assert "(tree of depth 3, top-k 4, 12 nodes), accepted per position:" in out.output
        out = CliRunner().invoke(app, ["eval", "--prompts", str(tmp_path / "some.jsonl"), *pair, "2,3,6"])
        assert "tree of depth 2, top-k 3, 6 drafted tokens" in " ".join(out.output.split())
        assert isinstance(CliRunner().invoke(app, ["generate", "ho", *pair, "3,4"]).exception, ForedraftError)
