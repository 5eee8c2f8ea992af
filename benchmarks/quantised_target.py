"""A draft trained on a quantised target's own states against one trained on the float target's: acceptance beside either's file.

The float target is a GGUF file's weights unpacked, by default SmolLM2's (`examples/smollm2_target.py`; they were Q4_1 once, so it is packed
otherwise here: Q4_0 loses of them what packing loses). A draft each is trained by one recipe on the same text, the float target's own, and
differs in nothing but the states and choices that it learns from. What is trained and measured already is kept in `--folder`, so that a
run goes on where it was ended. With the default recipe some 10 minutes of training per draft and seed on two idle cores.

  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/quantised_target.py --out docs/results/quantised_target.json
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from llamacpp import BINARIES, quantize
from llamacpp_smollm2 import ROOT, cell, packed_in

from foredraft.decoding import load_prompts
from foredraft.formats import export_draft


def trained(target: Path, recipe: Path, seed: int, folder: Path, more: list[str]) -> Path:
    """The draft that a recipe makes of this target, as a file of float32."""
    run = folder / f"draft {target.stem} {seed}"
    keys = {"target": target, "output_dir": run, "hidden_states_cache": folder / f"hidden {target.stem}", "training.seed": seed}
    words = [sys.executable, "-m", "foredraft", "train", str(recipe), *(f"{key}={value}" for key, value in keys.items()), *more]
    subprocess.run(words, check=True)
    file = folder / f"draft {target.stem} {seed}.gguf"
    file.unlink(missing_ok=True)
    return export_draft(run / "draft", file, "gguf", outtype="f32", target=str(target))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per file that is served, seed and draft."""
    lines = ["| file | seed | draft learned from | τ | accepted up to position 1, 2, ... |", "|---|---|---|---|---|"]
    for row in rows:
        shares = " ".join(f"{share:.3f}" for share in row["acceptance"])
        lines.append(f"| {row['file']} | {row['seed']} | {row['learned from']} | {row['tau']:.3f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Float and each type: a draft per seed, every draft beside every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a GGUF file of the target; default: SmolLM2's, downloaded")
    parser.add_argument("--recipe", type=Path, default=ROOT / "examples/demo.yaml")
    parser.add_argument("--types", nargs="+", default=["q4_0"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples/prompts/mt_bench.jsonl")
    parser.add_argument("--limit", type=int, default=24, help="so many prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafted", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(".cache/quantised"), help="where files and drafts are kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON of all rows; those that it holds are not measured again")
    args, more = parser.parse_known_args()
    if BINARIES is None:
        raise SystemExit("FOREDRAFT_LLAMACPP names no directory of llama-server: see docs/engines.md")
    os.environ["PATH"] = f"{BINARIES}{os.pathsep}{os.environ['PATH']}"
    args.folder.mkdir(parents=True, exist_ok=True)
    source, prompts = args.source or packed_in(args.folder), load_prompts(args.prompts, args.limit)
    files = {kind: args.folder / f"{kind}.gguf" for kind in ("f32", *args.types)}
    for kind, file in files.items():
        if not file.exists():
            quantize(source if kind == "f32" else files["f32"], file, kind)
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for seed in args.seeds:
        for kind, target in files.items():
            missing = [
                file for file in files if not any(r["file"] == file and r["seed"] == seed and r["learned from"] == kind for r in rows)
            ]
            draft = trained(target, args.recipe, seed, args.folder, more) if missing else None
            for file in missing:
                asked = {"prompts": prompts, "max_tokens": args.tokens, "loads": [1]}
                found, _ = cell(files[file], draft, args.drafted, "float32", f"-t {args.threads} -np 1 -c 4096", **asked)
                rows.append({"file": file, "seed": seed, "learned from": kind, **found[0]})
                args.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
