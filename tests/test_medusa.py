"""Medusa, the plugin written only against the contracts: supervision, loss, and what the drafter proposes."""

from pathlib import Path

import torch
from test_doctor import Break, rewritten, serious
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch.nn import functional as F
from torch.testing import assert_close

from foredraft import save_draft
from foredraft.doctor import examine
from foredraft.formats import export_draft
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


PLANTED: list[tuple[str, Break]] = [
    ("medusa-bias", lambda c, s: c.pop("medusa_fc_bias")),
    ("medusa-heads", lambda c, s: c.update(num_heads=5)),
    ("medusa-heads", lambda c, s: [s.pop(name) for name in list(s) if name.startswith("blocks.1.")]),
    ("medusa-counts", lambda c, s: c.update(num_attention_heads=4)),
    ("medusa-lm-head", lambda c, s: s.pop("lm_head.weight")),
    ("tensors-missing", lambda c, s: s.pop("blocks.1.layers.0.bias")),
    ("tensors-missing", lambda c, s: c.update(num_hidden_layers=2)),
    ("head-order", lambda c, s: s.update({"lm_head.weight": s["lm_head.weight"].roll(1, 0)})),
]


def test_what_is_wrong_with_served_heads_is_named(tmp_path: Path) -> None:
    MODEL.save_pretrained(target := tmp_path / "target")
    draft = tiny_draft(MODEL, "medusa", served=True, num_heads=3)
    draft.start_from(MODEL)
    for parameter in draft.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    heads = export_draft(save_draft(draft, tmp_path / "draft"), tmp_path / "served", "medusa")
    assert examine(heads, target) == []
    for number, (id, change) in enumerate(PLANTED):
        assert id in serious(examine(rewritten(heads, tmp_path / str(number), change), target)), id
