"""What it costs a draft to learn from states that are kept in fewer bits: one run from states of each dtype, held-out τ beside the disk.

    python benchmarks/kept_states.py RUN.yaml OUT [key=value ...]

The run must hold conversations out. τ is the teacher-forced estimate on them; evaluation reads what is kept, too, so that a lower figure is
what training and evaluation lose together. `foredraft eval` measures the drafts (OUT/DTYPE/draft) in decoding.
"""

import argparse
import json
from pathlib import Path

from foredraft.training.run import train
from foredraft.training.settings import RunConfig


def main() -> None:
    """Train from each, print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's file")
    parser.add_argument("out", help="folder for drafts and states")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run")
    o = parser.parse_args()
    run, out, overrides = o.run, o.out, o.overrides
    found: dict[str, tuple[float, float, int]] = {}
    for dtype in ("auto", "bfloat16", "float8"):
        own = [f"output_dir={out}/{dtype}", f"hidden_states_cache={out}/states-{dtype}", f"hidden_states_dtype={dtype}"]
        train(RunConfig.load(run, [*overrides, *own]))
        history = json.loads((Path(out) / dtype / "training.json").read_text())["history"]
        last = [log for log in history if "eval_tau" in log][-1]
        size = sum(file.stat().st_size for file in Path(out, f"states-{dtype}").glob("*.safetensors"))
        found[dtype] = last["eval_tau"], last["eval_cross_entropy"], size
    for dtype, (tau, cross_entropy, size) in found.items():
        loss = f"{(1 - tau / found['auto'][0]):+.2%} of τ lost"
        print(f"{dtype:>9}: τ {tau:.4f} ({loss}), cross-entropy {cross_entropy:.4f}, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
