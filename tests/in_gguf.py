"""Tiny targets as GGUF files, and llama.cpp's server over them."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from foredraft.contracts.engine import total
from foredraft.formats.gguf import paired, rope_fields, token_fields, write_gguf
from foredraft.plugins import gguf_heads as heads
from foredraft.plugins.gguf import INNER
from foredraft.serving import read_metrics
from foredraft.target.gguf import TABLES

BINARIES = os.environ.get("FOREDRAFT_LLAMACPP")
"""The directory of `llama-server`."""


def write_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, file: Path, outtype: str = "auto") -> Path:
    """A Llama or Qwen3 target as llama.cpp's own converter writes it; without a tokenizer its tokens are numbers."""
    config: Any = model.config
    if config.model_type in heads.ARCHITECTURES:
        return write_hybrid(model, file, outtype)
    kind = config.model_type
    data = {
        "general.name": "tiny",
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{kind}.rope.dimension_count": config.head_dim,
        f"{kind}.vocab_size": config.vocab_size,
        **(token_fields(None, None, config.vocab_size) if tokenizer is None else words_of(tokenizer, config.vocab_size)),
        "tokenizer.ggml.eos_token_id": config.vocab_size - 1 if tokenizer is None else tokenizer.eos_token_id,
    }
    tensors: dict[str, Any] = {}
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        scaling = {"type": "yarn", "factor": rope["factor"], "original_context_length": length}
        data |= {f"{kind}.rope.scaling.{name}": value for name, value in scaling.items()}
    elif rope["rope_type"] != "default":
        tensors["rope_freqs.weight"] = rope_fields(model.model.rotary_emb, rope)[0]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = {**{ours: other for other, ours in TABLES.items()}, "model.norm.weight": "output_norm.weight"}.get(name)
        if theirs is None:
            _, _, layer, rest = name.split(".", 3)
            theirs = f"blk.{layer}.{INNER[rest.removesuffix('.weight')]}.weight"
            if kind == "llama" and theirs.split(".")[2] in ("attn_q", "attn_k"):
                tensor = paired(tensor, config.head_dim)
        tensors[theirs] = tensor.contiguous()
    write_gguf(file, kind, data, tensors, outtype)
    return file


LINEAR = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def write_hybrid(model: PreTrainedModel, file: Path, outtype: str) -> Path:
    """A dense Qwen3.5 target with as many heads of values as of keys, its tokens numbers."""
    config: Any = model.config
    data = {f"qwen35.{key}": value for key, value in heads.metadata(config.to_dict()).items()}
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        _, part, *rest = name.split(".")
        linear = "linear_attn" in rest
        if linear:
            theirs = LINEAR[".".join(rest[2:])]
            tensor = -tensor.exp() if theirs == "ssm_a" else tensor.squeeze(1) if theirs == "ssm_conv1d.weight" else tensor
        elif part == "layers":
            theirs = heads.NAMES[".".join(["layers.0", *rest[1:]])]
        else:
            theirs = {**{ours: other for other, ours in TABLES.items()}, "model.norm.weight": "output_norm.weight"}[name]
        theirs = f"blk.{rest[0]}.{theirs}" if part == "layers" else theirs
        tensors[theirs] = (tensor if linear else heads.plus_one(name, tensor)).contiguous()
    numbers = token_fields(None, None, config.vocab_size) | {"tokenizer.ggml.eos_token_id": config.vocab_size - 1}
    write_gguf(file, "qwen35", {**data, **numbers}, tensors, outtype)
    return file


def words_of(tokenizer: PreTrainedTokenizerFast, size: int) -> dict[str, Any]:
    """The fields of a byte-level tokenizer, padded to `size` tokens."""
    tokens = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[{i}]" for i in range(len(tokens), size))],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.chat_template": tokenizer.chat_template,
    }


class Server:
    """One `llama-server` on a free port, which ends with the block."""

    def __init__(self, *arguments: object, folder: Path, threads: int = 1, verbosity: int = 5):
        assert BINARIES
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
        common = ["--host", "127.0.0.1", "--port", port, "-t", threads, "-np", 1, "-c", 512, "-ctk", "f32", "-ctv", "f32", "--no-webui"]
        command = [Path(BINARIES) / "llama-server", *common, "--no-repack", "-lv", verbosity, "--metrics", *arguments]
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{BINARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> "Server":
        end = time.monotonic() + 120
        while True:
            try:
                if self.ask("/health")["status"] == "ok":
                    return self
            except OSError:
                time.sleep(0.2)
            if self.process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise AssertionError(f"llama-server did not start: {self.text()[-4000:]}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def generate(self, ids: list[int], tokens: int, slot: int = -1) -> tuple[list[int], dict[str, Any]]:
        """Greedy tokens, and what the server says of them; of a `slot`, or of any."""
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        answer = self.ask("/completion", {**body, "id_slot": slot})
        return answer["tokens"], answer["timings"]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def drafted(self) -> list[list[list[int]]]:
        """Each draft in the order in which they were made: at each position its token, and those as likely by the log's 3 digits."""
        drafts: list[list[list[int]]] = []
        best, last = "", -1
        for match in re.finditer(r"draft candidate\s+(\d+), pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\)", self.text()):
            place, position, token, likely = int(match[1]), int(match[2]), int(match[3]), match[4]
            if place == 0:
                if position <= last or not drafts:
                    drafts.append([])
                drafts[-1].append([token])
                best, last = likely, position
            elif likely == best:
                drafts[-1][-1].append(token)
        return drafts

    def accepted(self) -> tuple[int, list[int]]:
        """How many drafts were verified, and how many were accepted up to position 1, 2, ..."""
        found = read_metrics(self.url)
        per_position = {has["position"]: value for name, has, value in found if name.endswith("accepted_tokens_per_pos_total")}
        drafts = total(found, "llamacpp:spec_decode_num_drafts_total")
        return int(drafts), [int(per_position[p]) for p in sorted(per_position, key=int)]
