"""Run by test_training.py under torchrun: short trainings whose weights and logs rank 0 writes to directories in the one given."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401
import torch
import torch.distributed as dist
from rigged import predictable_target, trainer_of, written_rows
from tiny import tiny_draft
from torch.distributed.tensor import DTensor

from foredraft.contracts.loading import Loading
from foredraft.target.loading import load_target

RUN = {
    "max_steps": 5,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 3,
}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "shared_target": {},
    "fsdp": {"fsdp": True},
    "fsdp_resumed": {"fsdp": True},
    "fsdp_bf16": {"fsdp": True, "bf16": True},
}
"""How two ranks train, by the directory that is written to."""


def run(directory: Path, batch_size: int, **fields: Any) -> None:
    """Rows of different lengths, which ranks cannot share evenly: they and micro-batches see different counts of slots, one of them none.

    The target is a rank's own, or shared among them: then it lies in `target` beside the directory. A checkpoint in it is gone on with.
    """
    target = predictable_target()
    rows = written_rows(target, 7, 20)
    rows[3]["spans"] = [-1] * 20
    draft = tiny_draft(target, ttt_steps=3)
    if directory.name == "shared_target":
        target = load_target(str(directory.parent / "target"), "float32", Loading(tp_plan="auto"))
        assert target.model.layers[0].mlp.up_proj.weight.to_local().shape[0] == 32
        known = draft.config.foredraft["target"]["sample"]
        draft.start_from(target)
        assert draft.config.foredraft["target"]["sample"] == known, "shared or whole, it is one target"
    trainer = trainer_of(draft, target, directory, rows, per_device_train_batch_size=batch_size, eval_dataset=rows[:3], **RUN | fields)
    trainer.train(resume_from_checkpoint=True)
    assert isinstance(draft.lm_head.weight, DTensor) is ("fsdp" in fields)
    state = trainer.state_dict() or draft.state_dict()
    if trainer.is_world_process_zero():
        torch.save(state, directory / "weights.pt")
        (directory / "logs.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, fields in WAYS.items():
        run(Path(sys.argv[1]) / name, 2, **fields)
    gc.collect()  # of DDP first, whose end may wait for the group forever
    dist.destroy_process_group()
