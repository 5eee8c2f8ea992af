"""Through how many files a reader follows a step: those of ours of which a function runs in it, all helpers included.

The numbers are what they are, with no room: fewer are wanted, more need a reason.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from rigged import trainer_of
from tiny import tiny_draft, tiny_rows, tiny_target

import foredraft.adapters
import foredraft.plugins
from foredraft import DraftCollator, TreeShape, generate
from foredraft.decoding.loop import DecodingLoop

OURS = tuple(str(Path(str(package.__file__)).parent) for package in (foredraft, foredraft.adapters, foredraft.plugins))
TARGET = tiny_target(eos_token_id=None)


def between(begin: tuple[Any, str], end: tuple[Any, str], run: Callable[[], object]) -> list[str]:
    """The files that run from a call of the method `begin` to the call of `end` that follows, as often as that happens in `run`.

    The first time does not count: what is set up once is not among them.
    """
    found: set[str] = set()
    stretches: list[set[str]] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if (file := frame.f_code.co_filename).startswith(OURS):
            found.add(file)

    def marked(owner: Any, method: str) -> Callable[..., Any]:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if (owner, method) == end and sys.getprofile() is not None:
                sys.setprofile(None)
                stretches.append(set(found))
            if (owner, method) == begin:
                found.clear()
                sys.setprofile(watch)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, method in {begin, end}:
            patch.setattr(owner, method, marked(owner, method))
        try:
            run()
        finally:
            sys.setprofile(None)
    assert len(stretches) > 1
    return sorted(set().union(*stretches[1:]))


@pytest.mark.parametrize(("algorithm", "most"), [("eagle3", 15), ("medusa", 11)])
def test_a_training_step(algorithm: str, most: int, tmp_path: Path) -> None:
    """From the collator's call for a batch to `backward`: what the target says of a batch and the draft's loss on it are in between.

    Batches are made in this process, each while the one before it is waiting: the step is that one's.
    """
    trainer = trainer_of(tiny_draft(TARGET, algorithm), TARGET, tmp_path, tiny_rows([["uuaaaaaaaa"]] * 4), per_device_train_batch_size=1)
    found = between((DraftCollator, "__call__"), (Accelerator, "backward"), trainer.train)
    assert {"collate.py", "trainer.py", "capture.py", "chunks.py"} <= {Path(file).name for file in found}
    assert len(found) <= most, "\n".join(found)


@pytest.mark.parametrize(("algorithm", "tree", "most"), [("eagle3", None, 10), ("eagle3", TreeShape(depth=2), 10), ("medusa", None, 8)])
def test_a_round_of_decoding(algorithm: str, tree: TreeShape | None, most: int) -> None:
    """From one round's draft to the next one's: the target's pass, and what is kept of it, are in between."""
    draft, settings = tiny_draft(TARGET, algorithm).eval(), {"max_new_tokens": 24, "do_sample": False}
    propose = (DecodingLoop, "propose")
    found = between(propose, propose, lambda: generate(TARGET, draft, torch.tensor([[5, 6, 7]]), tree=tree, **settings))
    assert {"loop.py", "drafters.py", "capture.py", "states.py"} <= {Path(file).name for file in found}
    assert len(found) <= most, "\n".join(found)
