"""What foredraft makes of a target or a draft, in words."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig

from ..auto import auto_draft
from ..contracts.loading import PLAIN, Loading
from ..draft.model import BaseDraft
from ..files.hub import locate
from ..files.reading import read_config
from ..registry import DEFAULT_ALGORITHM, default_registry
from ..target.loading import load_config
from ..training.cost import Shape, count_step


def describe(
    name: str,
    algorithm: str | None = None,
    draft_vocab_size: int | None = None,
    rows: int = 1,
    length: int = 2048,
    loading: Loading = PLAIN,
) -> dict[str, str]:
    """Title → text, for a target or a draft at `name`. Raises what `auto_draft` raises."""
    name = str(locate(name))
    is_draft = (Path(name) / "config.json").exists() and "foredraft" in read_config(name)
    with nullcontext() if is_draft else torch.device("meta"):  # a draft is loaded, so that what is wrong with it shows
        source = name if is_draft else load_config(name, loading)
        draft = auto_draft(source, algorithm, draft_vocab_size=draft_vocab_size)
    config, made = draft.config, draft.config.foredraft
    target = made["target"]
    trained = sum(p.numel() for n, p in draft.named_parameters() if not n.startswith("embed_tokens"))
    embedding, share = draft.embed_tokens.weight.numel(), made.get("vocabulary_coverage")
    lines = {
        "what": f"a draft by {made['algorithm']}"
        if is_draft
        else f"a target; planned: a draft by {made['algorithm'] or DEFAULT_ALGORITHM}",
        "target": f"{target['name'] or ('unnamed' if is_draft else name)}: {target['model_type']}, {target['num_hidden_layers']} layers, "
        f"hidden {target['hidden_size']}, vocabulary {target['vocab_size']}",
        "adapter": f"{made['adapter']}: {type(draft).summary} ({_why(type(draft), target['model_type'])})",
        "draft": f"{config.num_hidden_layers} layer(s), hidden {config.hidden_size}, {config.num_attention_heads} heads, "
        f"vocabulary {config.draft_vocab_size}" + (f", {share:.1%} of the supervised tokens" if share is not None else ""),
        "parameters": f"{trained / 1e6:.1f} M trained, {embedding / 1e6:.1f} M in the frozen embedding",
        "aux layers": f"{list(config.aux_layers)} (HF hidden_states indices)",
        "engines know it as": made["architecture"],
        **_engines(config.to_dict()),
        **_step(draft, _as_wide(target) if isinstance(source, str) else source, rows, length),
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernel := draft.attention_kernel(device, torch.bfloat16):
        lines["attention kernel"] = f"{kernel} (in bfloat16, on this machine)"
    if not isinstance(source, str) and (assumed := draft.assumed(source.get_text_config())):
        lines["assumed"] = "\n".join(assumed)
    if measured := made.get("measured"):
        lines["measured"] = "; ".join(f"{prompts}: τ {m['tau']}" for prompts, m in measured.items())
    return lines


def _engines(config: dict[str, Any]) -> dict[str, str]:
    """Who serves a draft with this `config.json`, and why the others do not."""
    reasons = {name: engine().refuses(config) for name, engine in default_registry().engines().items()}
    refusals = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    serving = ", ".join(name for name, reason in reasons.items() if not reason)
    return {"served by": serving or "none", **({"not served by": "\n".join(refusals)} if refusals else {})}


def _why(adapter: type[BaseDraft], model_type: str) -> str:
    if model_type in adapter.model_types:
        return f"its own model_type {model_type}"
    if adapter.generic:
        return f"no adapter lists model_type {model_type}; a tiny model of the family passed the checks"
    return f"asked for by name; it lists model_type {', '.join(adapter.model_types) or 'none'}"


def _step(draft: BaseDraft, target: PretrainedConfig, rows: int, length: int) -> dict[str, str]:
    """What a training step in bfloat16 takes beside the target, all tokens supervised; its FLOPs, the target's own left out."""
    config = draft.config.to_dict()
    cost = count_step(lambda: auto_draft(config), target, Shape(rows, length), run_target=False)
    draft_gib, step_gib, gradients_gib = (n / 2**30 for n in (cost.draft_bytes, cost.step_bytes, cost.gradient_bytes))
    flops = ", ".join(f"{part} {n / cost.tokens / 1e9:.3g}" for part, n in cost.flops.items() if n)
    return {
        "training step": f"about {draft_gib + step_gib:.1f} GiB beside the target, for {rows} × {length} tokens (all supervised): weights "
        f"and optimizer {draft_gib:.1f}, gradients {gradients_gib:.1f}, {cost.bytes_per_token / 1e6:.3g} MB a token",
        "needed": f"{cost.per_token() / 1e9:.3g} GFLOP per token beside the target: {flops}",
    }


def _as_wide(target: Mapping[str, Any]) -> PretrainedConfig:
    """A config with the sizes that a draft remembers of its target."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
    return LlamaConfig(**heads, **{name: target[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")})
