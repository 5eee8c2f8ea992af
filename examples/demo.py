"""The demo: a draft for SmolLM2-135M-Instruct, trained, decoded with and measured on this machine."""

import json
import time
from pathlib import Path

import torch
from rich.console import Console
from smollm2_target import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import auto_draft, evaluate
from foredraft.checkpoint import write_text
from foredraft.decoding.report import demand_identical, plot_acceptance, table
from foredraft.training.run import load_split, train
from foredraft.training.settings import RunConfig


def main() -> None:
    """Train on the shipped conversations, evaluate on those held out."""
    start = time.perf_counter()
    console = Console()
    config = RunConfig.load("examples/demo.yaml")
    console.rule("1/3  the target: SmolLM2-135M-Instruct (dequantised from 4 bit)")
    target = build(Path(config.target))
    console.rule("2/3  training an EAGLE-3 draft; the first epoch also runs the target")
    path = train(config)
    console.rule("3/3  decoding held-out prompts, with and without the draft")
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    draft = auto_draft(path)
    prompts = [conversation[:1] for conversation in load_split(config.data)[1]]
    result = evaluate(model, draft, tokenizer, prompts, num_draft_tokens=4, max_new_tokens=64)
    results = {"held out": result}
    console.print(table(results))
    plot = path.parent / "acceptance.png"
    plot_acceptance(results, plot)
    write_text(path.parent / "evaluation.json", json.dumps(result.to_dict(), indent=2))
    demand_identical(results)
    console.print(f"\ndone in {(time.perf_counter() - start) / 60:.1f} minutes. draft: {path}")
    console.print(f"plots: {plot}, {path.parent / 'training.png'}")
    console.print(f'next: .venv/bin/foredraft generate --target {target} --draft {path} "Write a haiku about the sea."')
    console.print("      .venv/bin/foredraft train examples/smollm2.yaml      # the longer recipe, see docs/results.md")


if __name__ == "__main__":
    main()
