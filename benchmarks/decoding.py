"""What a decoding step costs: the target's forward over 1 and over 1 + k tokens, a draft step, and a whole pass of `generate`.

`python benchmarks/decoding.py TARGET DRAFT [k [PROMPT]]`: medians of interleaved runs in milliseconds (with OMP_NUM_THREADS=1 of CPU
time, which others on the machine disturb less), and the speed-up that follows for a given τ.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foredraft import TreeShape, auto_draft, generate
from foredraft.decoding import DraftingStats
from foredraft.decoding.costs import measure_costs

TEXT = 12
CLOCK = time.process_time if torch.get_num_threads() == 1 else time.perf_counter


@torch.no_grad()
def main(target_path: str, draft_path: str, tokens: int = 4, prompt: int = 256) -> None:
    """Print two lines per dtype."""
    print(f"{torch.get_num_threads()} threads, prompt of {prompt} tokens, {tokens} drafted")
    for dtype in (torch.float32, torch.bfloat16):
        target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).eval()
        draft = auto_draft(draft_path).to(dtype).eval()
        costs = measure_costs(target, draft, [tokens], context=prompt, rounds=30)
        one, wide, drafting = costs.verify[1], costs.verify[1 + tokens], costs.draft[tokens]
        cycle = wide + drafting
        print(
            f"{str(dtype).removeprefix('torch.'):9} target 1 token {one:6.1f} ms, {1 + tokens} tokens {wide:6.1f} ms, "
            f"draft {tokens} tokens {drafting:5.1f} ms -> speed-up = τ × {one / cycle:.2f}; break-even τ {cycle / one:.2f}"
        )
        ids = torch.randint(10, 10_000, (1, prompt))
        chain, tree = passes(target, draft, ids, tokens)
        print(f"{'':9} a pass of generate: chain of {tokens} {chain:6.1f} ms, tree of 16 nodes {tree:6.1f} ms")


def passes(target: Any, draft: Any, ids: torch.Tensor, tokens: int) -> list[float]:
    """Median milliseconds per pass of the target, as a chain and as a tree; prefill is taken off."""
    shapes: list[dict[str, Any]] = [{"num_draft_tokens": tokens}, {"tree": TreeShape(depth=4, top_k=4, num_nodes=16)}]
    times: list[list[float]] = [[] for _ in shapes]
    for _ in range(5):
        for shape, taken in zip(shapes, times, strict=True):
            spent = []
            for new in (1, 1 + TEXT):
                stats, start = DraftingStats(), CLOCK()
                generate(target, draft, ids, stats=stats, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, **shape)
                spent.append(1000 * (CLOCK() - start))
            taken.append((spent[1] - spent[0]) / stats.passes)
    return [median(taken) for taken in times]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("k", type=int, nargs="?", default=4, help="tokens drafted")
    parser.add_argument("prompt", type=int, nargs="?", default=256, help="tokens of the prompt")
    o = parser.parse_args()
    main(o.target, o.draft, o.k, o.prompt)
