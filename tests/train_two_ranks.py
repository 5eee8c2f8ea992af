"""Run by test_training.py under torchrun: short trainings whose weights and logs rank 0 writes to the directories given."""

import json
import sys
from pathlib import Path

import conftest  # noqa: F401
import torch
from rigged import predictable_target, trainer_of, written_rows
from tiny import tiny_draft

from foredraft.contracts.loading import Loading
from foredraft.target.loading import load_target

RUN = {"max_steps": 5, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 5}


def run(directory: Path, batch_size: int, shared: bool = False) -> None:
    """Rows of different lengths: ranks and micro-batches see different counts of supervised slots, one of them none.

    The target is a rank's own, or `shared` among them: then it lies in `target` beside the directory.
    """
    target = predictable_target()
    rows = written_rows(target, 8, 20)
    rows[3]["spans"] = [-1] * 20
    draft = tiny_draft(target, ttt_steps=3)
    if shared:
        target = load_target(str(directory.parent / "target"), "float32", Loading(tp_plan="auto"))
        assert target.model.layers[0].mlp.up_proj.weight.to_local().shape[0] == 32
        draft.start_from(target)
    trainer = trainer_of(draft, target, directory, rows, per_device_train_batch_size=batch_size, eval_dataset=rows[:4], **RUN)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(draft.state_dict(), directory / "weights.pt")
        (directory / "logs.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), 2)
    run(Path(sys.argv[2]), 2, shared=True)
