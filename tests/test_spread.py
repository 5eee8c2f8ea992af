"""Capture and regeneration over two workers of Ray on this machine: what comes out is what one process makes, also after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_regenerate import by_index
from tiny import TOKENS, chat, tiny_target, tiny_tokenizer
from torch.testing import assert_close

from foredraft.data import DraftCollator
from foredraft.training.capture import capture
from foredraft.training.run import fresh_draft, packed_rows, store_of_run
from foredraft.training.settings import RunConfig

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's directory, data and a run file."""
    place = tmp_path_factory.mktemp("spread")
    tiny_target(vocab=TOKENS, eos_token_id=2, pad_token_id=0).save_pretrained(place / "target")
    tiny_tokenizer().save_pretrained(place / "target")
    (place / "data.jsonl").write_text("".join(json.dumps({"messages": chat(f"q {i}", f"the answer {i} " * 5)}) + "\n" for i in range(24)))
    return place


def run_of(there: Path, states: str) -> RunConfig:
    fields: dict[str, Any] = {"target": str(there / "target"), "output_dir": str(there / "out"), "algorithm": "eagle3"}
    fields |= {"data": {"train": str(there / "data.jsonl"), "max_length": 128}, "hidden_states_cache": str(there / states)}
    (there / f"{states}.yaml").write_text(json.dumps(fields))
    return RunConfig.check(fields)


def ended(command: list[str], when: Any) -> None:
    """Kill a command and all that it started, once `when` is so."""
    running = subprocess.Popen([sys.executable, "-m", "foredraft", *command], start_new_session=True)
    while not when() and running.poll() is None:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def states(config: RunConfig) -> Any:
    tokenizer, rows, _ = packed_rows(config)
    draft = fresh_draft(config, tiny_target(vocab=TOKENS).config)
    store = store_of_run(config, draft, tokenizer)
    assert store is not None
    return store.states(DraftCollator(draft.algorithm)(list(rows)))


@pytest.mark.parametrize("workers", [2, None])
def test_capture(there: Path, workers: int | None) -> None:
    """Begun by two workers; gone on with by two, or by one process without Ray."""
    one, two = run_of(there, "one"), run_of(there, f"by-{workers}")
    capture(one)
    kept = there / f"by-{workers}"
    ended(["capture", f"{kept}.yaml", "--workers", "2", "--batch-size", "1"], lambda: any(kept.glob("*.safetensors")))
    left = len([*kept.glob("*.safetensors")])
    capture(two, batch_size=1, workers=workers)
    assert len([*kept.glob("*.safetensors")]) > left
    assert_close(states(two), states(one), equal_nan=True, rtol=1e-5, atol=1e-6)


def test_regenerate(there: Path) -> None:
    def command(out: str) -> list[str]:
        asked = [str(there / "data.jsonl"), "--target", str(there / "target"), "--out", str(there / out)]
        return ["regenerate", *asked, "--max-new-tokens", "5", "--batch-size", "1", "--temperature", "1"]

    subprocess.run([sys.executable, "-m", "foredraft", *command("one.jsonl")], check=True)
    ended([*command("two.jsonl"), "--workers", "2"], lambda: (there / "two.jsonl").exists() and (there / "two.jsonl").stat().st_size)
    subprocess.run([sys.executable, "-m", "foredraft", *command("two.jsonl"), "--workers", "2"], check=True)
    assert by_index(there / "two.jsonl") == by_index(there / "one.jsonl")
    assert len(by_index(there / "one.jsonl")) == 24
