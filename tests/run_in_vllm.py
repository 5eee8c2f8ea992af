"""Decodes token ids in a real vLLM on the CPU and notes every draft; run by vLLM's own interpreter.

`python run_in_vllm.py` reads lines of JSON, `[JOB, OUT]`, does each in a process of its own that has imported vLLM already, and answers
each with a line, the process's exit status. JOB is JSON: `llm` (arguments of `vllm.LLM`), `prompts` (lists of ids), `max_tokens`,
`ignore_eos`, `states` (a file, or null). OUT becomes JSON, too: `ids` (per
prompt, what was generated), `drafts` (per prompt, [tokens known, drafted ids] of each draft), `drafted` and `accepted` (vLLM's own counts,
the latter per position), `absent` (parameters of the draft that its file lacks: vLLM does not complain), `seconds`; `states` becomes
what the drafter reads of each prompt, by its number: the target's final states and the aux states behind them, [L, (1 + aux) x T].
"""

import json
import os
import sys
import time
import traceback
from typing import Any

from vllm_on_cpu import work_around

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which this file can look into
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)  # read when vLLM is imported


def note_drafts(drafts: dict[str, list[Any]]) -> None:
    """Let the scheduler write down, by request, what was drafted after how many tokens."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output

    def noting(self: Any, scheduled: Any, output: Any) -> Any:
        for name, tokens in scheduled.scheduled_spec_decode_tokens.items():
            drafts.setdefault(name, []).append([self.requests[name].num_tokens, list(tokens)])
        return update(self, scheduled, output)

    Scheduler.update_from_output = noting


def note_absent(absent: list[str]) -> None:
    """Let the loader write down the draft's parameters that no tensor of its file filled."""
    from vllm.model_executor.models import utils

    load = utils.AutoWeightsLoader.load_weights

    def noting(self: Any, weights: Any, **settings: Any) -> Any:
        loaded = load(self, weights, **settings)
        module = self.module
        if hasattr(module, "combine_hidden_states"):
            # The first two may be the target's; DFlash reads the mask token's embedding from the table, unless a file beside it holds one.
            optional = ("embed_tokens", "lm_head", "draft_id_to_target_id", "mask_embedding")
            absent.extend(n for n, _ in module.named_parameters() if n not in loaded and not any(o in n for o in optional))
        return loaded

    utils.AutoWeightsLoader.load_weights = noting


def note_states(forwards: list[Any]) -> None:
    """Let the model runner write down what each forward of a target read and gave: ids, positions, states."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    forward = GPUModelRunner._model_forward

    def noting(self: Any, *given: Any, **named: Any) -> Any:
        out = forward(self, *given, **named)
        ids, positions = (named.get(name, given[i] if len(given) > i else None) for i, name in enumerate(("input_ids", "positions")))
        if ids is not None and isinstance(out, tuple):
            final, aux = out
            forwards.append((ids.clone(), positions.clone(), [t.float().clone() for t in (final, *aux)]))
        return out

    GPUModelRunner._model_forward = noting


def states_of(prompt: list[int], forwards: list[Any]) -> Any:
    """Final and aux states of a prompt, side by side, from the first forward that read all of it."""
    import torch

    wanted, length = torch.tensor(prompt), len(prompt)
    for ids, positions, states in forwards:
        for start in range(len(ids) - length + 1):
            at = slice(start, start + length)
            if torch.equal(ids[at].long(), wanted) and torch.equal(positions[..., at].reshape(-1, length)[0], torch.arange(length)):
                return torch.cat([t[at] for t in states], dim=-1).contiguous()
    raise LookupError(f"no forward read the prompt {prompt}")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What the module's docstring says of OUT."""
    drafts: dict[str, list[Any]] = {}
    absent: list[str] = []
    forwards: list[Any] = []
    work_around()
    note_drafts(drafts)
    note_absent(absent)
    if job["states"]:
        note_states(forwards)
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"], enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, disable_log_stats=False, seed=0)
    prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    settings = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=job["ignore_eos"], detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - start
    if job["states"]:
        from safetensors.torch import save_file

        save_file({str(i): states_of(ids, forwards) for i, ids in enumerate(job["prompts"])}, job["states"])
    counts = {m.name.split("spec_decode_")[-1]: m for m in llm.get_metrics() if "spec_decode" in m.name}
    names = {output.request_id: name for output in outputs for name in drafts if name.split("-")[0] == output.request_id}
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": [drafts.get(names.get(output.request_id, ""), []) for output in outputs],
        "drafted": counts["num_drafts"].value if counts else 0,
        "accepted": list(counts["num_accepted_tokens_per_pos"].values) if counts else [],
        "absent": absent,
        "seconds": seconds,
    }


def do(job: str, out: str) -> None:
    """One job, in a process that then ends; what it prints goes beside `out`."""
    with open(f"{out}.log", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        with open(job, encoding="utf-8") as file:
            asked = json.load(file)
        result = run(asked)
        with open(out, "w", encoding="utf-8") as file:
            json.dump(result, file)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # its threads do not all end


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    import vllm  # noqa: F401 (once, for all)

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            do(*json.loads(line))
        print(os.waitpid(child, 0)[1], file=answers, flush=True)
