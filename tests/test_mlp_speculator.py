"""The MLP speculator against the paper's recurrence, written out: states of training, the loss, and what is drafted."""

from typing import Any

import torch
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

MODEL, STAGES = tiny_target(), 3


def by_hand(draft: Any, hidden_T: Tensor, tokens: list[int]) -> Tensor:
    """The state [D] that has read a target's state and these tokens."""
    kept, width = 0.5 ** (0.5 / STAGES), len(hidden_T)
    weight = ((1 - kept**2) * width / 2) ** 0.5
    state_D = hidden_T / (hidden_T.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    for k, token in enumerate(tokens):
        mixed_D = draft.mixers[min(k, 1)].weight @ state_D + weight / kept * draft.token_table.weight[token]
        normed_D = mixed_D / (mixed_D.pow(2).mean() + 1e-6).sqrt()
        state_D = F.gelu(normed_D * draft.stage_norm.weight + draft.stage_norm.bias)
    return state_D


def test_against_plain_torch() -> None:
    draft = tiny_draft(MODEL, "mlp_speculator", num_stages=STAGES)
    torch.nn.init.normal_(draft.stage_norm.bias)
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaa", "aaab"], ["uaauubbbb"]]))
    signal = tiny_signal(MODEL, draft, batch)
    ids_N, hidden_NT = batch["input_ids"].flatten().tolist(), signal.hidden_BST.flatten(0, 1)
    expected = torch.zeros(())
    for k, slots in enumerate(batch["queries"]):
        states_ND = torch.stack([by_hand(draft, hidden_NT[t], ids_N[t + 1 : t + 2 + k]) for t in slots.tolist()])
        expected = expected + F.cross_entropy(draft.compute_logits(states_ND), torch.tensor([ids_N[t + 2 + k] for t in slots.tolist()]))
    loss = draft(batch, signal)["loss"]
    assert_close(loss, expected)
    loss.backward()
    assert all(bool(g.abs().sum() > 0) for g in gradients(draft).values())

    ids, hidden_1NT = torch.tensor([5, 6, 7]), hidden_NT[None, :2]
    drafted, _ = draft.algorithm.drafter(draft).propose(ids, hidden_1NT, STAGES, lambda z, before: (int(z.argmax()), None))
    for k, token in enumerate(drafted):
        assert token == int(draft.compute_logits(by_hand(draft, hidden_NT[1], [7, *drafted[:k]])).argmax())
    assert len(drafted) == STAGES
