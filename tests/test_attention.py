"""Attention patterns against a loop that lists every query's keys, and the backbone on some rows against the whole."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from tiny import spelt_out, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.testing import assert_close

from foredraft.contracts.draft import Layout
from foredraft.draft.attention import Causal, DecodingCache, Full, Masked, Unrolled, UnrolledCache, take_rows

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
# Two rows of packed documents and padding; slots with repeats, as a plan pads them with slot 0: they bring the first one's query, and
# nothing is learned from them.
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, -1, -1]])
SLOTS = torch.tensor([[0, 2, 3, 5, 6, 8], [1, 4, 6, 0, 0, 0]])
PADDING = (1, slice(4, None))


def brute_force(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Tensor, rows: Tensor) -> Tensor:
    """Per query an explicit list of keys: of step 0 the same document's up to its own slot, of later steps its own; one softmax."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h // (q.shape[1] // keys[0].shape[1])
            for n in range(q.shape[2]):
                slot = int(rows[b, n])
                seen = [j for j in range(slot + 1) if documents[b, j] == documents[b, slot]]
                k = torch.stack([keys[0][b, group, j] for j in seen] + [own[b, group, n] for own in keys[1:]])
                v = torch.stack([values[0][b, group, j] for j in seen] + [own[b, group, n] for own in values[1:]])
                out[b, h, n] = torch.softmax(k @ q[b, h, n] * SCALE, dim=0) @ v
    return out


def heads(heads: int, length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random [B, H, length, d], laid out as attention gets it (heads transposed: not contiguous)."""
    return torch.randn(batch, length, heads, DIM).to(dtype).transpose(1, 2).requires_grad_()


def outcome(out: Tensor, weights: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradient of every input."""
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def unrolled_inputs(steps: int) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(steps)
    lengths = [DOCUMENTS.shape[1]] + [SLOTS.shape[1]] * steps
    q, weights = padded_alike(heads(HEADS, SLOTS.shape[1])), torch.randn(2, HEADS, SLOTS.shape[1], DIM)
    weights.transpose(1, 2)[PADDING] = 0
    return q, [heads(KV_HEADS, n) for n in lengths], [heads(KV_HEADS, n) for n in lengths], weights


def padded_alike(q_BHQd: Tensor) -> Tensor:
    """Queries of `SLOTS`, those of its padding like the slot that they repeat."""
    with torch.no_grad():
        q_BHQd.transpose(1, 2)[PADDING] = q_BHQd.transpose(1, 2)[1, 3]
    return q_BHQd


class TestUnrolled:
    @pytest.mark.parametrize("backend", ["auto", "eager"])
    @pytest.mark.parametrize("steps", range(5))
    def test_equals_brute_force(self, steps: int, backend: str) -> None:
        q, keys, values, weights = unrolled_inputs(steps)
        ours = Unrolled(DOCUMENTS, SLOTS, backend).attend(q, keys, values, SCALE, SLOTS)
        reference = brute_force(q, keys, values, DOCUMENTS, SLOTS)
        inputs = [q, *keys, *values]
        assert_close(outcome(ours, weights, inputs), outcome(reference, weights, inputs), rtol=1e-5, atol=1e-6)

    def test_as_many_key_heads_as_query_heads(self) -> None:
        q, keys, values, weights = unrolled_inputs(2)
        keys, values = ([x.repeat_interleave(2, dim=1).detach().requires_grad_() for x in xs] for xs in (keys, values))
        ours = Unrolled(DOCUMENTS, SLOTS).attend(q, keys, values, SCALE, SLOTS)
        inputs = [q, *keys, *values]
        assert_close(
            outcome(ours, weights, inputs), outcome(brute_force(q, keys, values, DOCUMENTS, SLOTS), weights, inputs), rtol=1e-5, atol=1e-6
        )

    def test_large_scores_do_not_overflow(self) -> None:
        q, keys, values, weights = unrolled_inputs(3)
        q = (q * 100).detach().requires_grad_()
        inputs = [q, *keys, *values]
        flash, eager = (outcome(Unrolled(DOCUMENTS, SLOTS, b).attend(q, keys, values, SCALE), weights, inputs) for b in ("auto", "eager"))
        assert all(t.isfinite().all() for t in flash)
        assert_close(flash, eager, rtol=1e-3, atol=1e-3)

    def test_bfloat16_is_near_float32(self) -> None:
        q, keys, values, weights = unrolled_inputs(3)
        inputs = [q, *keys, *values]
        half = [x.detach().bfloat16().requires_grad_() for x in inputs]
        pattern = Unrolled(DOCUMENTS, SLOTS)
        ours = outcome(pattern.attend(half[0], half[1:5], half[5:], SCALE), weights.bfloat16(), half)
        assert {t.dtype for t in ours} == {torch.bfloat16}
        reference = outcome(pattern.attend(q, keys, values, SCALE), weights, inputs)
        assert_close([t.float() for t in ours], reference, rtol=5e-2, atol=5e-2)

    def test_longer_than_the_kernels_blocks(self) -> None:
        torch.manual_seed(0)
        length, queries = 700, 600
        documents = (torch.arange(length) // 300)[None]
        slots = torch.randperm(length)[:queries].sort().values[None]
        q = heads(HEADS, queries, 1)
        keys, values = ([heads(KV_HEADS, n, 1) for n in (length, queries)] for _ in range(2))
        weights, inputs = torch.randn(q.shape), [q, *keys, *values]
        flash, eager = (outcome(Unrolled(documents, slots, b).attend(q, keys, values, SCALE), weights, inputs) for b in ("auto", "eager"))
        assert_close(flash, eager, rtol=1e-4, atol=1e-5)


class TestCausal:
    # Queries, keys, whether documents and rows are given: one case per branch.
    CASES: ClassVar = {
        "whole": (9, 9, False, False),
        "one token": (1, 9, False, False),
        "some tokens": (4, 9, False, False),
        "documents": (9, 9, True, False),
        "documents, last tokens": (4, 9, True, False),
        "documents, one token": (1, 9, True, False),
        "rows": (6, 9, False, True),
        "documents, rows": (6, 9, True, True),
    }

    @pytest.mark.parametrize("kernel", ["auto", "eager"])
    @pytest.mark.parametrize("case", CASES)
    def test_equals_brute_force(self, case: str, kernel: str) -> None:
        torch.manual_seed(0)
        queries, known, with_documents, with_rows = self.CASES[case]
        q, k, v = heads(HEADS, queries), heads(KV_HEADS, known), heads(KV_HEADS, known)
        weights = torch.randn(q.shape)
        pattern = Causal(DOCUMENTS if with_documents else None, kernel)
        documents = DOCUMENTS if with_documents else torch.zeros_like(DOCUMENTS)
        rows = SLOTS if with_rows else torch.arange(known - queries, known).expand(2, -1)
        ours, reference = pattern.attend(q, [k], [v], SCALE, SLOTS if with_rows else None), brute_force(q, [k], [v], documents, rows)
        assert_close(outcome(ours, weights, [q, k, v]), outcome(reference, weights, [q, k, v]), rtol=1e-5, atol=1e-6)


ROWS = [["uuaaaaauaaa", "uaaaa"], ["uuuaaaaaa"]]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n} layers")
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any], Tensor]:
    """A draft, a packed batch and the aux states."""
    model = tiny_target()
    draft = tiny_draft(model, num_layers=request.param, ttt_steps=3)
    batch = tiny_batch(draft.algorithm, tiny_rows(ROWS))
    return draft, batch, tiny_signal(model, draft, batch).aux_BSA


