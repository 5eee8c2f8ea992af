"""What a decoding step costs: the target's forward over 1 and over 1 + k tokens, and a draft step, in milliseconds.

`python benchmarks/decoding.py TARGET DRAFT [k]`: medians of interleaved runs, and the speed-up that follows for a given τ.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from foredraft import auto_draft
from foredraft.target.capture import AuxCapture

PROMPT, ROUNDS = 256, 30


@torch.no_grad()
def main(target_path: str, draft_path: str, tokens: int = 4) -> None:
    """Print one table line per dtype."""
    print(f"{torch.get_num_threads()} threads, prompt of {PROMPT} tokens, {tokens} drafted")
    for dtype in (torch.float32, torch.bfloat16):
        target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).eval()
        draft = auto_draft(draft_path).to(dtype)
        ids = torch.randint(10, 10_000, (1, PROMPT))
        cache = DynamicCache()
        with AuxCapture(target, draft.config.aux_layers) as captured:
            target(ids, past_key_values=cache, use_cache=True)
        aux_1NA = captured.aux_BSA

        def forward(count: int, target=target, cache=cache) -> None:  # type: ignore[no-untyped-def]
            target(torch.full((1, count), 5), past_key_values=cache, use_cache=True)
            cache.crop(-count)

        drafter = draft.algorithm.drafter(draft)
        drafter.propose(ids[0], aux_1NA[:, :-1], 1, lambda z, _: (int(z.argmax()), None))

        def propose(limit: int, draft=draft, aux_1NA=aux_1NA, drafter=drafter, ids=ids) -> None:  # type: ignore[no-untyped-def]
            drafter.confirmed = PROMPT - 3
            drafter.propose(ids[0], aux_1NA[:, -2:], limit, lambda z, _: (int(draft.draft_ids[z.argmax()]), None))

        one, wide, drafting = interleaved(lambda: forward(1), lambda: forward(1 + tokens), lambda: propose(tokens))
        cycle = wide + drafting
        print(
            f"{str(dtype).removeprefix('torch.'):9} target 1 token {one:6.1f} ms, {1 + tokens} tokens {wide:6.1f} ms, "
            f"draft {tokens} tokens {drafting:5.1f} ms -> speed-up = τ × {one / cycle:.2f}; break-even τ {cycle / one:.2f}"
        )


def interleaved(*actions: Callable[[], None]) -> list[float]:
    """Median milliseconds of each action, run in turn so that all meet the same machine."""
    times: list[list[float]] = [[] for _ in actions]
    for round_number in range(ROUNDS + 3):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            if round_number >= 3:
                taken.append(1000 * (time.perf_counter() - start))
    return [median(taken) for taken in times]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(a) for a in sys.argv[3:]))
