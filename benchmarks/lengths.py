"""How much to draft, step by step, and who is asked first: what it gains where a drafted token costs this or that.

`python benchmarks/lengths.py --draft DRAFT --texts OUT/mt_bench_texts.json --out FILE`: the texts are those that
`foredraft compare --replay` keeps, replayed. Printed are τ, the tokens of a round that were offered and those of them that the
model drafted, and tokens per time over plain decoding, by `COSTS`: a round costs a pass over one token, and for each token that
is offered what it costs to verify, for each that the model drafted what that costs, both as shares of that pass.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foredraft.cli.common import load_draft_for
from foredraft.contracts import DrafterBase
from foredraft.decoding.replay import evaluate_replayed
from foredraft.registry import default_registry

COSTS = ((0.13, 0.07), (0.03, 0.04), (0.005, 0.03))
"""To verify, to draft."""
MOST = 8


class Counted:
    """A draft's algorithm, which counts the tokens that the model drafts."""

    def __init__(self, algorithm: Any):
        self.algorithm, self.tokens = algorithm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def drafter(self, draft: Any) -> Any:
        """The algorithm's own, counted."""
        made = self.algorithm.drafter(draft)
        propose = made.propose

        def counting(*args: Any) -> Any:
            tokens, logits = propose(*args)
            self.tokens += len(tokens)
            return tokens, logits

        made.propose = counting
        return made


def ways(draft: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What is replayed, by what it is called: who drafts, and how."""
    lookup: DrafterBase = default_registry().make_algorithm("prompt_lookup", {})
    suffix: DrafterBase = default_registry().make_algorithm("suffix", {})
    wide: DrafterBase = default_registry().make_algorithm("suffix", {"max_spec_factor": 2})
    found: dict[str, tuple[Any, dict[str, Any]]] = {f"draft, {k}": (draft, {"num_draft_tokens": k}) for k in (1, 2, 4, MOST)}
    for name, values in (("min_acceptance", (0.1, 0.2, 0.4)), ("min_confidence", (0.1, 0.2, 0.4))):
        found |= {f"draft, up to {MOST}, {name} {least}": (draft, {"num_draft_tokens": MOST, name: least}) for least in values}
    found |= {f"prompt_lookup, up to {k}": (lookup, {"num_draft_tokens": k}) for k in (2, 4, 10)}
    found |= {f"prompt_lookup, up to 10, min_acceptance {least}": (lookup, {"min_acceptance": least}) for least in (0.1, 0.4)}
    found |= {"suffix": (suffix, {}), "suffix, max_spec_factor 2": (wide, {})}
    for k in (1, 2):
        found |= {f"{name} before draft, {k}": (draft, {"num_draft_tokens": k, "first": name}) for name in ("prompt_lookup", "suffix")}
    return found


def main() -> None:
    """Print a line for each way, and write them all."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--target", default=".cache/smollm2")
    asked.add_argument("--dtype", default="bfloat16")
    asked.add_argument("--limit", type=int, help="so many texts")
    for name in ("--draft", "--texts", "--out"):
        asked.add_argument(name, type=Path, required=True)
    args = asked.parse_args()
    held = json.loads(args.texts.read_text())
    texts = [(torch.tensor(ids), known) for ids, known in held["texts"][: args.limit]]
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype))
    draft: Any = load_draft_for(args.draft, target)
    rows: dict[str, Any] = {}
    for name, (who, how) in ways(draft).items():
        counted = Counted(draft.algorithm)
        if who is draft:
            draft.algorithm = counted
        found = evaluate_replayed(target, who, texts, max_new_tokens=held["of"]["max_new_tokens"], **how)
        draft.algorithm = counted.algorithm
        rounds = (found.emitted - found.prompts) / found.tau  # the pass over a prompt says a token
        drafted = counted.tokens / rounds
        gains = [found.tau / (1 + verify * found.drafted + draft_cost * drafted) for verify, draft_cost in COSTS]
        rows[name] = {"tau": found.tau, "offered": found.drafted, "drafted": drafted, "speed": gains}
        print(
            f"{name:48} τ {found.tau:.3f}  offered {found.drafted:5.2f}  drafted {drafted:5.2f}  speed",
            *(f"{gain:.2f}" for gain in gains),
            flush=True,
        )
    about = {"draft": str(args.draft), "texts": str(args.texts), "prompts": len(texts), "costs": COSTS, "dtype": args.dtype}
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
