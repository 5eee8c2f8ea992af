"""What a step takes of a CPU: seconds and memory, measured alike for every trainer. Needs nothing of foredraft."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}
"""The target whose drafts are trained."""
ROUNDS = 5


def footprint(step: Callable[[], Any]) -> dict[str, float]:
    """Median CPU seconds of a step, but for the first, and what they take of memory beyond what is there, gradients included."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of making the models
    before = peak()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return {"seconds": median(seconds[1:]), "megabytes": (peak() - before) / 1024}


def peak() -> int:
    """KiB that this process has had in memory at most, on Linux."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
