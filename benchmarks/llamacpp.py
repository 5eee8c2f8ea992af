"""From which size of target on a draft pays in llama.cpp: what a pass with k drafted tokens costs, in passes of the target alone.

Speed needs no trained weights: targets and EAGLE-3 drafts are random, and the server rejects every drafted token (`--spec-synth-rates 0`),
so that a pass gives one token, with a draft and without. Plain tokens/s over drafted tokens/s is then the τ that a draft of k tokens needs
to pay. Run it on an idle machine; every number of tokens is measured `--rounds` times in turn, and medians are told with their spread.

  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/llamacpp.py [--shapes tiny 135M 360M 1B] [--types f32 q4_1] [--drafted 1 2 4]
  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/llamacpp.py --target my-target.gguf --draft my-draft.gguf --out costs.json

The second measures files of one's own; by what it writes `foredraft serve-command --costs costs.json` chooses how much to draft. A server
of this build is told the number of drafted tokens as it starts, and not by a request, so there is a start for each.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from foredraft import auto_draft, default_registry, save_draft
from foredraft.formats import export_draft, serve_command

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from in_gguf import BINARIES, Server, write_target

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    "360M": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
}
VOCAB = {"tiny": 512, "135M": 49_152, "360M": 49_152, "1B": 128_256}
WORDS = {"tiny": 128, "135M": 8_192, "360M": 8_192, "1B": 32_768}
"""Of the draft."""
PROMPT = list(range(5, 37))


def write(shape: str, folder: Path) -> tuple[Path, Path]:
    """A random target as a file of float32, and a draft for it in a directory."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], vocab_size=VOCAB[shape], max_position_embeddings=2048, tie_word_embeddings=False)
    config.head_dim = config.hidden_size // config.num_attention_heads
    target = write_target(AutoModelForCausalLM.from_config(config), None, folder / "target.gguf", "f32")
    draft = auto_draft(config, "eagle3", draft_vocab_size=WORDS[shape])
    draft.set_draft_vocabulary(torch.arange(WORDS[shape]))
    return target, save_draft(draft, folder / "draft")


def packed(target: Path, draft: Path, kind: str) -> tuple[Path, Path]:
    """Both in weights of a kind, the target by llama.cpp's own tool, as people pack theirs."""
    own, file = target.with_name(f"{kind}.gguf"), target.with_name(f"draft {kind}.gguf")
    if kind == "f32":
        own = target
    else:
        quantize(target, own, kind)
    return own, export_draft(draft, file, "gguf", outtype=kind, target=str(target))


def quantize(source: Path, out: Path, kind: str) -> Path:
    """`llama-quantize`, which also unpacks."""
    assert BINARIES
    words = [str(Path(BINARIES) / "llama-quantize"), "--allow-requantize", str(source), str(out), kind.upper()]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}: {done.stderr[-2000:]}")
    return out


def speed(target: Path, draft: Path | None, drafted: int, threads: int, tokens: int, folder: Path) -> float:
    """Tokens per second after the prompt; the first answer is not counted."""
    words: list[Any] = ["-m", target]
    if draft is not None and drafted:
        served = shlex.split(serve_command(default_registry().engine("llamacpp")(), draft, str(target), drafted))
        words = [*served[1:], "--spec-synth-rates", ",".join(["0"] * drafted)]
    with Server(*words, folder=folder, threads=threads, verbosity=1) as server:
        for count in (4, tokens):
            asked = {"prompt": PROMPT, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
            timings = server.ask("/completion", asked)["timings"]
    return float(timings["predicted_per_second"])


def measure(target: Path, draft: Path, drafted: list[int], rounds: int, threads: int, tokens: int) -> dict[str, Any]:
    """Tokens/s alone, what a pass costs by number of drafted tokens, and the largest relative spread."""
    runs: dict[int, list[float]] = {k: [] for k in (0, *drafted)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for k, found in runs.items():
                found.append(speed(target, draft, k, threads, tokens, Path(folder)))
    middle = {k: statistics.median(found) for k, found in runs.items()}
    spread = max((max(found) - min(found)) / middle[k] for k, found in runs.items())
    costs = {str(k): round(middle[0] / middle[k], 3) for k in drafted}
    how = {"rounds": rounds, "threads": threads, "tokens": tokens}
    return {"plain": round(middle[0], 1), "costs": costs, "spread": round(spread, 3), **how}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the τ needed by number of drafted tokens."""
    lengths = list(rows[0]["costs"])
    head = ["target", "weights", "tokens/s alone", *(f"k = {k}" for k in lengths), "spread"]
    lines = [[r["shape"], r["type"], r["plain"], *(f"{r['costs'][k]:.2f}" for k in lengths), f"{r['spread']:.0%}"] for r in rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *lines])


def main() -> None:
    """All shapes in all types, a row each as it is measured; or one's own files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--types", nargs="+", default=["f32", "q4_1"])
    parser.add_argument("--target", type=Path, help="a GGUF file, in place of shapes and types")
    parser.add_argument("--draft", type=Path, help="its draft's file")
    parser.add_argument("--drafted", nargs="+", type=int, default=[1, 2, 4], help="numbers of tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer that is timed")
    parser.add_argument("--out", type=Path, help="JSON: of one's own files what serve-command reads, else of all rows")
    args = parser.parse_args()
    if BINARIES is None:
        raise SystemExit("FOREDRAFT_LLAMACPP names no directory of llama-server: see docs/engines.md")
    how = (args.drafted, args.rounds, args.threads, args.tokens)
    rows: list[dict[str, Any]] = []
    if args.target:
        rows.append({"shape": args.target.name, "type": "", **measure(args.target, args.draft, *how)})
    for shape in [] if args.target else args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            target, draft = write(shape, Path(folder))
            for kind in args.types:
                start = time.perf_counter()
                rows.append({"shape": shape, "type": kind, **measure(*packed(target, draft, kind), *how)})
                print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows[0] if args.target else rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
