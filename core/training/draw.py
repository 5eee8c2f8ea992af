"""Draws who sees whom in a training step, from the very patterns that the step hands to attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..auto import auto_draft
from ..contracts.draft import Layout
from ..data import DraftCollator
from ..decoding.report import picture
from ..errors import ForedraftError
from ..registry import Registry
from ..target.target import Target

# Two conversations packed into a row: u is the user's, letters a and b are assistant spans.
ROW = "uuaaaaaaauubbbbb" + "uaaaaaa"

DOCUMENTS = [0] * 16 + [1] * 7


@dataclass(frozen=True)
class Call:
    """One call of the backbone: which inputs are queries, and what they see."""

    visible_QK: Tensor
    positions: list[int]
    """Rotary position of each query."""
    entries: list[int]
    """How many keys each earlier call, and this one, put side by side."""


def training_calls(algorithm: str, options: Mapping[str, Any], registry: Registry | None = None) -> list[Call]:
    """The backbone calls of one training step of an algorithm on a tiny random Llama. Raises what `auto_draft` raises."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    draft = auto_draft(config, algorithm, registry=registry, **options)
    spans = [{"a": 0, "b": 1}.get(letter, -1) + 2 * document for letter, document in zip(ROW, DOCUMENTS, strict=True)]
    spans = [span if letter != "u" else -1 for span, letter in zip(spans, ROW, strict=True)]
    row = {"input_ids": list(range(len(ROW))), "documents": DOCUMENTS, "spans": spans, "row": 0}
    batch = DraftCollator(draft.algorithm)([row])
    seen: list[tuple[int, Layout]] = []

    def noted(embeds: Tensor, context: Tensor, layout: Layout, *rest: Any) -> Tensor:
        seen.append((embeds.shape[1], layout))
        return backbone(embeds, context, layout, *rest)

    backbone: Any = draft.backbone
    draft.backbone = noted  # type: ignore[method-assign, assignment]
    draft(batch, Target(LlamaForCausalLM(config), draft.config.aux_layers).capture(batch))
    calls: list[Call] = []
    for embeds, layout in seen:
        inputs = layout.positions.shape[1]
        queries = layout.rows[0] if isinstance(layout.rows, Tensor) else torch.arange(inputs)[-(layout.rows or embeds) :]
        # A cache shows earlier calls; where there is one, this call's own queries are its last entry.
        entries = [*calls[-1].entries, inputs] if calls else [inputs]
        visible = layout.pattern.visible(1, len(queries), entries, queries[None])[0]
        calls.append(Call(visible, layout.positions[0, queries].tolist(), entries))
    return calls


def draw_mask(algorithm: str, file: str | Path, options: Mapping[str, Any] | None = None, registry: Registry | None = None) -> Path:
    """Draw the mask of the last backbone call of a training step into a PNG (or whatever the file's ending says).

    Raises `ForedraftError` for an algorithm without attention, and what `auto_draft` raises.
    """
    calls = training_calls(algorithm, options or {}, registry)
    if not calls:
        raise ForedraftError(f"algorithm '{algorithm}' has no attention to draw: its training step never calls the backbone")
    call = calls[-1]
    queries, keys = call.visible_QK.shape
    with picture(file, figsize=(1.5 + keys / 7, 1.2 + queries / 7), dpi=130, constrained_layout=True) as axis:
        axis.imshow(call.visible_QK.tolist(), cmap="Blues", vmin=0, vmax=1.4, aspect="equal", interpolation="nearest")
        edges = torch.tensor(call.entries).cumsum(0)[:-1].tolist()
        for edge in edges:
            axis.axvline(edge - 0.5, color="C3", linewidth=1.2)
        axis.set_yticks(range(queries), [str(p) for p in call.positions], fontsize=5)
        axis.set_xticks([])
        axis.set(xlabel="keys" + (" (red: where the next drafting step's begin)" if edges else ""), ylabel="queries, by rotary position")
        axis.set_title(f"{algorithm}: who sees whom (two documents in a row)", fontsize=9)
        axis.set_xticks(torch.arange(keys).sub(0.5).tolist(), minor=True)
        axis.set_yticks(torch.arange(queries).sub(0.5).tolist(), minor=True)
        axis.grid(which="minor", color="0.9", linewidth=0.4)
        axis.tick_params(which="minor", length=0)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    return Path(file)
