"""llama.cpp, as of build 11434: drafts in GGUF files, beside a target in one."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from foredraft import ForedraftError, default_registry, hookimpl
from foredraft.contracts.engine import Accepted, Config, EngineBase, Files, Metrics, accepted_by_position, architecture_of
from foredraft.contracts.finding import Finding, error, note, warning
from foredraft.contracts.loading import Repository
from foredraft.target.gguf import is_gguf, read_gguf

BUILD = "llama.cpp (build 11434)"
ALONE = "--no-spec-draft-backend-sampling"
"""What keeps drafts of several requests apart: sampled in the graph, those of EAGLE-3 take each other's tokens, or ids that are none."""
KINDS = ("eagle3", "dflash")
HEADS = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures of targets whose multi-token head may be a file."""
REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "target_layers",
)
"""Metadata without which no draft is loaded."""
OUTER = {"eagle3": ("fc", "output_norm"), "dflash": ("fc", "output_norm", "enc.output_norm")}
LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
MORE = {"eagle3": ("attn_norm_2",), "dflash": ("attn_q_norm", "attn_k_norm")}
OPTIONAL = ("token_embd.weight", "output.weight", "d2t", "rope_freqs.weight")


class LlamaCpp(EngineBase):
    """`llama-server` with a draft; the arguments are those of `llama-cli`, too."""

    name = "llamacpp"
    summary = "llama.cpp's server"

    def refuses(self, config: Config) -> str | None:
        """Of a draft of ours, what its file could not express; of a file, what the loader refuses or aborts at."""
        if isinstance(config.get("foredraft"), Mapping):
            try:
                return "; ".join(default_registry().format("gguf")().refuses(config)) or None
            except (KeyError, TypeError) as wrong:
                return f"its config.json is not what foredraft writes: {type(wrong).__name__} at {wrong}"
        data, kind = _metadata(config)
        if not data:
            return (
                "it loads GGUF files: `foredraft import` makes a draft of ours of this one, `foredraft export --format gguf` a file of that"
            )
        if kind in HEADS:
            count = data.get(f"{kind}.nextn_predict_layers")
            return None if count == 1 else f"{kind}.nextn_predict_layers is {count}: it runs one head, and aborts at others ({BUILD})"
        if kind not in KINDS:
            return f"its loader knows no draft architecture {kind or '(none is named)'!r}; it takes {', '.join((*KINDS, *HEADS))} ({BUILD})"
        if missing := [key for key in REQUIRED if data.get(f"{kind}.{key}") is None]:
            return f"metadata that its loader needs is missing: {', '.join(f'{kind}.{key}' for key in missing)} ({BUILD})"
        layers, blocks = data.get(f"{kind}.target_layers"), data.get(f"{kind}.block_count")
        if not isinstance(layers, list) or not layers or (kind == "eagle3" and len(layers) != 3):
            return (
                f"{kind}.target_layers is {str(layers)[:80]}: it wants {'exactly 3' if kind == 'eagle3' else 'a list of'} layers ({BUILD})"
            )
        if kind == "eagle3" and blocks != 1:
            return f"eagle3.block_count is {str(blocks)[:40]}: it runs drafts of one layer, and aborts at others ({BUILD})"
        return None

    def refuses_target(self, target: str) -> str | None:
        """What is there and no GGUF file."""
        if is_gguf(target) or not Path(target).exists():
            return None
        return "its server loads GGUF files: name the target's (llama.cpp's convert_hf_to_gguf.py writes one of a directory)"

    def server(self, target: str) -> list[str]:
        """The OpenAI server; its counters are a page only if asked for. Quantised weights are not repacked where that has crashed: on CPUs
        with AMX."""
        return ["llama-server", "-m", target, "--metrics", *_whole(target)]

    def repository_arguments(self, repository: Repository, dtype: str | None = None) -> list[str]:
        """A file is all there is to read, and says what its weights are; a dtype is that of the key-value caches, else float16."""
        kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(str(dtype))
        return [word for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (name, kind)] if kind else []

    def accepted(self, before: Metrics, after: Metrics) -> Accepted | None:
        """By position, from its counters; passes without a draft, a request's last, are not counted."""
        return accepted_by_position("llamacpp", before, after)

    def prepare(self, config: Config, draft: str, target: str) -> list[str]:
        """A draft of ours is exported first, unless a file of it is there."""
        file, ours = Path(_file(config, draft)), Path(draft) / "config.json"
        if "foredraft" not in config or (file.exists() and file.stat().st_mtime >= ours.stat().st_mtime):
            return []
        return ["foredraft", "export", draft, str(file), "--format", "gguf", "--target", target]

    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        """The OpenAI server."""
        server, file = self.server(target), _file(config, draft)
        whole = [] if "--no-repack" in server else _whole(file)
        return [*server, *whole, "-md", file, "--spec-type", f"draft-{_method(config)}", "--spec-draft-n-max", str(num_tokens), ALONE]

    def findings(self, checkpoint: Files) -> list[Finding]:
        """What its loader stumbles over, or takes for something else without a word."""
        refused = super().findings(checkpoint)
        data, kind = _metadata(checkpoint.config)
        if refused or kind not in KINDS:
            return refused
        return [*_told(data, kind), *_tensors(checkpoint, data, kind), *_words(checkpoint, data, kind)]


def _metadata(config: Config) -> tuple[Mapping[str, Any], str]:
    """What a GGUF file says, and its architecture; nothing of any other draft."""
    data = config.get("gguf")
    return (data, str(data.get("general.architecture") or "")) if isinstance(data, Mapping) else ({}, "")


