"""Everything that needs a GPU, in ten minutes, into one JSON: `python benchmarks/gpu_report.py REPORT.json`.

`pytest -m gpu`, times of kernels (`kernel_times.py`), and steps of drafts for an 8B target (random weights, from its config): by algorithm,
length of row and share supervised, EAGLE-3 compiled and checkpointed, too; seconds of the target's forward, of a step from its states, of
AdamW, and of both where a store holds the states; tokens/s online and from stored states, peak memory. A part runs in a process of its own
within a limit of time; what it gave, or why it did not, is written as soon as it ends. `--count` adds to such a report, afterwards and on
any machine, what is counted: needed FLOPs, MFU on them, and the bytes that `foredraft plan` foretells beside the real peak. `--tiny`
rehearses all on the CPU at sizes that say nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from itertools import pairwise, product
from pathlib import Path
from signal import SIGKILL
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from train_step import collator_of, pair_of, step_of
from transformers import LlamaConfig

from foredraft import Signal, auto_draft
from foredraft.target.cached import store_of
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
WARM, TIMED, WORKERS = 1, 3, 2
ROOT = Path(__file__).parent.parent
LIMIT, TESTS, PART = 570, 150, 110
"""Seconds of all parts, of the tests, and of any other."""


def parts(tiny: bool) -> dict[str, list[str]]:
    """What is run, by name, the most wanted first."""
    names = [*STEPS, *(f"eagle3 {way}" for way in WAYS)]
    own = {name: [sys.executable, __file__, "--part", name, *(["--tiny"] if tiny else [])] for name in names}
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_gpu.py")]
    timed = [sys.executable, str(ROOT / "benchmarks" / "kernel_times.py")]
    kernels = {name: [*timed, name, *(["--tiny"] if tiny else [])] for name in ("attention", "ranged", "loss")}
    first = {"eagle3": own.pop("eagle3"), "tests": tests if tiny else [*tests[:-1], str(ROOT / "tests")]}
    return {**first, **kernels, **own}


def steps(part: str, tiny: bool) -> list[dict[str, Any]]:
    """A cell per length and share that is supervised; memory that is not enough is told. Other ways have the first length alone."""
    algorithm, *way = part.split()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = pair_of(LlamaConfig(**(TINY if tiny else LARGE)), algorithm, STEPS[algorithm][tiny], device, torch.bfloat16)
    if "checkpointed" in way:
        draft.gradient_checkpointing_enable()
    if "compiled" in way:
        draft.compile(backend="inductor" if device == "cuda" else "eager")
    lengths = TINY_LENGTHS if tiny else LENGTHS
    cells: list[dict[str, Any]] = []
    # What takes longest comes last: a part that is cut off has told the rest.
    for share, length in [*product(SHARES, lengths[:1]), *(product(SHARES, lengths[1:]) if not way else ())]:
        try:
            cells.append({"length": length, "share": share, **timed(target, draft, Shape(1, length, share), device)})
        except torch.OutOfMemoryError as error:
            cells.append({"length": length, "share": share, "error": str(error)[:300]})
        print(json.dumps(cells), flush=True)
    return cells


def timed(target: Any, draft: Any, shape: Shape, device: str) -> dict[str, Any]:
    """Seconds, tokens/s and memory of one shape."""
    capture, step = step_of(target, draft, shape)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=0.0, fused=device == "cuda")
    draft.zero_grad()  # of the shape before
    weights = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        weights = torch.cuda.memory_allocated()
    marks = []
    for _ in range(WARM + TIMED):
        marks.append([now(device)])
        signal = capture()
        marks[-1].append(now(device))
        step(signal)
        marks[-1].append(now(device))
        if len(marks) == 1:  # before there are moments
            most = torch.cuda.max_memory_allocated() - weights if device == "cuda" else None
        optimizer.step()
        marks[-1].append(now(device))
    seconds = {name: median(m[i + 1] - m[i] for m in marks[WARM:]) for i, name in enumerate(("target", "step", "optimizer"))}
    found = {"seconds": seconds, "tokens_per_second": {"online": shape.length / sum(seconds.values())}}
    found |= {"step_bytes": most, "weight_bytes": weights or None}
    try:
        seconds["stored"] = from_store(target, draft, shape, {"aux": signal.aux_BSA, "hidden": signal.hidden_BST}, step, optimizer)
        found["tokens_per_second"]["stored"] = shape.length / seconds["stored"]
    except RuntimeError as error:  # workers hand tensors over in memory that a machine may have little of
        found["error"] = f"from a store: {error}"[:300]
    return found


def from_store(target: Any, draft: Any, shape: Shape, states: dict[str, Any], step: Any, optimizer: Any) -> float:
    """Seconds from one step to the next where workers read the states from files, as in training."""
    rows, device = shape.packed(), target.model.device
    with TemporaryDirectory() as directory:
        of = {"aux_layers": list(target.aux_layers), "needs": list(target.needs)}
        store = store_of(directory, target.model.config, of, target.model.dtype, "auto")
        states = {name: states[name] for name in store.form.widths}
        with redirect_stdout(sys.stderr):
            store.fill([rows], lambda _, parts: ((part, part.cut(states)) for part in parts), show_progress=False)
        collator = collator_of(draft, device)
        collator.read_states = store.states
        marks = []
        by_workers = {"num_workers": WORKERS, "prefetch_factor": 1} if WORKERS else {}
        batches = WARM + WORKERS + 1  # until memory that was pinned once is used again
        loader = DataLoader(rows * (batches + TIMED), collate_fn=collator, pin_memory=device.type == "cuda", **by_workers)
        for batch in loader:
            moved = send_to_device(batch, device, non_blocking=True)
            aux_BSA = moved["states"]["aux"]
            step(Signal(aux_BSA, moved["states"].get("hidden", aux_BSA), target.head), moved)
            optimizer.step()
            marks.append(now(device.type))
    return median(b - a for a, b in pairwise(marks[batches - 1 :]))


def count(report: dict[str, Any]) -> None:
    """Add what is counted to the cells of a report."""
    tiny = report["tiny"]
    for part, told in report["parts"].items():
        algorithm, *way = part.split()
        for cell in told.get("found") or [] if algorithm in STEPS else []:
            config, shape = LlamaConfig(**(TINY if tiny else LARGE)), Shape(1, cell["length"], cell["share"])
            make = lambda name=algorithm: auto_draft(config, name, **STEPS[name][tiny])  # noqa: B023, E731
            cost = count_step(make, config, shape, checkpointing="checkpointed" in way)
            cell["needed_gflop_per_token"] = {name: n / cost.tokens / 1e9 for name, n in cost.flops.items()}
            cell["counted_bytes"] = cost.step_bytes
            if speeds := cell.get("tokens_per_second"):
                cell["mfu"] = {
                    name: speed * cost.per_token(name == "stored") / report["peak_tflops"] / 1e12 for name, speed in speeds.items()
                }
            if cell.get("step_bytes"):
                cell["counted_of_real"] = cost.step_bytes / cell["step_bytes"]


def now(device: str) -> float:
    """Seconds, when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(command: list[str], limit: float) -> dict[str, Any]:
    """What a part gave: the JSON of its last line if it is that, else its last lines; and how it ended."""
    start = time.time()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT / "benchmarks", start_new_session=True, **pipes) as part:
        try:
            said, told = part.communicate(timeout=limit)
            status = "done" if part.returncode in (0, 5) else f"status {part.returncode}: {told[-1500:]}"
        except subprocess.TimeoutExpired:
            os.killpg(part.pid, SIGKILL)  # its workers, too: they hold the GPU's memory
            said, status = part.communicate()[0], f"cut off after {limit:.0f} s"
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
    parser.add_argument("--count", action="store_true", help="run nothing; add to the report what is counted")
    asked = parser.parse_args()
    if asked.part:
        steps(asked.part, asked.tiny)
        return
    if asked.count:
        report = json.loads(asked.report.read_text())
        count(report)
        asked.report.write_text(json.dumps(report, indent=1))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    report = {"device": device, "tiny": asked.tiny, "versions": versions, "peak_tflops": peak_of(None, None)[1]}
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
