"""Training-time test: attention by kernel against scores spelt out at once, by row length; CPU seconds and peak memory of a step.

`python benchmarks/attention.py [LENGTH ...]`: one JSON object, ratios within one run; each measurement is a process of its own, one thread.
"""

import argparse
import json
import subprocess
import sys
import time

import torch
from loss import forget_peak, status
from torch import Tensor

from foredraft.draft.attention import Unrolled

HEADS, KV_HEADS, DIM, STEPS, SHARE, SCALE = 8, 4, 64, 4, 0.75, 0.125
TURN = 128
"""Tokens of a turn, of which the assistant's part, `SHARE`, is drafted on."""
VARIANTS = ("flash", "eager", "spelt out")
LENGTHS = (512, 1024, 2048, 4096)


def spelt_out(pattern: Unrolled, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over all scores at once, S×S of them and every step's own."""
    visible = pattern.visible(1, q.shape[2], [k.shape[2] for k in keys])[:, None]
    k, v = (torch.cat(x, dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    return (q @ k.mT * SCALE).masked_fill(~visible, float("-inf")).softmax(-1) @ v


def measure(variant: str, length: int) -> None:
    """Print seconds and MB of the last step's forward and backward, the second time they are run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    at = torch.arange(length)
    slots = at[at % TURN >= TURN * (1 - SHARE)][None]
    pattern = Unrolled(torch.zeros(1, length, dtype=torch.long), slots, "auto" if variant == "spelt out" else variant)
    lengths = [length] + [slots.shape[1]] * (STEPS - 1)
    q, *entries = (torch.randn(1, n, h, DIM).transpose(1, 2).requires_grad_() for n, h in [
        (slots.shape[1], HEADS), *((n, KV_HEADS) for n in lengths * 2)
    ])  # fmt: skip
    keys, values = entries[:STEPS], entries[STEPS:]

    def step() -> None:
        attend = spelt_out if variant == "spelt out" else lambda p, *x: p.attend(*x, SCALE)
        torch.autograd.grad(attend(pattern, q, keys, values).sum(), [q, *entries])

    step()
    before, start = forget_peak(), time.process_time()
    step()
    print(time.process_time() - start, status("VmHWM") - before)


def main(lengths: list[int]) -> None:
    """Print the object."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for length in lengths:
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--measure", variant, str(length)]
            seconds, megabytes = map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
            found.setdefault(str(length), {})[variant] = {"seconds": round(seconds, 4), "MB": round(megabytes, 1)}
        dense = found[str(length)]["spelt out"]
        for figures in found[str(length)].values():
            figures |= {f"{name} against spelt out": round(figures[name] / dense[name], 3) for name in ("seconds", "MB")}
    shape = {"heads": HEADS, "key heads": KV_HEADS, "head dim": DIM, "step": STEPS, "share": SHARE, "dtype": "float32"}
    print(json.dumps({"torch": torch.__version__, "shape": shape, "by length": found}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=int, nargs="*", default=LENGTHS, help="of rows, in tokens")
    parser.add_argument("--measure", choices=VARIANTS, help="a single cell, as its own process runs it")
    o = parser.parse_args()
    measure(o.measure, o.lengths[0]) if o.measure else main(list(o.lengths))
