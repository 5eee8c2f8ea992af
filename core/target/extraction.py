"""A target's states from an engine that runs it: a server that writes down what it computes of each prompt."""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..contracts.aux_layers import reads_end
from ..errors import ForedraftError
from ..serving import Gone, Refused, Server
from .capture import decoder_of, depth_of
from .kept import Part
from .loading import untrained
from .store import Row
from .weights import norm_behind


class Extraction:
    """States of documents, asked of a server that extracts hidden states (vLLM's `extract_hidden_states`) to a disk that we see, too.

    It must have been started with the aux layers of the draft, followed by the target's last one where final states are read, and once
    where it is both: its output is put through the target's own norm, which is read from its files. Every file is removed when it is read.
    """

    def __init__(
        self, server: Server, target: str | Path, config: PretrainedConfig, aux_layers: Sequence[int], needs: Sequence[str], dtype: Any
    ):
        self.server, self.dtype = server, dtype
        self.width = config.get_text_config().hidden_size
        self.count, last = len(aux_layers), depth_of(config)
        self.alone = reads_end(tuple(aux_layers), last)  # what the aux states are, the final ones are made of
        self.normed = tuple(aux_layers) == (last,)
        self.norm = final_norm(target, config, dtype) if "final" in needs or self.normed else None
        self.needs = needs
        self.concurrency = 32

    def __call__(self, rows: Sequence[Row], parts: Sequence[Part]) -> Iterator[tuple[Part, Mapping[str, Tensor]]]:
        """See `Source`. Raises `ForedraftError` for a server that is gone, or says something else than was asked for."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            yield from zip(parts, pool.map(self._states, parts), strict=True)

    @torch.no_grad()
    def _states(self, part: Part) -> dict[str, Tensor]:
        try:
            reply = self.server.complete(part.ids.tolist(), max_tokens=1, temperature=0.0)
        except Gone as error:
            raise ForedraftError(f"{error}\n  What was captured is kept: start the server, and run again") from error
        except Refused as error:
            raise ForedraftError(f"no hidden states of a document of {len(part.ids)} tokens: {error}") from error
        file = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not file:
            raise ForedraftError(
                f"the server at '{self.server.root}' extracts no hidden states: `foredraft capture RUN --engine vllm` starts one that does"
            )
        states_nLT = self._read(Path(file), part)
        own = {}
        if "aux" in self.needs:
            aux_nLT = states_nLT[:, : self.count]
            own["aux"] = (self.norm(aux_nLT) if self.norm is not None and self.normed else aux_nLT).flatten(1)
        if self.norm is not None and "final" in self.needs:
            own["hidden"] = self.norm(states_nLT[torch.from_numpy(part.taught), -1])
        return own

    def _read(self, file: Path, part: Part) -> Tensor:
        """[n, layers, T] of a prompt, as soon as they are written."""
        lock = Path(f"{file}.lock")
        try:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # the server holds it while it writes
                found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ForedraftError(f"what the server wrote to '{file}' cannot be read here: {error}; both must see the same disk") from error
        for done in (file, lock):
            with suppress(OSError):
                done.unlink()
        shape = (len(part.ids), self.count + (self.norm is not None and not self.alone), self.width)
        states = found["hidden_states"]
        if tuple(states.shape) != shape or (ids := found["token_ids"].tolist()) != part.ids.tolist():
            raise ForedraftError(
                f"the server says {tuple(states.shape)} of {len(ids)} tokens, expected are {shape} (tokens, layers, width): it was"
                " started with other layers than this run reads, or for another target"
            )
        return states.to(self.dtype)


def final_norm(target: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The target's norm behind its last layer, with the weights that its files hold; nothing else is loaded.

    Raises `ForedraftError` where it is not found there.
    """
    with torch.device("meta"):
        model = untrained(config, dtype)
    names = {id(module): name for name, module in model.named_modules()}
    if (norm := norm_behind(decoder_of(model))) is not None:
        norm.to_empty(device="cpu").requires_grad_(False)
        wanted = {f"{names[id(norm)]}.{name}": tensor for name, tensor in norm.state_dict().items()}
        missing = set(wanted)
        for file in sorted(Path(target).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in missing & set(opened.keys()):
                    wanted[name].copy_(opened.get_tensor(name))
                    missing = missing - {name}
        if not missing:
            return norm
    raise ForedraftError(f"the norm behind the last layer of '{target}' is in no safetensors file there: name a directory that has it")
