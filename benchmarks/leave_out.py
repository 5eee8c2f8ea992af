"""What each technique of a training step buys, by leaving it out: `python benchmarks/leave_out.py`, a table in Markdown.

Counted on fake tensors (`foredraft.training.cost`): an EAGLE-3 step of a Llama-3.1-8B target, a row of 4,096 tokens, all supervised, in
bfloat16 autocast. Bytes are those a token takes beside weights and gradients, GFLOPs the products of the draft's layers; no times.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from gpu_report import LARGE, STEPS
from transformers import LlamaConfig

from foredraft import auto_draft
from foredraft.draft import wiring
from foredraft.draft.attention import Lookup, geometry
from foredraft.loss import chunks
from foredraft.training.cost import Cost, Shape, count_step

LENGTH = 4096


@contextmanager
def everything_kept() -> Iterator[None]:
    """Layers keep whatever autograd asks for."""
    with patch.object(wiring, "recomputed", lambda layer, run, *inputs, cache: run(*inputs, cache)):
        yield


@contextmanager
def a_cast_per_product() -> Iterator[None]:
    """Autocast casts what a product reads for each product anew."""
    with ExitStack() as patches:
        for module in (wiring, geometry):
            patches.enter_context(patch.object(module, "autocasted", lambda x: x))
        yield


@contextmanager
def dense_inputs() -> Iterator[None]:
    """Every step projects its tokens' embeddings."""
    backbone = wiring.Fused.backbone

    def dense(self: Any, draft: Any, embeds: Any, context: Any, *rest: Any) -> Any:
        return backbone(self, draft, *(x.dense() if isinstance(x, Lookup) else x for x in (embeds, context)), *rest)

    with patch.object(wiring.Fused, "backbone", dense):
        yield


@contextmanager
def one_chunk() -> Iterator[None]:
    """The loss of all rows at once."""
    with patch.object(chunks, "rows_at_once", lambda *_: 2**40), patch.object(chunks, "TEACHERS_ELSEWHERE", 2**40):
        yield


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as it is": nullcontext,
    "without recomputing between products": everything_kept,
    "without one cast for several products": a_cast_per_product,
    "without projecting shared tokens once": dense_inputs,
    "without chunks of the loss": one_chunk,
}


def counted(checkpointing: bool = False) -> Cost:
    """The step's cost."""
    config = LlamaConfig(**LARGE)
    make = lambda: auto_draft(config, "eagle3", **STEPS["eagle3"][0])  # noqa: E731
    return count_step(make, config, Shape(length=LENGTH), checkpointing=checkpointing, run_target=False)


def main() -> None:
    """A row per variant."""
    print("| EAGLE-3 step at 8B | MB a token | GFLOP a token in the draft's layers | calls |\n|---|---|---|---|")
    for name, leave_out in VARIANTS.items():
        with leave_out():
            tell(name, counted())
    tell("with `gradient_checkpointing`", counted(checkpointing=True))


def tell(name: str, cost: Cost) -> None:
    """Print a row."""
    layers = cost.flops["draft layers"] / cost.tokens / 1e9
    print(f"| {name} | {cost.bytes_per_token / 1e6:.2f} | {layers:.2f} | {cost.ops:,} |", flush=True)


if __name__ == "__main__":
    main()