class TestBackbone:
    @pytest.mark.parametrize("norm_output", [False, True])
    def test_some_rows_equal_the_whole(self, case: tuple[Any, dict[str, Any], Tensor], norm_output: bool) -> None:
        draft, batch, aux_BSA = case
        draft = tiny_draft(tiny_target(), num_layers=len(draft.layers), norm_output=norm_output)
        slots, documents, positions = batch["slots"], batch["documents"], batch["positions"]
        embeds, context = draft.embed_input_ids(batch["input_ids"].roll(-1, 1)), draft.project_hidden_states(aux_BSA)
        whole = draft.backbone(embeds, context, Layout(positions, Causal(documents)))
        some = Layout(positions, Causal(documents), slots)
        assert_close(draft.backbone(embeds, context, some), take_rows(whole, slots), rtol=1e-5, atol=1e-5)
        unrolled = Layout(positions, Unrolled(documents, slots), slots)
        assert_close(draft.backbone(embeds, context, unrolled, UnrolledCache()), take_rows(whole, slots), rtol=1e-5, atol=1e-5)

    def test_unrolled_equals_decoding(self, case: tuple[Any, dict[str, Any], Tensor]) -> None:
        """Each slot's states are those of a cache that is filled with its document up to the slot and then fed the drafted tokens."""
        draft, batch, aux_BSA = case
        states = draft.algorithm.unroll(draft, batch, aux_BSA)
        width = batch["slots"].shape[1]
        for k, queries in enumerate(batch["queries"]):
            for n in queries.tolist():
                b, q = divmod(n, width)
                expected = self.decode(draft, batch, aux_BSA, b, int(batch["slots"][b, q]), k)
                assert_close(states[k][b, q], expected, rtol=1e-4, atol=1e-5, msg=lambda m, at=(k, b, q): f"step, row, query {at}: {m}")

    @staticmethod
    def decode(draft: Any, batch: dict[str, Any], aux_BSA: Tensor, b: int, slot: int, steps: int) -> Tensor:
        start = slot - int(batch["positions"][b, slot])
        cache, ids = DecodingCache(), batch["input_ids"][b : b + 1]
        context = draft.project_hidden_states(aux_BSA[b : b + 1, start : slot + 1])
        embeds = draft.embed_input_ids(ids[:, start + 1 : slot + 2])
        hidden = draft.backbone(embeds, context, Layout(torch.arange(slot - start + 1)[None], Causal()), cache)[:, -1:]
        for k in range(1, steps + 1):
            embeds = draft.embed_input_ids(ids[:, slot + 1 + k : slot + 2 + k])
            hidden = draft.backbone(embeds, hidden, Layout(torch.tensor([[slot - start + k]]), Causal()), cache)
        return hidden[0, 0]

    def test_drafter_equals_unrolled(self, case: tuple[Any, dict[str, Any], Tensor]) -> None:
        """The drafter, forced to draft the text itself, sees the logits that training sees."""
        draft, _, _ = case
        model = tiny_target()
        batch = tiny_batch(draft.algorithm, tiny_rows([["uuuuaaaaaaaaaa"]]))
        signal = tiny_signal(model, draft, batch)
        states = draft.algorithm.unroll(draft, batch, signal.aux_BSA)
        ids, seen = batch["input_ids"][0], []
        drafter = draft.algorithm.drafter(draft)
        for start, end in ((0, 4), (4, 5), (5, 8)):  # aux states that arrive since the last call: the slot drafted from is end - 1
            slot = end - 1

            def choose(logits_W: Tensor, drafted: list[int], slot: int = slot) -> tuple[int, None]:
                seen.append((slot, len(drafted), logits_W))
                return int(ids[slot + 2 + len(drafted)]), None

            tokens, _ = drafter.propose(ids[: end + 1], signal.aux_BSA[:, start:end], 3, choose)
            assert tokens == ids[slot + 2 : slot + 5].tolist()
        slots = batch["slots"][0].tolist()
        for slot, k, logits_W in seen:
            assert_close(logits_W, draft.compute_logits(states[k][0, slots.index(slot)]), rtol=1e-4, atol=1e-5)


