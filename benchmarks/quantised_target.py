"""A draft trained on a quantised target's own states against one trained on the float target's: acceptance in llama.cpp, with both files.

Tiny targets of benchmarks/matrix.py and EAGLE-3 drafts that differ in nothing but whose states they learn from; a minute or two.

  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/quantised_target.py [--type q4_1] [--seeds 3] [--steps 200]
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import matrix
import torch

from foredraft import Target, auto_draft, save_draft
from foredraft.contracts.engine import Accepted
from foredraft.formats import export_draft
from foredraft.plugins.llamacpp import LlamaCpp
from foredraft.serving import read_metrics
from foredraft.target.loading import load_target

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from in_gguf import BINARIES, Server, write_target

DRAFTED, NEW, PROMPTS = 4, 40, 32
matrix.TARGETS["Llama"]["head_dim"] = 32


def served(target: Path, draft: Path, folder: Path) -> Accepted:
    """What was accepted of all drafts for the prompts, greedily."""
    words = ["-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", DRAFTED, "-ctkd", "f32", "-ctvd", "f32"]
    with Server("-m", target, *words, folder=folder, verbosity=1) as server:
        for prompt in matrix.chain(20_000, PROMPTS, 12, noise=0.3).tolist():
            server.generate(prompt, NEW)
        found = LlamaCpp().accepted([], read_metrics(server.url))
    assert found is not None, "nothing was drafted"
    return found


def trained(model: Any, seed: int, steps: int, file: Path, target: Path) -> Path:
    """A draft that learns from this model, as a file of float32."""
    torch.manual_seed(seed)
    draft = auto_draft(model.config, "eagle3", ttt_steps=DRAFTED)
    whose, rows = Target(model, draft.config.aux_layers), matrix.rows_of(matrix.chain(10_000 + seed, 8 * 16))
    draft.start_from(whose, rows)
    matrix.train(draft, whose, rows, steps)
    return export_draft(save_draft(draft.eval(), file.with_suffix("")), file, "gguf", outtype="f32", target=str(target))


def main() -> None:
    """A row per seed, draft and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", default="q4_1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if BINARIES is None:
        raise SystemExit("FOREDRAFT_LLAMACPP names no directory of llama-server: see docs/engines.md")
    print("| seed | draft trained on | served with | τ | accepted up to position 1, 2, ... |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = matrix.trained_target("Llama")
        files = {kind: write_target(model, None, folder / f"{kind}.gguf", kind) for kind in ("f32", args.type)}
        models = {kind: load_target(str(file), "float32").eval() for kind, file in files.items()}
        for seed in range(args.seeds):
            for learned, whose in models.items():
                draft = trained(whose, seed, args.steps, folder / f"draft {learned} {seed}.gguf", files[learned])
                for kind, file in files.items():
                    found = served(file, draft, folder)
                    shares = " ".join(f"{a:.3f}" for a in found.positions)
                    print(f"| {seed} | {learned} | {kind} | {found.tau:.3f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
