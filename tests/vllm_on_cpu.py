"""What vLLM 0.32 lacks on the CPU, as a plugin of it, so that every process of a server has it: `install` makes an environment with it.

Two kernels are wrong there, which those of GPUs are not, and the writer of extracted hidden states wants CUDA's streams.
"""

import os
from pathlib import Path
from typing import Any


def install(directory: Path, python: str) -> dict[str, str]:
    """The environment of a process that starts `vllm serve ...` by an interpreter that has vLLM; `directory` takes what that needs."""
    script = directory / "bin" / "vllm"
    script.parent.mkdir(parents=True, exist_ok=True)
    # The command of the package for CPUs does not find its own version.
    script.write_text(f'#!/bin/sh\nshift\nmodel="$1"\nshift\nexec {python} -m vllm.entrypoints.openai.api_server --model "$model" "$@"\n')
    script.chmod(0o755)
    (directory / "vllm_on_cpu.py").write_text(Path(__file__).read_text())
    info = directory / "vllm_on_cpu-0.1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-on-cpu\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_on_cpu = vllm_on_cpu:apply\n")
    openmp = Path(python).parents[1] / "lib/libiomp5.so"
    return {
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(directory),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "vllm_on_cpu",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
    }


def apply() -> None:
    """All of it."""
    work_around()
    write_hidden_states()


def write_hidden_states() -> None:
    """In the engine's own thread, without streams and pinned memory."""
    import torch
    from safetensors.torch import save_file
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as module

    class Done:
        def query(self) -> bool:
            return True

    def write(self: Any, pending: Any) -> None:
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        states = module.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous().clone()
        held = self._lock_fds.pop(pending.req_id, None)
        try:
            save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        finally:
            if held is not None:
                os.close(held)
        self._req_copy_events[pending.req_id] = Done()

    module.ExampleHiddenStatesConnector._submit_async_write = write


def work_around() -> None:
    """Plain torch in place of two kernels."""
    import torch
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def norm_each_layer(self: Any, k_LNHd: torch.Tensor) -> torch.Tensor:
        """The CPU's rms_norm norms the context keys of all draft layers with the first layer's weight: k_norm of the others is lost."""
        wide = k_LNHd.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._rms_norm_eps)
        return (normed * self._k_norm_weights.float()[:, None, None]).to(k_LNHd.dtype)

    kernel = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        """The CPU's rotary_embedding misreads strides, and the heads of a 3-D query: latent attention passes it both."""
        if query.dim() == 2:
            return kernel(self, positions, query, key)
        return self.forward_native(positions, query.contiguous(), None if key is None else key.contiguous())

    DFlashQwen3Model._normalize_context_k = norm_each_layer
    RotaryEmbedding.forward_cpu = rotate
