"""Sampling whose outcome is each sequence's own, whatever batch it is in."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper


class SeededChoice(LogitsProcessor):
    """Draws a token per sequence by a random number made from its key and position, and leaves nothing else to choose.

    Used with greedy decoding. As no generator is shared, a sequence's tokens do not depend on the others of its batch, but for the
    last bits of its logits: these do follow the batch's shape, and flip a choice where two were that close.
    """

    def __init__(self, keys: Sequence[str], width: int, temperature: float, top_p: float):
        self.keys, self.width = keys, width
        self.warpers = [TemperatureLogitsWarper(temperature), *([TopPLogitsWarper(top_p)] if top_p < 1 else [])]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] with all but the drawn tokens at -inf."""
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        position = input_ids.shape[1] - self.width
        cumulative_BV = scores.float().softmax(-1).cumsum(-1)
        drawn_B1 = torch.tensor([[_uniform(f"{key}/{position}")] for key in self.keys], device=scores.device)
        chosen_B1 = (cumulative_BV > drawn_B1 * cumulative_BV[:, -1:]).int().argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen_B1, 0.0)


def _uniform(key: str) -> float:
    """In [0, 1), the same on every machine; 24 bits, so that float32 does not round it up to 1."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=3).digest()) / 2**24
