"""A process that has imported a real vLLM, and what it says of a job (tests/run_in_vllm.py)."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("FOREDRAFT_VLLM_PYTHON")
IN_VLLM = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="FOREDRAFT_VLLM_PYTHON names no interpreter with vLLM")]


class RunningVLLM:
    """Does a job after the other, each in a process of its own."""

    def __init__(self, process: Any, folder: Path):
        self.process, self.folder = process, folder

    def __call__(
        self,
        target: str,
        speculative: dict[str, Any] | None,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        states: str | None = None,
        **llm: Any,
    ) -> dict[str, Any]:
        """What run_in_vllm.py says of a target, and of a draft if `speculative` describes one."""
        own = {"model": target, "skip_tokenizer_init": True, "max_model_len": 128, **llm}
        if speculative is not None:
            own["speculative_config"] = speculative
        job, out = self.folder / "job.json", self.folder / "out.json"
        job.write_text(json.dumps({"llm": own, "prompts": prompts, "max_tokens": max_tokens, "ignore_eos": True, "states": states}))
        out.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps([str(job), str(out)]) + "\n")
        self.process.stdin.flush()
        status = self.process.stdout.readline().strip()
        assert out.exists(), f"{status}: " + (self.folder / "out.json.log").read_text()[-4000:]
        return json.loads(out.read_text())  # type: ignore[no-any-return]


@contextmanager
def running_vllm(folder: Path) -> Iterator[RunningVLLM]:
    """Its files and what it logs go to `folder`."""
    assert PYTHON is not None
    openmp = Path(PYTHON).parents[1] / "lib/libiomp5.so"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})}
    command = [PYTHON, str(Path(__file__).with_name("run_in_vllm.py"))]
    with (folder / "imports.log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        yield RunningVLLM(process, folder)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
