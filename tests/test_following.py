"""Through how many files a reader follows a step: those of ours of which a function runs in it, all helpers included.

The numbers are what they are, with little room: fewer are wanted, more need a reason.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigged import trainer_of
from tiny import tiny_draft, tiny_rows, tiny_target

import foredraft.adapters
import foredraft.plugins
from foredraft import TreeShape, generate
from foredraft.decoding.loop import DecodingLoop
from foredraft.training.trainer import DraftTrainer

OURS = tuple(str(Path(str(package.__file__)).parent) for package in (foredraft, foredraft.adapters, foredraft.plugins))
TARGET = tiny_target(eos_token_id=None)


def between(owner: Any, method: str, run: Callable[[], object]) -> list[str]:
    """The files that run from the second call of a method to the third: what is set up once is not among them."""
    found, calls, original = set(), [], getattr(owner, method)

    def watch(frame: Any, event: str, argument: Any) -> None:
        if (file := frame.f_code.co_filename).startswith(OURS):
            found.add(file)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        sys.setprofile(watch if len(calls) == 2 else None)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, counted)
        try:
            run()
        finally:
            sys.setprofile(None)
    assert len(calls) > 2
    return sorted(found)


@pytest.mark.parametrize(("algorithm", "most"), [("eagle3", 28), ("medusa", 19)])
def test_a_training_step(algorithm: str, most: int, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_draft(TARGET, algorithm), TARGET, tmp_path, tiny_rows([["uuaaaaaaaa"]] * 4), per_device_train_batch_size=1)
    found = between(DraftTrainer, "training_step", trainer.train)
    assert any(file.endswith("loss/chunks.py") for file in found)
    assert len(found) <= most, "\n".join(found)


@pytest.mark.parametrize(("algorithm", "tree", "most"), [("eagle3", None, 18), ("eagle3", TreeShape(depth=2), 18), ("medusa", None, 13)])
def test_a_round_of_decoding(algorithm: str, tree: TreeShape | None, most: int) -> None:
    draft, settings = tiny_draft(TARGET, algorithm).eval(), {"max_new_tokens": 24, "do_sample": False}
    found = between(DecodingLoop, "propose", lambda: generate(TARGET, draft, torch.tensor([[5, 6, 7]]), tree=tree, **settings))
    assert any(file.endswith("decoding/loop.py") for file in found)
    assert len(found) <= most, "\n".join(found)
