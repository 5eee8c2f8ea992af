"""From which size of target on a draft pays in llama.cpp: what a pass with k drafted tokens costs, in passes of the target alone.

Speed needs no trained weights: targets and EAGLE-3 drafts are random, and the server rejects every drafted token (`--spec-synth-rates 0`),
so that a pass gives one token, with a draft and without. plain tokens/s over drafted tokens/s is then the τ that a draft of k tokens needs
to pay. Run it on an idle machine; all is measured `--repeat` times in turn, and the medians are told with their spread.

  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/llamacpp.py [--shapes tiny 135M 360M 1B] [--types f32 bf16 q8_0 q4_1] [--most 6]
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from foredraft import auto_draft, save_draft
from foredraft.formats import export_draft

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


def files(shape: str, kind: str, folder: Path) -> tuple[Path, Path]:
    """A random target and a draft for it, in weights of a kind."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], vocab_size=VOCAB[shape], max_position_embeddings=2048, tie_word_embeddings=False)
    config.head_dim = config.hidden_size // config.num_attention_heads
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if kind == "f32" else torch.bfloat16)
    target = write_target(model, None, folder / f"{shape} {kind}.gguf", kind)
    draft = auto_draft(config, "eagle3", draft_vocab_size=WORDS[shape]).to(model.dtype)
    draft.set_draft_vocabulary(torch.arange(WORDS[shape]))
    save_draft(draft, folder / "draft")
    out = folder / f"{shape} {kind} draft.gguf"
    return target, export_draft(folder / "draft", out, "gguf", outtype=kind, target=str(target))


def speed(arguments: list[Any], folder: Path, threads: int, tokens: int) -> float:
    """Tokens per second after the prompt; the first answer is not counted."""
    with Server(*arguments, folder=folder, threads=threads, verbosity=1) as server:
        server.generate(list(range(5, 37)), 8)
        timings = server.generate(list(range(5, 37)), tokens)[1]
    return float(timings["predicted_per_second"])


def measure(shape: str, kind: str, most: int, repeat: int, threads: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Tokens/s without a draft, and the τ needed for drafts of 1, 2, ... tokens: medians, and the largest relative spread."""
    target, draft = files(shape, kind, folder)
    runs: dict[int, list[float]] = {k: [] for k in range(most + 1)}
    for _ in range(repeat):
        for k, found in runs.items():
            rates = ",".join(["0"] * k)
            drafting = ["-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", k, "--spec-synth-rates", rates] if k else []
            found.append(speed(["-m", target, *drafting], folder, threads, tokens))
    middle = {k: statistics.median(found) for k, found in runs.items()}
    spread = max((max(found) - min(found)) / middle[k] for k, found in runs.items())
    return {
        "shape": shape,
        "type": kind,
        "plain": round(middle[0], 1),
        "needed": [round(middle[0] / middle[k], 2) for k in range(1, most + 1)],
        "spread": round(spread, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the τ needed by number of drafted tokens."""
    most = max(len(row["needed"]) for row in rows)
    head = ["target", "weights", "tokens/s alone", *(f"k = {k}" for k in range(1, most + 1)), "spread"]
    lines = [[row["shape"], row["type"], row["plain"], *row["needed"], f"{row['spread']:.0%}"] for row in rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *lines])


def main() -> None:
    """All shapes in all types, a row each as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--types", nargs="+", default=["f32", "bf16", "q8_0", "q4_1"])
    parser.add_argument("--most", type=int, default=6, help="drafted tokens, at most")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    args = parser.parse_args()
    if BINARIES is None:
        raise SystemExit("FOREDRAFT_LLAMACPP names no directory of llama-server: see docs/engines.md")
    rows = []
    for shape in args.shapes:
        for kind in args.types:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(shape, kind, args.most, args.repeat, args.threads, args.tokens, Path(folder)))
            print(rows[-1], flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
