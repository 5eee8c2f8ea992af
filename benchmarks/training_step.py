"""A training step with the fused loss against the readable one, and flash attention against eager: time and memory.

`python benchmarks/training_step.py`: ratios of medians within one run; peak memory is the growth of the resident set, in its own process.
"""

import resource
import subprocess
import sys
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foredraft.plugins.eagle3 as plugin
from foredraft import DraftCollator, Target, auto_draft
from foredraft.loss import reference

VARIANTS = ("fused", "readable loss", "eager attention")
ROWS, LENGTH, STEPS = 2, 512, 4


def build(variant: str):  # type: ignore[no-untyped-def]
    """A step of a draft with hidden 512 and a vocabulary of 8,000 of 32,000, 70 % of the tokens supervised."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4
    )
    draft = auto_draft(config, "eagle3", ttt_steps=STEPS, draft_vocab_size=8_000)
    target = Target(LlamaForCausalLM(config), draft.config.aux_layers)
    cut = LENGTH * 3 // 10
    row = {"documents": [0] * LENGTH, "spans": [-1] * cut + [0] * (LENGTH - cut)}
    rows = [{**row, "input_ids": torch.randint(0, 32_000, (LENGTH,)).tolist(), "row": i} for i in range(ROWS)]
    batch = DraftCollator(draft.algorithm)(rows)
    signal = target.capture(batch)
    fused = plugin.chunked
    draft.kernel = "eager" if variant == "eager attention" else "auto"

    def step() -> None:
        plugin.chunked = reference if variant == "readable loss" else fused
        draft.zero_grad()
        draft(batch, signal)["loss"].backward()
        plugin.chunked = fused

    return step


def memory(variant: str) -> None:
    """Print the growth of the peak resident set over a step, in MB (run in a process of its own)."""
    step = build(variant)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    """Print a line per variant."""
    steps = {variant: build(variant) for variant in VARIANTS}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(6):
        for variant, step in steps.items():
            start = time.perf_counter()
            step()
            times[variant].append(time.perf_counter() - start)
    base = median(times["fused"][1:])
    print(f"{ROWS} rows × {LENGTH} tokens, {STEPS} TTT steps, float32, {torch.get_num_threads()} threads")
    for variant in VARIANTS:
        out = subprocess.run([sys.executable, __file__, variant], capture_output=True, text=True, check=True).stdout
        taken = median(times[variant][1:])
        print(f"{variant:16} {taken:6.2f} s  {taken / base:5.2f}×   peak growth {float(out):7.0f} MB")


if __name__ == "__main__":
    memory(sys.argv[1]) if len(sys.argv) > 1 else main()
