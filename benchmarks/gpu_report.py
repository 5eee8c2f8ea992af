"""Everything that needs a GPU, in ten minutes, into one JSON: `python benchmarks/gpu_report.py REPORT.json`.

`pytest -m gpu`, times of kernels (`kernel_times.py`), and steps of drafts for an 8B target (random weights, from its config): by algorithm,
length of row and share supervised, EAGLE-3 compiled and checkpointed, too; seconds of the target's forward and of a step from its states,
tokens/s with and without the target, MFU on needed FLOPs (`foredraft.training.cost`), peak memory. A part runs in a process of its own
within a limit of time; what it gave, or why it did not, is written as soon as it ends. `--tiny` rehearses all on the CPU at sizes that
say nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from train_step import step_of
from transformers import LlamaConfig

from foredraft import auto_draft
from foredraft.training.cost import Shape, count_step
from foredraft.training.plan import peak_of

LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({"ttt_steps": 7, "draft_vocab_size": 32_000}, {"ttt_steps": 2, "draft_vocab_size": 64}),
    "peagle": ({"num_depths": 8, "num_layers": 1, "draft_vocab_size": 32_000}, {"num_depths": 2, "num_layers": 1, "draft_vocab_size": 64}),
    "dflash": ({"block_size": 16}, {"block_size": 4, "num_layers": 1, "num_aux": 2, "anchors": 4}),
}
"""Options: at 8B, and tiny."""
WAYS = ("compiled", "checkpointed")
"""How EAGLE-3 is trained once more."""
LENGTHS, TINY_LENGTHS, SHARES = (4096, 16_384, 32_768), (32, 64), (1.0, 0.5, 0.25)
WARM, TIMED = 2, 4
ROOT = Path(__file__).parent.parent
LIMIT, TESTS, PART = 570, 200, 120
"""Seconds of all parts, of the tests, and of any other."""


def parts(tiny: bool) -> dict[str, list[str]]:
    """What is run, by name, the most wanted first."""
    steps = [f"{name} {length}" for length in (TINY_LENGTHS if tiny else LENGTHS) for name in STEPS]
    steps[len(STEPS) : len(STEPS)] = [f"{steps[0]} {way}" for way in WAYS]
    own = {step: [sys.executable, __file__, "--part", step, *(["--tiny"] if tiny else [])] for step in steps}
    first = dict(list(own.items())[: len(STEPS)])
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_gpu.py")]
    timed = [sys.executable, str(ROOT / "benchmarks" / "kernel_times.py")]
    kernels = {name: [*timed, name, *own[steps[0]][4:]] for name in ("attention", "ranged", "loss")}
    return {"tests": tests if tiny else [*tests[:-1], str(ROOT / "tests")], **first, **kernels, **own}


def steps(part: str, tiny: bool) -> list[dict[str, Any]]:
    """A cell per share that is supervised; memory that is not enough is told, and ends the part."""
    algorithm, length, *way = part.split()
    config, options = LlamaConfig(**(TINY if tiny else LARGE)), STEPS[algorithm][tiny]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells: list[dict[str, Any]] = []
    for share in SHARES:
        shape = Shape(1, int(length), share)
        try:
            cells.append({"share": share, **timed(config, algorithm, options, shape, device, way)})
        except torch.OutOfMemoryError as error:
            cells.append({"share": share, "error": str(error)[:300]})
        print(json.dumps(cells), flush=True)
    return cells


def timed(config: Any, algorithm: str, options: dict[str, Any], shape: Shape, device: str, way: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds, tokens/s, MFU and memory of one shape; `way`: of `WAYS`."""
    checkpointed = "checkpointed" in way
    cost = count_step(lambda: auto_draft(config, algorithm, **options), config, shape, checkpointing=checkpointed)
    capture, step, draft = step_of(config, algorithm, options, shape, device, torch.bfloat16)
    if checkpointed:
        draft.gradient_checkpointing_enable()
    if "compiled" in way:
        draft.compile(backend="inductor" if device == "cuda" else "eager")
    weights = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        weights = torch.cuda.memory_allocated()
    seconds: dict[str, list[float]] = {"target": [], "step": []}
    for _ in range(WARM + TIMED):
        start = now(device)
        signal = capture()
        between = now(device)
        step(signal)
        seconds["target"].append(between - start)
        seconds["step"].append(now(device) - between)
    target, own = (median(seconds[part][WARM:]) for part in ("target", "step"))
    peak = 1e12 * peak_of(None, None)[1]
    online, stored = cost.tokens / (target + own), cost.tokens / own
    return {
        "seconds": {"target": target, "step": own},
        "tokens_per_second": {"online": online, "stored": stored},
        "mfu": {"online": online * cost.per_token() / peak, "stored": stored * cost.per_token(stored=True) / peak},
        "needed_gflop_per_token": {name: n / cost.tokens / 1e9 for name, n in cost.flops.items()},
        "counted_bytes": cost.step_bytes,
        "step_bytes": torch.cuda.max_memory_allocated() - weights if device == "cuda" else None,
        "weight_bytes": weights or None,
    }


def now(device: str) -> float:
    """Seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(command: list[str], limit: float) -> dict[str, Any]:
    """What a part gave: the JSON of its last line if it is that, else its last lines; and how it ended."""
    start = time.time()
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT / "benchmarks", check=False)
        said, status = out.stdout, "done" if out.returncode in (0, 5) else f"status {out.returncode}: {out.stderr[-1500:]}"
    except subprocess.TimeoutExpired as late:
        said, status = (late.stdout or b"").decode(), f"cut off after {limit:.0f} s"
    lines = said.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = lines[-15:]
    return {"status": status, "seconds": round(time.time() - start, 1), "found": found}


def main() -> None:
    """Run all parts; the file is whole after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", help="JSON to write")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, at sizes that say nothing")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all parts together; more for each, too")
    parser.add_argument("--part", help="one part, in this process")
    asked = parser.parse_args()
    if asked.part:
        steps(asked.part, asked.tiny)
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    report: dict[str, Any] = {"device": device, "tiny": asked.tiny, "versions": versions, "peak_tflops": peak_of(None, None)[1]}
    report["parts"] = {}
    end = time.time() + asked.limit
    for name, command in parts(asked.tiny).items():
        left = end - time.time()
        most = (TESTS if name == "tests" else PART) * asked.limit / LIMIT
        report["parts"][name] = run(command, min(left, most)) if left > 5 else {"status": "no time left"}
        print(name, report["parts"][name]["status"], flush=True)
        if asked.report:
            asked.report.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
