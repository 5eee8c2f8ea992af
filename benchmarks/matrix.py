"""Runs every cell of adapter × algorithm on a tiny target and writes the README's table.

A cell: a tiny random model of the family is trained on a small language until it is predictable; a draft is started from it, trained
for some dozen steps, saved and loaded; τ before and after, and whether greedy output is that of the target alone, are measured.
`python benchmarks/matrix.py` prints the table, `--write README.md` puts it between the markers there.
"""

import argparse
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foredraft import BaseDraft, DraftCollator, Target, auto_draft, default_registry, generate, save_draft
from foredraft.decoding.loop import DraftingStats

BEGIN, END = "<!-- matrix: made by `make matrix` -->", "<!-- /matrix -->"
VOCAB, LENGTH, DRAFTED = 48, 32, 4
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SHAPE = {
    "vocab_size": VOCAB + 1,  # one token the text never uses stands for the unknown
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 4,
}
TARGETS: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", **SHAPE},
    "Phi-3": {"model_type": "phi3", **SHAPE},
    "Qwen3": {"model_type": "qwen3", **SHAPE, "head_dim": 32},
    "DeepSeek-V3": {"model_type": "deepseek_v3", **SHAPE, **MLA, **MOE},
}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", {"ttt_steps": DRAFTED}),
    "EAGLE-3.1": ("eagle31", {"ttt_steps": DRAFTED}),
    "P-EAGLE": ("peagle", {"num_depths": DRAFTED, "num_layers": 1}),
    "DFlash": ("dflash", {"block_size": DRAFTED + 1, "num_layers": 2, "anchors": 16}),
    "DFlash2": ("dflash2", {"block_size": DRAFTED + 1, "num_layers": 2, "anchors": 16, "selector_rank": 16}),
    "Domino": ("domino", {"block_size": DRAFTED, "num_layers": 2, "anchors": 16, "emb_dim": 16, "gru_hidden_dim": 32}),
    "DSpark": ("dspark", {"block_size": DRAFTED, "num_layers": 2, "anchors": 16, "markov_rank": 16}),
    "Medusa": ("medusa", {"num_heads": DRAFTED}),
    "EAGLE-1": ("eagle", {}),
    "Medusa, served": ("medusa", {"num_heads": DRAFTED, "served": True}),
    "MTP": ("mtp", {}),
}


@dataclass(frozen=True)
class Cell:
    """What one adapter × algorithm gave."""

    untrained: float
    """τ of the fresh draft."""
    trained: float
    """τ after training, saving and loading."""
    identical: bool
    """Whether all greedy outputs are the target's own."""


def chain(seed: int, count: int, length: int = LENGTH, noise: float = 0.1) -> Tensor:
    """Texts of the language, [count, length]: each token calls for a successor of its own, which follows with 1 - noise."""
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(VOCAB, (count, length), generator=generator)
    noisy = torch.rand(count, length, generator=generator) < noise
    for t in range(1, length):
        ids[:, t] = torch.where(noisy[:, t], ids[:, t], successor[ids[:, t - 1]])
    return ids


def rows_of(texts: Tensor) -> list[dict[str, Any]]:
    """Packed rows of texts whose first two tokens are the question."""
    spans = [-1] * 2 + [0] * (texts.shape[1] - 2)
    return [{"input_ids": ids, "documents": [0] * len(ids), "spans": spans, "row": i} for i, ids in enumerate(texts.tolist())]


@cache
def trained_target(family: str, steps: int = 150) -> PreTrainedModel:
    """A tiny model of the family that has learned the language."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TARGETS[family]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = chain(step + 1, 16)
        logits = model(input_ids=ids).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def beginnings() -> Tensor:
    """Eight beginnings of texts, [8, 6]: the prompts."""
    return chain(20_000, 8, 6, noise=0)


@cache
def alone(model: PreTrainedModel) -> list[Tensor]:
    """The target's own greedy texts."""
    return [model.generate(prompt[None], **GREEDY) for prompt in beginnings()]  # type: ignore[operator]


@torch.no_grad()
def measure(model: PreTrainedModel, draft: BaseDraft) -> tuple[float, bool]:
    """(τ, whether every greedy output is the target's own)."""
    stats = DraftingStats()
    out = [generate(model, draft, prompt[None], num_draft_tokens=DRAFTED, stats=stats, **GREEDY) for prompt in beginnings()]
    return stats.tau, all(map(torch.equal, out, alone(model)))


def run(family: str, algorithm: str, target_steps: int = 150, steps: int = 60) -> tuple[BaseDraft, Cell]:
    """One cell: its draft, trained, saved and loaded, and what it gave. What was loaded must be what was saved."""
    model = trained_target(family, target_steps)
    torch.manual_seed(0)
    name, options = ALGORITHMS[algorithm]
    draft = auto_draft(model.config, name, **options)
    target = Target(model, draft.config.aux_layers)
    rows = rows_of(chain(10_000, 8 * 16))
    draft.start_from(target, rows)
    untrained, _ = measure(model, draft.eval())
    train(draft, target, rows, steps)
    with tempfile.TemporaryDirectory() as folder:
        loaded = auto_draft(save_draft(draft.eval(), Path(folder) / "draft"))
    trained, identical = measure(model, loaded)  # which gives it the embedding and the head that its file may leave to the target
    again = loaded.state_dict()
    if others := [name for name, tensor in draft.state_dict().items() if not torch.equal(tensor, again[name])]:
        raise RuntimeError(f"{family} × {algorithm}: loaded, {', '.join(others)} are not what was saved")
    return loaded, Cell(untrained, trained, identical)


def train(draft: BaseDraft, target: Target, rows: list[dict[str, Any]], steps: int) -> None:
    """Batches of 8 of the 128 rows, over and over."""
    collate = DraftCollator(draft.algorithm)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=2e-3)
    draft.train()
    for step in range(steps):
        collate.epoch = step // 16
        batch = collate(rows[8 * (step % 16) : 8 * (step % 16) + 8])
        draft(batch, target.capture(batch))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def table(wanted: Collection[str], known: dict[tuple[str, str], str]) -> str:
    """Markdown: τ untrained → trained; a cell whose output is not the target's says so. Of algorithms not `wanted`, what is `known`."""
    lines = [f"| target (adapter) | {' | '.join(ALGORITHMS)} |", "|---" * (len(ALGORITHMS) + 1) + "|"]
    for family in TARGETS:
        cells = {algorithm: run(family, algorithm)[1] for algorithm in ALGORITHMS if algorithm in wanted}
        texts = {n: f"{c.untrained:.2f} → {c.trained:.2f}{'' if c.identical else ' (output differs!)'}" for n, c in cells.items()}
        adapter = default_registry().adapter_for(TARGETS[family]["model_type"]).name
        row = [texts.get(name) or known.get((family, name), "not run") for name in ALGORITHMS]
        lines.append(f"| {family} (`{adapter}`) | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def cells_in(file: Path) -> dict[tuple[str, str], str]:
    """What stands between the markers of a Markdown file, by family and algorithm."""
    held = file.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in held.strip().splitlines())
    return {(row[0].split(" (")[0], name): cell for row in rows for name, cell in zip(header[1:], row[1:], strict=True)}


def write(file: Path, text: str) -> None:
    """Put the table between the markers of a Markdown file."""
    before, rest = file.read_text(encoding="utf-8").split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a Markdown file with the markers")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), help="algorithms to run; others stay")
    arguments = parser.parse_args()
    made = table(arguments.only, cells_in(arguments.write) if arguments.write else {})
    if arguments.write:
        write(arguments.write, made)
