"""Decodes token ids in a real vLLM on the CPU and notes every draft; run by vLLM's own interpreter: `python run_in_vllm.py JOB OUT`.

JOB is JSON: `llm` (arguments of `vllm.LLM`), `prompts` (lists of ids), `max_tokens`, `ignore_eos`. OUT becomes JSON, too: `ids`
(per prompt, what was generated), `drafts` (per prompt, [tokens known, drafted ids] of each draft), `drafted` and `accepted` (vLLM's
own counts, the latter per position), `absent` (parameters of the draft that its file lacks: vLLM does not complain), `seconds`.
"""

import json
import os
import sys
import time
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


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What the module's docstring says of OUT."""
    drafts: dict[str, list[Any]] = {}
    absent: list[str] = []
    work_around()
    note_drafts(drafts)
    note_absent(absent)
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"], enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, disable_log_stats=False, seed=0)
    prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    settings = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=job["ignore_eos"], detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - start
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


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    result = run(asked)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)  # its threads do not all end