class TestMasked:
    """A mask function of indices, in chunks, against scores spelt out."""

    @staticmethod
    def case(rows: bool) -> tuple[list[torch.Tensor], Any, torch.Tensor | None]:
        torch.manual_seed(0)
        batch, inputs = 2, 13
        group_BS = torch.randint(0, 3, (batch, inputs))

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q == k) | ((group_BS[b, q] == group_BS[b, k]) & (k <= q))

        rows_BQ = torch.stack([torch.randperm(inputs)[:7].sort().values for _ in range(batch)]) if rows else None
        queries = 7 if rows else inputs
        tensors = [torch.randn(batch, heads, n, 8, requires_grad=True) for heads, n in ((4, queries), (2, inputs), (2, inputs))]
        return tensors, sees, rows_BQ

    @pytest.mark.parametrize("rows", [False, True])
    @pytest.mark.parametrize("chunk", [256, 3])
    def test_equals_scores_spelt_out(self, rows: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("foredraft.draft.attention.masked.CHUNK", chunk)
        (q, k, v), sees, rows_BQ = self.case(rows)
        pattern = Masked(sees)
        mask = pattern.visible(2, q.shape[2], [k.shape[2]], rows_BQ)
        results = []
        for out in (pattern.attend(q, [k], [v], 0.3, rows_BQ), spelt_out(q, k, v, mask, 0.3)):
            results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
        assert_close(*results)

    @pytest.mark.parametrize(
        ("queries", "seen"), [(13, 2), (13, 0), (0, 0)], ids=["one sees nothing", "none sees anything", "none is there"]
    )
    def test_in_vain(self, queries: int, seen: int) -> None:
        """Zeros, and no gradient: neither NaN nor the end of the process, which torch's kernel is without queries or keys."""
        (q, k, v), _, _ = self.case(rows=False)
        q = q[:, :, :queries]
        out = Masked(lambda b, h, i, j: (j < seen) & (i != 1)).attend(q, [k], [v], 0.3, torch.arange(queries).expand(2, -1))
        assert out.shape == q.shape
        assert not out[:, :, 1 if seen else slice(None)].any()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[2][:, :, seen:].any()

    def test_full_sees_every_key(self) -> None:
        (q, k, v), _, _ = self.case(rows=True)
        everything = Masked(lambda b, h, q, k: (q >= 0) & (k >= 0))
        torch.testing.assert_close(Full().attend(q, [k], [v], 0.3), everything.attend(q, [k], [v], 0.3))


@pytest.mark.parametrize("entries", [[9], [9, 6, 6]])
@pytest.mark.parametrize("name", ["Causal", "Unrolled", "Masked", "Full"])
def test_every_pattern_attends_where_it_says(name: str, entries: list[int]) -> None:
    """`visible`, which pictures are drawn from, is what `attend` does."""
    patterns: dict[str, Any] = {
        "Causal": Causal(DOCUMENTS),
        "Unrolled": Unrolled(DOCUMENTS, SLOTS),
        "Masked": Masked(lambda b, h, q, k: (q - k).abs() + b < 3),
        "Full": Full(),
    }
    if name != "Unrolled":
        entries = entries[:1]
    rows = SLOTS if len(entries) == 1 else None
    torch.manual_seed(0)
    q = padded_alike(torch.randn(2, HEADS, 6, DIM))
    keys, values = ([torch.randn(2, KV_HEADS, n, DIM) for n in entries] for _ in range(2))
    visible = patterns[name].visible(2, 6, entries, rows)
    assert visible.shape == (2, 6, sum(entries))
    reference = spelt_out(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), visible, SCALE)
    assert_close(patterns[name].attend(q, keys, values, SCALE, rows), reference)
