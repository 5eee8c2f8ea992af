"""Rendering and packing conversations: rows and tokens a second, and memory, of made-up ones; beside another checkout's, if one is named.

    python benchmarks/data.py --tokenizer TARGET --conversations 100000 [--against CHECKOUT] [--processes 1]

Words are drawn by Zipf's law from 200,000 made-up ones, so that some come often and new ones always; turns have 10 to 400 of them. CPU time
is of all processes; memory is the sum over processes of what is not a mapped file, sampled, and its peak. `tokenizer_alone_ms` is CPU time
a conversation of nothing but token ids, of the first ones whole: no rendering with this tokenizer takes less.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def write(file: Path, count: int, turns: int) -> None:
    """`count` conversations of 1 to `turns` questions and answers."""
    import numpy as np

    draw, numbers = random.Random(0), np.random.default_rng(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choice(letters[: 6 + n % 20]) for _ in range(2 + n % 9)) for n in range(200_000)]
    ends = [".", ",", ".\n", "?", "", "", "", "", "", ""]

    def said(length: int) -> str:
        places = numbers.zipf(1.15, length) % len(words)
        return " ".join(words[place] + (draw.choice(ends) if n % 3 == 0 else "") for n, place in enumerate(places.tolist()))

    with file.open("w") as out:
        for _ in range(count):
            asked = [(role, *size) for _ in range(draw.randint(1, turns)) for role, size in (("user", (10, 80)), ("assistant", (60, 400)))]
            messages = [{"role": role, "content": said(draw.randint(least, most))} for role, least, most in asked]
            out.write(json.dumps({"messages": messages}) + "\n")


def measure(file: str, tokenizer: str, length: int, processes: int | None) -> None:
    """In a process of its own: load and pack, and print what it took."""
    from transformers import AutoTokenizer

    from foredraft import Conversations, pack

    reader = AutoTokenizer.from_pretrained(tokenizer)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as one:
        one.write(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n")
        one.flush()
        pack(Conversations.load(one.name), reader, length)  # what is done once
    peak, ended = [0], threading.Event()
    threading.Thread(target=_watch, args=(peak, ended), daemon=True).start()
    cpu, began = _cpu(), time.monotonic()
    conversations = Conversations.load(file)
    loaded, loaded_cpu = time.monotonic(), _cpu()
    rows = pack(conversations, reader, length, **({"processes": processes} if processes else {}))
    seconds, own = time.monotonic() - loaded, _cpu() - loaded_cpu
    ended.set()
    texts = [reader.apply_chat_template(list(conversations[i]), tokenize=False) for i in range(min(300, len(conversations)))]
    began_alone = _cpu()
    for text in texts:
        reader.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
    alone = 1e3 * (_cpu() - began_alone) / len(texts)
    tokens = sum(int((batch["documents"] >= 0).sum()) for batch in rows.with_format("numpy").iter(256))
    first = next(iter(rows.with_format("numpy").iter(1)))
    print(
        json.dumps(
            {
                "conversations": len(conversations),
                "tokens": tokens,
                "load": round(loaded - began, 1),
                "load_cpu": round(loaded_cpu - cpu, 1),
                "pack": round(seconds, 1),
                "pack_cpu": round(own, 1),
                "tokenizer_alone_ms": round(alone, 2),
                "peak_MiB": round(peak[0] / 2**20),
                "rows": len(rows),
                "check": int(first["input_ids"].sum()),
            }
        )
    )


def _cpu() -> float:
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def _watch(peak: list[int], ended: threading.Event) -> None:
    while not ended.wait(0.2):
        peak[0] = max(peak[0], sum(map(_anonymous, _family(os.getpid()))))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


def _anonymous(pid: int) -> int:
    """Bytes of a process that no file backs."""
    try:
        return next(int(line.split()[1]) * 1024 for line in open(f"/proc/{pid}/status") if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


def main() -> None:
    """Write the data, measure each in its own process, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--against", help="another checkout of foredraft, whose `core` is measured on the first so many conversations")
    parser.add_argument("--first", type=int, default=2000, help="how many of them the other one is given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.measure, asked.tokenizer, asked.max_length, asked.processes)
        return
    with tempfile.TemporaryDirectory() as directory:
        data, first = Path(directory) / "data.jsonl", Path(directory) / "first.jsonl"
        write(data, asked.conversations, asked.turns)
        print(f"{asked.conversations} conversations, {data.stat().st_size / 2**20:.0f} MiB", flush=True)
        if asked.against:
            with data.open() as lines:
                first.write_text("".join(line for _, line in zip(range(asked.first), lines, strict=False)))
            _run(asked, first, directory, asked.against, None)
            _run(asked, first, directory, None, 1)
        _run(asked, data, directory, None, asked.processes)


def _run(asked: argparse.Namespace, file: Path, directory: str, checkout: str | None, processes: int | None) -> None:
    environment = {**os.environ, "HF_DATASETS_CACHE": f"{directory}/cache-{file.name}-{processes}", "TOKENIZERS_PARALLELISM": "false"}
    if checkout:
        place = Path(directory) / "other"
        place.mkdir(exist_ok=True)
        (place / "foredraft").symlink_to(Path(checkout).absolute() / "core")
        environment["PYTHONPATH"] = str(place)
    command = [sys.executable, __file__, "--tokenizer", asked.tokenizer, "--max-length", str(asked.max_length), "--measure", str(file)]
    command += ["--processes", str(processes)] if processes else []
    found = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    rate, per = found["conversations"] / found["pack"], 1e3 * found["pack_cpu"] / found["conversations"]
    print(f"{checkout or 'this one'}, {processes or 'default'} processes: {json.dumps(found)}")
    print(f"  {rate:.0f} conversations/s, {found['tokens'] / found['pack']:.0f} tokens/s, {per:.2f} ms of CPU a conversation", flush=True)


if __name__ == "__main__":
    main()
