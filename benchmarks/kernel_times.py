"""Times of what a step runs beside plain products: attention by kernel, attention over ranges of keys, and the loss.

`python benchmarks/kernel_times.py attention|ranged|loss [--tiny]`, on the GPU where there is one: a list of cells as JSON, in bfloat16,
forward and backward in milliseconds; TFLOP/s of attention count the pairs that see each other alone. A kernel that does not run here
says why.
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import send_to_device
from gpu_report import LARGE, STEPS, TIMED, TINY, WARM, now
from loss import build
from torch import Tensor
from transformers import LlamaConfig

from foredraft import DraftCollator, ForedraftError, auto_draft
from foredraft.draft.attention import Ranged, Unrolled, unrolled_segments
from foredraft.loss import chunks
from foredraft.loss.rows import differentiate
from foredraft.training.cost import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = {"grouped": (32, 8, 128), "latent, filled up": (32, 32, 192)}
"""Heads, heads of keys, width."""
LENGTHS, SPELT_OUT = (4096, 16_384), 4096
"""Of rows; up to which scores are spelt out, too."""
AT_ONCE = 5


def milliseconds(forward: Callable[[], Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """Of a forward pass and the backward pass to `inputs`, medians; several are asked for before the device is waited for."""
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(WARM + TIMED):
        start = now(DEVICE)
        outs = [forward() for _ in range(AT_ONCE)]
        grad, between = torch.ones_like(outs[0]), now(DEVICE)
        for out in outs:
            torch.autograd.grad(out, inputs, grad)
        seconds["forward"].append(between - start)
        seconds["backward"].append(now(DEVICE) - between)
    return {part: 1e3 * median(times[WARM:]) / AT_ONCE for part, times in seconds.items()}


def random(length: int, heads: int, width: int) -> Tensor:
    """[1, heads, length, width]."""
    return torch.randn(1, length, heads, width, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()


def attention(tiny: bool) -> list[dict[str, Any]]:
    """Training-time test, a row that is one document, at its first step and its last."""
    cells = []
    for length in (64,) if tiny else LENGTHS:
        documents, slots = torch.zeros(1, length, dtype=torch.long), torch.arange(length)[None]
        segments = send_to_device(unrolled_segments(documents, slots), DEVICE)
        for shape, (heads, narrow, width) in ({"tiny": (4, 2, 16)} if tiny else HEADS).items():
            for kernel in ("flash", "flash-attn", "flex", *(["eager"] if length <= SPELT_OUT else [])):
                pattern = Unrolled(documents.to(DEVICE), slots.to(DEVICE), kernel, segments)
                for steps in (1, 7):
                    q, entries = random(length, heads, width), [random(length, narrow, width) for _ in range(2 * steps)]
                    cell: dict[str, Any] = {"length": length, "shape": shape, "kernel": kernel, "step": steps}
                    cells.append(cell)
                    try:
                        attend = lambda: pattern.attend(q, entries[:steps], entries[steps:], width**-0.5)  # noqa: B023, E731
                        cell |= milliseconds(attend, [q, *entries])
                    except (ForedraftError, RuntimeError) as error:
                        cell["error"] = str(error)[:300]
                    else:
                        pairs = heads * width * length * ((length + 1) / 2 + steps - 1)
                        cell["tflops"] = {p: n * pairs / cell[p] / 1e9 for p, n in (("forward", 4), ("backward", 10))}
    return cells


def ranged(tiny: bool) -> list[dict[str, Any]]:
    """The queries of a lower layer of P-EAGLE and DFlash, by FlexAttention on a GPU."""
    cells = []
    for algorithm in ("peagle", "dflash"):
        draft = auto_draft(LlamaConfig(**TINY), algorithm, **{**STEPS[algorithm][tiny], "draft_vocab_size": None})
        heads, narrow, width = (4, 2, 16) if tiny else HEADS["grouped"]
        for length in (64,) if tiny else LENGTHS:
            batch = send_to_device(DraftCollator(draft.algorithm)(Shape(1, length).packed()), DEVICE)
            seen = batch["ranges"]
            keys = seen["first"].shape[1]
            queries = keys - length if algorithm == "dflash" else keys  # the context itself asks nothing
            q, k, v = random(queries, heads, width), random(keys, narrow, width), random(keys, narrow, width)
            cell = {"length": length, "algorithm": algorithm, "queries": queries, "keys": keys}
            cells.append(cell | milliseconds(lambda: Ranged(seen).attend(q, [k], [v], width**-0.5), [q, k, v]))  # noqa: B023
    return cells


def loss(tiny: bool) -> list[dict[str, Any]]:
    """A row's loss with its gradients, the teacher's logits included: by Triton's kernels and by plain torch."""
    sizes = {"rows": 64, "steps": 2, "width": 64, "vocabulary": 256, "draft_vocabulary": 64} if tiny else {}
    large = {"rows": 4096, "steps": 7, "width": LARGE["hidden_size"], "vocabulary": LARGE["vocab_size"], "draft_vocabulary": 32_000}
    with torch.device(DEVICE):
        step = build(argparse.Namespace(**{**large, **sizes}, dtype="bfloat16"), "chunked")
    cells = []
    for name, method in (("as it is", chunks.method), ("plain torch", lambda *_: differentiate)):
        with patch.object(chunks, "method", method):
            seconds = []
            for _ in range(WARM + TIMED):
                start = now(DEVICE)
                step()
                seconds.append(now(DEVICE) - start)
        cells.append({"loss": name, "both": 1e3 * median(seconds[WARM:])})
    return cells


if __name__ == "__main__":
    parts: dict[str, Callable[[bool], list[dict[str, Any]]]] = {"attention": attention, "ranged": ranged, "loss": loss}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--tiny", action="store_true", help="sizes that rehearse it on any machine")
    o = parser.parse_args()
    print(json.dumps(parts[o.part](o.tiny)))
