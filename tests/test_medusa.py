"""Medusa, the plugin written only against the contracts: supervision, loss, and what the drafter proposes."""

import torch
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft.plugins.medusa import Medusa

MODEL = tiny_target()
ROWS = tiny_rows([["uuaaaaa", "aaab"], ["uaauubbbb"]])


def test_supervised_slots_against_a_loop() -> None:
    plan = tiny_batch(Medusa(num_heads=3), ROWS)
    for k, slots in enumerate(plan["queries"]):
        expected = []
        for b, (spans, documents) in enumerate(zip(plan["spans"].tolist(), plan["documents"].tolist(), strict=True)):
            for t in range(len(spans) - 2 - k):
                reached = spans[t + 1 : t + 3 + k]
                if reached[0] >= 0 and len(set(reached)) == 1 and documents[t] == documents[t + 1]:
                    expected.append(b * len(spans) + t)
        assert slots.tolist() == expected
        assert plan["counts"][k] == len(expected) > 0


def test_loss_against_plain_torch() -> None:
    """Σ λ_k mean CE(teacher ‖ head k), written out; and every trained parameter takes part."""
    draft = tiny_draft(MODEL, "medusa", num_heads=2, head_decay=0.5)
    for head in draft.heads:
        torch.nn.init.normal_(head.weight, std=0.1)
    batch = tiny_batch(draft.algorithm, ROWS)
    signal = tiny_signal(MODEL, draft, batch)
    loss = draft(batch, signal)["loss"]
    features = draft.project_hidden_states(signal.aux_BSA).flatten(0, 1)
    expected = torch.zeros(())
    for k, (head, share) in enumerate(zip(draft.heads, (2 / 3, 1 / 3), strict=True)):
        slots = batch["queries"][k]
        teacher = signal.head(signal.hidden_BST.flatten(0, 1)[slots + 1 + k]).softmax(-1)
        expected = expected + share * F.cross_entropy(draft.compute_logits(head(features[slots])), teacher)
    assert_close(loss, expected)
    loss.backward()
    assert all(bool(g.abs().sum() > 0) for g in gradients(draft).values())
