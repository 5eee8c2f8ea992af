"""What a training step costs on this machine: seconds and peak memory of every algorithm, by shape and by the share that is supervised.

`OMP_NUM_THREADS=1 python benchmarks/train_step.py [--json FILE]` runs each cell in a process of its own, and prints ratios to the first of
its shape (EAGLE-3, all supervised). `--shape 2x512` says rows × length. `--column NAME=COMMAND` adds another trainer's (`peers.py`): the
command is given the cell as JSON, and prints `{"seconds": ..., "megabytes": ...}`; its ratios are to ours of the same cell. `parts` are
seconds inside operations: matrix products, attention, the others; `products alone` what the same products, of the same operands' sizes and
layouts, take by themselves; `bound` the share of a step that these and attention are: what of it the machine's rate of products explains.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.utils import send_to_device
from footprint import ROUNDS, SMALL, footprint
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft import DraftCollator, Target, auto_draft
from foredraft.training.cost import Shape
from foredraft.training.sharding import Borrow

MLA = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128}
LATENT = {**SMALL, **MLA, **EXPERTS, "num_key_value_heads": 8, "first_k_dense_replace": 8, "head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "EAGLE-3": ("llama", SMALL, "eagle3", {"ttt_steps": 7, "draft_vocab_size": 8000}),
    "EAGLE-3, 4 steps": ("llama", SMALL, "eagle3", {"ttt_steps": 4, "draft_vocab_size": 8000}),
    "P-EAGLE": ("llama", SMALL, "peagle", {"num_depths": 8, "num_layers": 1, "draft_vocab_size": 8000}),
    "DFlash": ("llama", SMALL, "dflash", {"block_size": 16, "num_layers": 1, "num_aux": 3, "anchors": 64}),
    "MLA": ("deepseek_v3", LATENT, "eagle3", {"ttt_steps": 7, "draft_vocab_size": 8000}),
}
"""Target's model type and size, algorithm, options."""
SHAPES, SHARES = ((2, 512), (1, 2048), (1, 8192)), (1.0, 0.5, 0.25)


def pair_of(
    config: Any, algorithm: str, options: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Target, Any]:
    """A target in `dtype` and a draft of it, of random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        draft = auto_draft(config, algorithm, **options).train()
    draft.to(device)
    target = Target(model.to(device), draft.config.aux_layers, draft.algorithm.needs)
    draft.take_head(target)
    Borrow(model, dtype).on_train_begin(None, None, None, model=draft)  # as the trainer does with what is frozen
    return target, draft


def collator_of(draft: Any, device: torch.device) -> DraftCollator:
    """As the trainer's for this device."""
    return DraftCollator(draft.algorithm, multiple=128 if device.type == "cuda" else 1)


def step_of(target: Target, draft: Any, shape: Shape) -> tuple[Callable[[], Any], Callable[..., None]]:
    """(what the target says of a batch, a step from that or another's): in the target's dtype by autocast, without an optimizer."""
    device, dtype = target.model.device, target.model.dtype
    batch = send_to_device(collator_of(draft, device)(shape.packed()), device)

    def capture() -> Any:
        return target.capture(batch)

    def step(signal: Any, batch: Any = batch) -> None:
        draft.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = draft(batch, signal)["loss"]
        loss.backward()

    return capture, step


class Parts(TorchDispatchMode):
    """Where the seconds of a step go; it slows down all that is between the operations."""

    PRODUCTS, ATTENTION = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm."), ("foredraft.", "aten._scaled_dot_product")

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(("products", "attention", "others"), 0.0)
        self.products = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it with a watch."""
        start = time.process_time()
        result = func(*args, **(kwargs or {}))
        name = str(func)
        part = "products" if name.startswith(self.PRODUCTS) else "attention" if name.startswith(self.ATTENTION) else "others"
        self.seconds[part] += time.process_time() - start
        if part == "products":
            self.products[
                func, *((x.shape, x.stride(), x.dtype) for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor))
            ] += 1
        return result

    def products_alone(self) -> float:
        """Seconds of these products on operands of the same sizes and strides, one kind after the other; the median of all rounds."""
        rounds = [0.0] * ROUNDS
        for i in range(ROUNDS):
            for (func, *of), count in self.products.items():
                operands = [torch.empty_strided(shape, stride, dtype=dtype).normal_() for shape, stride, dtype in of]
                out = {"out": operands.pop()} if str(func).endswith(".out") else {}
                start = time.process_time()
                func(*operands, **out)
                rounds[i] += count * (time.process_time() - start)
        return median(rounds)


def cell(case: str, rows: int, length: int, share: float) -> dict[str, Any]:
    """Median CPU seconds of a step from the target's states, what the first takes of memory beyond weights and states, and one's parts."""
    family, size, algorithm, options = CASES[case]
    capture, step = step_of(*pair_of(AutoConfig.for_model(family, **size), algorithm, options), Shape(rows, length, share))
    signal = capture()
    found = footprint(lambda: step(signal))
    with Parts() as parts:
        step(signal)
    alone = parts.products_alone()
    bound = (alone + parts.seconds["attention"]) / found["seconds"]
    return {**found, "parts": parts.seconds, "products alone": alone, "bound": bound}


def measured(command: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The last line of what a command prints of a cell; what went wrong, if anything did."""
    out = subprocess.run([*command, json.dumps(given)], capture_output=True, text=True, check=False)
    if out.returncode:
        return {"error": out.stderr.strip().splitlines()[-1:] or out.returncode}
    found: dict[str, Any] = json.loads(out.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Print a line per cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", metavar="ROWSxLENGTH", help="these alone")
    parser.add_argument("--share", action="append", type=float, help="these alone")
    parser.add_argument("--case", action="append", choices=CASES, help="these alone")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=COMMAND", help="another trainer, see above")
    parser.add_argument("--json", type=Path, help="write all cells there")
    asked = parser.parse_args()
    columns = {"foredraft": [sys.executable, __file__, "--cell"]}
    columns |= {name: shlex.split(command) for name, _, command in (column.partition("=") for column in asked.column)}
    cells: list[dict[str, Any]] = []
    for rows, length in [tuple(map(int, shape.split("x"))) for shape in asked.shape or ()] or SHAPES:
        first: dict[str, Any] = {}
        for case in asked.case or CASES:
            for share in asked.share or SHARES:
                given = {"case": case, "rows": rows, "length": length, "share": share}
                ours: dict[str, Any] = {}
                for column, command in columns.items():
                    found = measured(command, given)
                    first, beside = first or found, ours or first or found
                    ours = ours or found
                    ratios = {
                        f"{name} ratio": found[name] / beside[name] for name in ("seconds", "megabytes") if name in found and name in beside
                    }
                    cells.append({"column": column, **given, **found, **ratios})
                    print(json.dumps(cells[-1]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "cells": cells}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        print(json.dumps(cell(**json.loads(sys.argv[2]))))
    else:
        main()
