"""A draft trained on a quantised target's own states against one trained on the float target's: acceptance beside its file.

A tiny target that has learned the bytes of examples/smollm2_chat.jsonl, and EAGLE-3 drafts that differ in nothing but whose states and
choices they learn from; each serves beside both files. Some minutes.

  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/quantised_target.py [--types q4_1 q4_0] [--seeds 3] [--steps 150]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matrix
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from foredraft import Target, auto_draft, save_draft
from foredraft.contracts.engine import Accepted
from foredraft.formats import export_draft
from foredraft.plugins.llamacpp import LlamaCpp
from foredraft.serving import read_metrics
from foredraft.target.loading import load_target

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from in_gguf import BINARIES, Server, write_target

DRAFTED, NEW, PROMPTS, LENGTH = 4, 64, 24, 96
CHATS = Path(__file__).parents[1] / "examples/smollm2_chat.jsonl"
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)


def texts() -> Tensor:
    """Bytes of answers, [N, LENGTH]."""
    said = [json.loads(line)["messages"][-1]["content"] for line in CHATS.read_text(encoding="utf-8").splitlines()]
    ids = torch.tensor(list("\n".join(said).encode()))
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def learned(text: Tensor, steps: int) -> Any:
    """A target that has read them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        ids = text[torch.randint(len(text), (16,))]
        F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def served(target: Path, draft: Path, prompts: Tensor, folder: Path) -> Accepted:
    """What was accepted of all drafts for the prompts, greedily."""
    words = ["-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", DRAFTED, "-ctkd", "f32", "-ctvd", "f32"]
    with Server("-m", target, *words, folder=folder, verbosity=1) as server:
        for prompt in prompts[:, :24].tolist():
            server.generate(prompt, NEW)
        found = LlamaCpp().accepted([], read_metrics(server.url))
    assert found is not None, "nothing was drafted"
    return found


def trained(model: Any, text: Tensor, seed: int, steps: int, file: Path, target: Path) -> Path:
    """A draft that learns from this model, as a file of float32."""
    torch.manual_seed(seed)
    draft = auto_draft(model.config, "eagle3", ttt_steps=DRAFTED)
    whose, rows = Target(model, draft.config.aux_layers), matrix.rows_of(text[torch.randperm(len(text))[: 8 * 16]])
    draft.start_from(whose, rows)
    matrix.train(draft, whose, rows, steps)
    return export_draft(save_draft(draft.eval(), file.with_suffix("")), file, "gguf", outtype="f32", target=str(target))


def main() -> None:
    """A row per seed, draft and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["q4_1", "q4_0"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of a draft")
    parser.add_argument("--target-steps", type=int, default=600)
    args = parser.parse_args()
    if BINARIES is None:
        raise SystemExit("FOREDRAFT_LLAMACPP names no directory of llama-server: see docs/engines.md")
    text = texts()
    text, prompts = text[PROMPTS:], text[:PROMPTS]
    model = learned(text, args.target_steps)
    print("| file | seed | draft learned from | τ | accepted up to position 1, 2, ... |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {kind: write_target(model, None, folder / f"{kind}.gguf", kind) for kind in ("f32", *args.types)}
        for seed in range(args.seeds):
            for kind, file in files.items():
                whose = load_target(str(file), "float32").eval()
                draft = trained(whose, text, seed, args.steps, folder / f"draft {kind} {seed}.gguf", file)
                for other, beside in files.items():
                    if "f32" in (kind, other) or other == kind:
                        found = served(beside, draft, prompts, folder)
                        shares = " ".join(f"{a:.3f}" for a in found.positions)
                        print(f"| {other} | {seed} | {kind} | {found.tau:.3f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
