"""What the way back costs behind a target with states of fixed size: the copy of its states, and the tokens that are read again.

`python benchmarks/replay.py [WIDTH [k]]`: a random target of Mamba-2 and attention, drafts of its own text of which a share is wrong.
Medians of interleaved runs, in CPU time of one thread, as multiples of a pass of the target over one token.
"""

import argparse
import random
import time
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from foredraft import generate
from foredraft.contracts import DrafterBase
from foredraft.decoding import DraftingStats, states

TEXT, ROUNDS = 48, 2
LAGS = (4, 16, 64)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


class Oracle(DrafterBase):
    """Drafts a text that is known, but for a share of its tokens."""

    name = "oracle"

    def __init__(self, text_1L: Tensor, wrong: float):
        super().__init__()
        draw = random.Random(0)
        self.text = [(token + (draw.random() < wrong)) % 64 for token in text_1L[0].tolist()]

    def drafter(self, draft: Any) -> "Oracle":
        """Itself: all that it knows is the text."""
        return self

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Any) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; tokens without logits."""
        return self.text[len(ids) : len(ids) + limit], []


def main(width: int = 256, tokens: int = 4) -> None:
    """Print the copy's share of a pass, and a line per share of wrong drafts."""
    torch.set_num_threads(1)
    model, ids = hybrid(width), torch.arange(3, 35)[None]
    text = model.generate(ids, max_new_tokens=TEXT, **GREEDY)
    caches: list[Any] = []
    hook = model.register_forward_hook(lambda *seen: caches.append(states.cache_of(seen[-1])))
    model.generate(ids, max_new_tokens=8, **GREEDY)
    hook.remove()
    print(f"width {width}, {tokens} drafted, {TEXT} tokens of text")
    one = timed(lambda: model(ids[:, :1], past_key_values=deepcopy(caches[-1]), use_cache=True)) - timed(lambda: deepcopy(caches[-1]))
    print(f"copy of the states: {timed(lambda: states._copied(caches[-1])) / one:.3f} of a pass over one token")
    for wrong in (0.0, 0.1, 0.3, 0.6):
        spent: dict[int, list[float]] = {lag: [] for lag in LAGS}
        for _ in range(ROUNDS):
            for lag, taken in spent.items():
                set_lag(lag)
                stats, start = DraftingStats(), time.process_time()
                generate(model, Oracle(text, wrong), ids, num_draft_tokens=tokens, max_new_tokens=TEXT, stats=stats, **GREEDY)
                taken.append((time.process_time() - start) / TEXT / one)
        told = ", ".join(f"{lag}: {median(taken):.2f}" for lag, taken in spent.items())
        print(f"{wrong:.0%} wrong: passes over one token that a token costs, by the most that is read again: {told}")


def set_lag(most: int) -> None:
    """Set by how many tokens states may lag behind the text."""
    from foredraft.decoding import loop

    loop.MOST_REPLAYED = most


def hybrid(width: int) -> Any:
    """A random target of six Mamba-2 layers and two with attention."""
    kinds = ["full_attention" if layer in (2, 5) else "linear_attention" for layer in range(8)]
    fields = {"layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": width // 4}
    sizes = {"hidden_size": width, "intermediate_size": width, "shared_intermediate_size": 4 * width, "num_hidden_layers": 8}
    torch.manual_seed(0)
    own = {"mamba_d_state": 64, "mamba_chunk_size": 32, "num_local_experts": 0, "initializer_range": 0.1, "vocab_size": 64}
    config = GraniteMoeHybridConfig(**fields, **sizes, **own)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def timed(action: Any) -> float:
    """Median seconds of CPU time."""
    times = []
    for _ in range(8):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return median(times[2:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("width", type=int, nargs="?", default=256, help="of the target")
    parser.add_argument("k", type=int, nargs="?", default=4, help="tokens drafted")
    o = parser.parse_args()
    main(o.width, o.k)
