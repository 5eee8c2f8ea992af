"""The demo: a draft for SmolLM2-135M-Instruct, trained, decoded with and measured on this machine."""

import json
import time
from pathlib import Path

import torch
from rich.console import Console
from smollm2_target import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import auto_draft, evaluate
from foredraft.decoding.report import demand_identical, plot_acceptance, table
from foredraft.files.writing import write_text
from foredraft.training.run import load_split, train
from foredraft.training.settings import RunConfig

# Held-out prompts that the number of drafted tokens is chosen on; the others are measured.
CHOOSING = 3


def main() -> None:
    """Train on the shipped conversations, evaluate on those held out."""
    start = time.perf_counter()
    console = Console()
    config = RunConfig.load("examples/demo.yaml")
    console.rule("1/4  the target: SmolLM2-135M-Instruct (dequantised from 4 bit)")
    target = build(Path(config.target))
    console.rule("2/4  training an EAGLE-3 draft; the first epoch also runs the target")
    path = train(config)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    draft = auto_draft(path).to(model.dtype)
    prompts = [conversation[:1] for conversation in load_split(config.data)[1]]
    console.rule(f"3/4  how many tokens to draft: {CHOOSING} held-out prompts in bfloat16, as engines decode")
    tried = {k: evaluate(model, draft, tokenizer, prompts[:CHOOSING], num_draft_tokens=k, max_new_tokens=48) for k in (1, 2)}
    for k, result in tried.items():
        console.print(f"{k} drafted: τ {result.tau:.2f}, {result.speedup:.2f}× plain decoding")
    best = max(tried, key=lambda k: tried[k].speedup or 0.0)
    console.print(f"chosen: {best}, the fastest here: each further token makes the target's pass longer and is accepted less often")
    console.rule("4/4  decoding the other held-out prompts, with and without the draft")
    fast = evaluate(model, draft, tokenizer, prompts[CHOOSING:], num_draft_tokens=best, max_new_tokens=48)
    exact = evaluate(model.float(), draft.float(), tokenizer, prompts[:CHOOSING], num_draft_tokens=best, max_new_tokens=48)
    for results in ({"held out": fast}, {"held out, exact": exact}):
        console.print(table(results))
    console.print("in bfloat16 a near-tie may fall otherwise when several tokens are read at once; in float32 outputs must be identical")
    plot = path.parent / "acceptance.png"
    plot_acceptance({"held out": fast}, plot)
    record = {"bfloat16": fast, "float32": exact} | {f"choosing {k}": result for k, result in tried.items()}
    write_text(path.parent / "evaluation.json", json.dumps({name: result.to_dict() for name, result in record.items()}, indent=2))
    demand_identical({"held out": exact})
    console.print(f"\ndone in {(time.perf_counter() - start) / 60:.1f} minutes. draft: {path}")
    console.print(f"plots: {plot}, {path.parent / 'training.png'}")
    console.print(f'next: .venv/bin/foredraft generate --target {target} --draft {path} -k {best} "Write a haiku about the sea."')
    console.print("      .venv/bin/foredraft train examples/smollm2.yaml      # the longer recipe, see docs/results.md")


if __name__ == "__main__":
    main()
