"""The loss of a training step alone, in chunks against the readable one: CPU seconds and peak memory, as ratios in one run.

`python benchmarks/loss.py [--rows 512 --steps 7 --width 512 --vocabulary 32000 --draft-vocabulary 8000 --dtype float32]`: JSON. Rows are
teacher rows, each of which teaches a state per drafting step; a step includes the teacher's logits and the backward pass. Seconds are
process time, the least of `--rounds` interleaved rounds; peak memory is the growth of the resident set over a second step, in a process
of its own.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from foredraft import Signal, auto_draft
from foredraft.contracts import Plan
from foredraft.loss import Labels, Teacher, chunked, objective, reference

VARIANTS = {
    "chunked": (chunked, "ce", False),
    "readable": (reference, "ce", False),
    "chunked, lk": (chunked, "lk", False),
    "readable, lk": (reference, "lk", False),
    "chunked, labels": (chunked, "ce", True),
    "readable, labels": (reference, "ce", True),
}


def build(o: argparse.Namespace, variant: str) -> Callable[[], None]:
    """A step of EAGLE-3's pairs: state t of step k against teacher row t + k."""
    loss, name, hard = VARIANTS[variant]
    torch.manual_seed(0)
    dtype, count = getattr(torch, o.dtype), o.rows + o.steps
    config = LlamaConfig(vocab_size=o.vocabulary, hidden_size=o.width, intermediate_size=o.width, num_hidden_layers=8)
    draft = auto_draft(config, "eagle3", ttt_steps=o.steps, draft_vocab_size=o.draft_vocabulary).to(dtype)
    draft.set_draft_vocabulary(torch.arange(o.draft_vocabulary) * o.vocabulary // o.draft_vocabulary)
    head, hidden = torch.nn.Linear(o.width, o.vocabulary, bias=False, dtype=dtype), torch.randn(1, count, o.width, dtype=dtype)
    signal = Signal(hidden[..., :0], hidden, lambda states: head(states).float())
    plan = Plan.taught([torch.arange(o.rows)] * o.steps, [torch.arange(o.rows) + k for k in range(o.steps)])
    states = [torch.randn(o.rows, o.width, dtype=dtype, requires_grad=True) for _ in range(o.steps)]
    labels, weights = Labels(torch.randint(o.vocabulary, (count,))), [torch.tensor(1 / o.rows)] * o.steps

    def step() -> None:
        draft.zero_grad()
        for state in states:
            state.grad = None
        teacher: Any = labels if hard else Teacher.of(signal, plan.teacher_rows)
        rows, pairs = plan.added["teachers"], None if hard else plan.added["pairs"]
        loss(draft, states, teacher, rows, weights, objective(name), pairs).loss.backward()

    return step


def status(field: str) -> float:
    """A field of this process's status, MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def forget_peak() -> float:
    """What is resident now, MB, given back and counted anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak(o: argparse.Namespace, variant: str) -> float:
    """How far the resident set grows over a second step, MB: what lives within it, less the gradients that it leaves."""
    step = build(o, variant)
    step()
    before = forget_peak()
    step()
    return status("VmHWM") - before


def main() -> None:
    """Print the JSON, or (`--variant`, for the processes it starts) a peak."""
    parser = argparse.ArgumentParser()
    sizes = {"rows": 512, "steps": 7, "width": 512, "vocabulary": 32_000, "draft-vocabulary": 8_000, "rounds": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--variant")
    o = parser.parse_args()
    if o.variant:
        print(peak(o, o.variant))
        return
    steps = {variant: build(o, variant) for variant in VARIANTS}
    seconds = dict.fromkeys(VARIANTS, float("inf"))
    for _ in range(o.rounds):
        for variant, step in steps.items():
            start = time.process_time()
            step()
            seconds[variant] = min(seconds[variant], time.process_time() - start)
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), **vars(o)}
    del found["variant"]
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        megabytes = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        found[variant] = {"cpu_s": round(seconds[variant], 3), "peak_MB": round(megabytes)}
    for variant in ("", ", lk", ", labels"):
        ours, theirs = found[f"chunked{variant}"], found[f"readable{variant}"]
        found[f"readable / chunked{variant}"] = {name: round(theirs[name] / max(ours[name], 1e-3), 2) for name in ours}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