def _method(config: Config) -> str:
    """What it is told to run: a DSpark draft as DFlash would draft a token less, and none by its Markov head's rules."""
    data, kind = _metadata(config)
    if "markov" in data or "markov_rank" in config:
        return "dspark"
    told = {"DFlashDraftModel": "dflash", "MTPDraftModel": "mtp"}.get(architecture_of(config), "eagle3")
    return "mtp" if kind in HEADS else kind or told


def _file(config: Config, draft: str) -> str:
    return f"{draft}.gguf" if "foredraft" in config else draft


def _told(data: Mapping[str, Any], kind: str) -> Iterator[Finding]:
    widths = {key: data.get(f"{kind}.attention.{key}") for key in ("key_length", "value_length")}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{key} {value}" for key, value in widths.items())
        yield error(
            "llamacpp-heads", found, f"{BUILD} aborts: its drafts have heads of one width", f"write {kind}.attention.value_length alike"
        )
    if data.get(f"{kind}.rope.freq_base") is None:
        breaks = f"{BUILD} takes 10000, and drafts badly if the draft was trained with another"
        yield warning("llamacpp-rope-base", f"no {kind}.rope.freq_base", breaks, "write the draft's rope_theta")
    if kind == "eagle3" and data.get("eagle3.target_hidden_size") is None:
        yield error("llamacpp-target-width", "no eagle3.target_hidden_size", f"{BUILD} does not load it", "write the target's hidden_size")
    if "markov" in data and data.get("dflash.has_confidence_head") is False:
        breaks = f"with --spec-draft-p-min, {BUILD} cannot set the draft up, logs that, and serves the target without it"
        yield note(
            "llamacpp-unsure",
            "no confidence head",
            breaks,
            "leave p-min out; `foredraft eval --engine llamacpp` fails where nothing is drafted",
        )
    if "markov" in data and data.get("dflash.block_size") is None:
        yield error(
            "llamacpp-block", "no dflash.block_size", f"{BUILD} aborts at the first draft", "write the block that it was trained with"
        )
    elif kind == "dflash" and data.get("dflash.block_size") is None:
        breaks = f"{BUILD} takes 16: more tokens are drafted than the draft was trained for, or fewer"
        yield warning("llamacpp-block", "no dflash.block_size", breaks, "write the block that it was trained with")
    if kind == "dflash" and not isinstance(data.get("tokenizer.ggml.mask_token_id"), int):
        breaks = f"{BUILD} reads token -1 in place of the mask, without a word"
        yield error("llamacpp-mask", "no tokenizer.ggml.mask_token_id", breaks, "write the mask token that it was trained with")


def _tensors(checkpoint: Files, data: Mapping[str, Any], kind: str) -> Iterator[Finding]:
    blocks = data[f"{kind}.block_count"]
    if not checkpoint.tensors or not isinstance(blocks, int) or not 0 < blocks <= 512:
        return
    wanted = {f"{name}.weight" for name in OUTER[kind]}
    wanted |= {f"blk.{i}.{name}.weight" for i in range(blocks) for name in (*LAYER, *MORE[kind])}
    missing, names = sorted(wanted - set(checkpoint.tensors)), set(checkpoint.tensors)
    if missing:
        text = f"not there: {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        yield error("llamacpp-missing", text, f"{BUILD} does not load it", "export it anew")
    known = wanted | set(OPTIONAL) | ({f"blk.{i}.attn_sinks.weight" for i in range(blocks)} if kind == "dflash" else set())
    selects = ("markov_", "conf_proj", "selector_")
    extra = sorted(name for name in names - known if kind == "eagle3" or not (name.startswith(selects) or "_conv_" in name))
    if extra:
        text = ", ".join(extra[:5])
        yield error("llamacpp-unexpected", text, f"{BUILD} counts tensors, and loads no file with one too many", "leave them out")


def _words(checkpoint: Files, data: Mapping[str, Any], kind: str) -> Iterator[Finding]:
    info, tokens = checkpoint.tensors.get("d2t"), data.get("tokenizer.ggml.tokens") or data.get(f"{kind}.vocab_size")
    if info is None:
        return
    if info.dtype != "int64":
        breaks = f"{BUILD} aborts: it wants 64-bit integers"
        yield error("llamacpp-d2t-dtype", f"d2t is {info.dtype}", breaks, "write it as int64")
        return
    try:
        ids = [i + offset for i, offset in enumerate(checkpoint.tensor("d2t").tolist())]
    except (ForedraftError, KeyError):
        return
    if any(after <= before for before, after in pairwise(ids)):
        breaks = f"{BUILD} takes its entries for token ids, and drafts nothing that fits"
        yield error(
            "llamacpp-d2t", "d2t does not ascend: it holds offsets, or ids in disorder", breaks, "write the target's id of each draft token"
        )
    elif isinstance(tokens, int) and ids and ids[-1] >= tokens:
        breaks = f"{BUILD} writes its logits beyond the vocabulary"
        yield error(
            "llamacpp-vocabulary", f"d2t names token {ids[-1]}, the file lists {tokens}", breaks, "copy the tokens of its own target"
        )


def _whole(name: str) -> list[str]:
    return ["--no-repack"] if _has_amx() and _is_packed(name) else []


def _is_packed(name: str) -> bool:
    try:
        return is_gguf(name) and bool(read_gguf(name).packed)
    except Exception:  # a damaged file is for the server to tell
        return False


def _has_amx() -> bool:
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@hookimpl
def foredraft_engines() -> list[type[Any]]:
    """The engine of this file."""
    return [LlamaCpp]
