"""What is trained and what is not: plans against enumeration, packing against separate documents, nothing from one to another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Document, gradients, tiny_batch, tiny_document, tiny_draft, tiny_rows, tiny_signal, tiny_target

from foredraft.data.collate import positions_within
from foredraft.plugins.eagle3 import Eagle3

STEPS = 3


def reachable(row: dict[str, Any], step: int) -> list[int]:
    """The slots t with x_t .. x_{t+2+step} in one document and x_{t+1} .. x_{t+2+step} in one assistant span."""
    spans, documents = row["spans"], row["documents"]
    found = []
    for t in range(len(spans)):
        needed = range(t + 1, t + 3 + step)
        if needed[-1] >= len(spans) or any(documents[i] != documents[t] for i in needed):
            continue
        if all(spans[i] == spans[t + 1] and spans[i] >= 0 for i in needed):
            found.append(t)
    return found


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[list[str]], int]:
    """One to three rows of documents of `u`, `a` and `b`, in runs so that long spans occur, and room for padding."""
    run = st.tuples(st.sampled_from("uab"), st.integers(1, 6)).map(lambda r: r[0] * r[1])
    document = st.lists(run, min_size=1, max_size=4).map("".join)
    rows = draw(st.lists(st.lists(document, min_size=1, max_size=3), min_size=1, max_size=3))
    return rows, max(len("".join(r)) for r in rows) + draw(st.integers(0, 4))


class TestPlan:
    @given(packed(), st.integers(1, 5))
    @settings(max_examples=150, deadline=None)
    def test_equals_enumeration(self, documents: tuple[list[list[str]], int], steps: int) -> None:
        rows = tiny_rows(*documents)
        batch = tiny_batch(Eagle3(ttt_steps=steps), rows)
        length, width = len(rows[0]["input_ids"]), batch["slots"].shape[1]
        for b, row in enumerate(rows):  # slots: those of step 0, padded
            known = reachable(row, 0)
            assert batch["slots"][b].tolist() == known + [0] * (width - len(known))
        for k in range(steps):
            expected = [(b, t) for b, row in enumerate(rows) for t in reachable(row, k)]
            at = [divmod(n, width) for n in batch["queries"][k].tolist()]
            assert [(b, int(batch["slots"][b, q])) for b, q in at] == expected
            assert batch["teacher_rows"][batch["teachers"][k]].tolist() == [b * length + t + 1 + k for b, t in expected]
            assert batch["counts"][k] == len(expected)
        used = torch.cat(batch["teachers"]).unique()
        assert used.tolist() == list(range(len(batch["teacher_rows"])))  # the target is asked for nothing in vain

    def test_a_document_that_begins_with_its_answer(self) -> None:
        """Its first token has no slot before it: the slot there belongs to the document before."""
        batch = tiny_batch(Eagle3(ttt_steps=1), tiny_rows([["uuu", "aaaa"]]))
        assert batch["slots"].tolist() == [[3, 4]]

    def test_positions_restart_with_each_document(self) -> None:
        documents = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [0] * 8])
        assert positions_within(documents).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], list(range(8))]

    def test_the_shortest_rows(self) -> None:
        for length in (1, 2, 3):
            counts = tiny_batch(Eagle3(ttt_steps=4), tiny_rows([["a" * length]]))["counts"]
            assert counts.tolist() == [max(0, length - 2 - k) for k in range(4)]


MODEL = tiny_target()


@pytest.fixture(params=[1, 2], ids=["1 layer", "2 layers"])
def draft(request: pytest.FixtureRequest) -> Any:
    made = tiny_draft(MODEL, num_layers=request.param, ttt_steps=STEPS, draft_vocab_size=30)
    made.embed_tokens.requires_grad_(True)
    return made


class TestNothingCrossesDocuments:
    @pytest.mark.parametrize("supervised", [0, 1, 2])
    def test_gradients_stay_in_the_supervised_document(self, draft: Any, supervised: int) -> None:
        """Three documents with tokens of their own; with one supervised, the others' aux states and embeddings get exactly zero."""
        layers = len(draft.layers)
        draft = tiny_draft(MODEL, num_layers=layers, ttt_steps=STEPS)  # the whole vocabulary, so that every supervised slot has a loss
        draft.embed_tokens.requires_grad_(True)
        letters, silent = "uuaaaaaauaa", "uuuuuuuuuuu"
        documents = [
            Document(tiny_document(letters, i, low=1 + 16 * i, high=17 + 16 * i).ids, letters if i == supervised else silent)
            for i in range(3)
        ]
        batch = tiny_batch(draft.algorithm, tiny_rows([documents], 40))
        signal = tiny_signal(MODEL, draft, batch)
        aux_BSA = signal.aux_BSA.clone().requires_grad_()
        draft(batch, replace(signal, aux_BSA=aux_BSA))["loss"].backward()
        embedding_grad = gradients(draft)["embed_tokens.weight"]
        own = batch["documents"] == supervised
        assert aux_BSA.grad is not None
        assert aux_BSA.grad[~own].eq(0).all()
        assert embedding_grad[~torch.isin(torch.arange(50), batch["input_ids"][own])].eq(0).all()
        # From its first slot to its last supervised one, the document itself does learn.
        last = int(batch["slots"].max())
        first = int(own[0].nonzero()[0])
        assert aux_BSA.grad[0, first : last + 1].abs().amax(-1).gt(0).all()
        assert aux_BSA.grad[0, last + 1 :].eq(0).all()
