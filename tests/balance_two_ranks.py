"""Run by test_deepseek.py under torchrun: each rank writes how its router's biases moved after the ranks counted different loads."""

import sys
from pathlib import Path

import conftest  # noqa: F401
import torch
import torch.distributed as dist
from test_deepseek import CONFIGS, draft_for, target
from tiny import tiny_batch, tiny_rows, tiny_signal
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

LOADS = torch.tensor([[4, 0, 2, 2, 2, 2, 2, 2], [0, 6, 2, 2, 2, 2, 2, 2]])


def moved() -> Tensor:
    """How the biases move in a step behind one that counted the rank's row of `LOADS`."""
    model = target(CONFIGS["V3"])
    draft = draft_for(model, "deepseek_v3_moe").train()
    wrapped, gate = DistributedDataParallel(draft), draft.layers[0].mlp.gate
    before = gate.e_score_correction_bias.clone()
    gate.load.copy_(LOADS[dist.get_rank()])
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaa"]]))
    wrapped(batch=batch, signal=tiny_signal(model, draft, batch))["loss"].backward()
    return gate.e_score_correction_bias - before


def run(directory: Path) -> None:
    """Write it to RANK.pt."""
    dist.init_process_group("gloo")
    torch.save(moved(), directory / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()  # DDP is gone by now: the other way round its end may wait for the group forever


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
