"""What a target says of a batch (`Signal`): hidden states and logits, taken from its own modules as it runs, wherever they are."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from transformers import PretrainedConfig, PreTrainedModel

from ..contracts.draft import Batch
from ..contracts.signal import Signal
from ..data.collate import ends_of
from ..errors import ForedraftError
from .places import places_of, stacked
from .segments import by_documents
from .weights import matrix_of, own_tensors


def decoder_of(model: PreTrainedModel) -> Any:
    """The stack of decoder layers, embedding and final norm included, without the head."""
    decoder = model.get_decoder()
    while decoder is model or hasattr(decoder, "lm_head"):  # Llama 4's text model is named as if it were multimodal
        decoder = decoder.model
    return decoder


def depth_of(target_config: PretrainedConfig) -> int:
    """How many decoder layers a target's list holds, which ids of layers count.

    LongCat's config counts each of its layers as two, for its two attentions; its engines count layers, as transformers' list does.
    """
    text = target_config.get_text_config()
    return min(text.num_hidden_layers, getattr(text, "num_layers", None) or text.num_hidden_layers)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a target, whatever its family calls them. Raises `ForedraftError` if it has no such list."""
    count = depth_of(model.config)
    lists = [module for module in decoder_of(model).modules() if isinstance(module, nn.ModuleList)]
    if found := next((module for module in lists if len(module) == count), None):
        return found
    longest = max(map(len, lists), default=0)
    other = f" (its longest holds {longest}: which of them an id means is open)" if longest > 1 else ""
    raise ForedraftError(
        f"{type(model).__name__} has no list of the {count} decoder layers that its config counts{other}, so its states cannot be captured"
    )


def in_one(states: Tensor, width: int) -> Tensor:
    """What a layer hands on as one vector per token, [B, S, T]: of several streams, [B, S, n, T] or [B, S, n·T], their mean."""
    return states if states.shape[2:] == (width,) or states.shape[-1] % width else states.reshape(*states.shape[:2], -1, width).mean(2)


def runs_on(module: nn.Module) -> torch.device:
    """Where a module multiplies; of one that is offloaded, where its tensors are fetched to."""
    fetched_to = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return next(module.parameters()).device if fetched_to is None else torch.device(fetched_to)


def home_of(model: Any) -> torch.device:
    """Where a target reads its ids; parts of it may be elsewhere."""
    return runs_on(model.get_input_embeddings())


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks keep a part each, so that all must run it together."""
    return any(isinstance(p, DTensor) for p in module.parameters())


def is_settled(model: nn.Module) -> bool:
    """Whether its parts were put where they are for a reason, so that it must not be moved: by a device map, a quantiser, over ranks."""
    return hasattr(model, "hf_device_map") or getattr(model, "hf_quantizer", None) is not None or is_sharded(model)


def in_turn(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each batch that is to be run through the target, and whether it is this rank's own.

    That is `batch` alone, unless ranks share the target: then those of all, in their order, on the CPU. They must ask equally often.
    """
    sharded = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if sharded is None:
        yield dict(batch), True
        return
    group = sharded.device_mesh.get_group()
    own, parts = dist.get_rank(group), [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, dict(batch)), group)
    for rank, part in enumerate(parts):
        assert part is not None
        yield part, rank == own


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """In what autocast runs products of x's device; None: there is none."""
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else None


class AuxCapture:
    """While open, remembers what the aux layers put out in the latest forward, side by side, on one device.

    The last layer's index stands for the state after the final norm, as in HF's `hidden_states`; `BEFORE_NORM` for that before it.
    By hooks on the decoder layers: transformers' list form of `output_hidden_states` counts layer outputs in 5.18 and
    `hidden_states` entries in 5.23, without a word, and it clashes with a user's own `output_hidden_states=True`.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...], device: torch.device | None = None):
        layers = decoder_layers(model)
        self._width = model.config.get_text_config().hidden_size
        self._device = device or home_of(model)
        self._layers = [decoder_of(model) if i == len(layers) else layers[i - 1 if i > 0 else i] for i in aux_layers]
        self._hooks: list[Any] = []
        self.aux_BSA = torch.empty(0)
        """The concatenated aux states of the latest forward, on `device`, or where the model reads its ids."""
        self._decoder: Any = decoder_of(model)
        self._positions: Tensor | None = None
        self._config = model.config

    def __enter__(self) -> "AuxCapture":
        for place, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_hook(partial(self._keep, place)))
        self._hooks.append(self._decoder.register_forward_pre_hook(self._note, with_kwargs=True))
        return self

    @property
    def places_CBS(self) -> Tensor | None:
        """Where the latest forward had its tokens, see `Signal`."""
        found = places_of(self._positions, self._config)
        return None if found is None else found.to(self._device)

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _keep(self, place: int, module: Any, arguments: Any, output: Any) -> None:
        """Into its place at once: the layers' own outputs would be held beside their concatenation."""
        states = in_one(output if isinstance(output, Tensor) else output[0], self._width)
        *shape, width = states.shape
        if place == 0:
            self.aux_BSA = states.new_empty(*shape, len(self._layers) * width, device=self._device)
        self.aux_BSA[..., place * width : (place + 1) * width] = states

    def _note(self, module: Any, arguments: Any, named: Any) -> None:
        self._positions = named.get("position_ids")


class Captured:
    """A causal language model as it is run over batches: what a `Target` says of them, by what it was told of itself."""

    model: PreTrainedModel
    needs: Sequence[str]
    """Which of its states are handed out, see `AlgorithmBase.needs`."""
    aux_layers: tuple[int, ...]
    _multiplier: float
    """Of the head's logits."""
    _soft_cap: float | None
    _packs: bool
    """Whether documents in a row are told apart by their positions."""
    _by_documents: bool
    """Whether attention goes by documents, see `segments.py`."""
    _gathered: dict[str, Tensor]
    """The head's tensors, of one that is shared among ranks."""

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers, final norm included."""
        return decoder_of(self.model)

    @property
    def head_weight(self) -> Tensor:
        """[V, T], whole, where the target keeps it; of a quantised head what it multiplies by."""
        return matrix_of(self.model.get_output_embeddings(), self.model.dtype)

    @torch.no_grad()
    def head(self, hidden_NT: Tensor) -> Tensor:
        """Logits of post-norm hidden states, float32, on the states' device.

        By the target's own module, whose hooks fetch what is offloaded. One that is shared among ranks is gathered once: they ask it
        of different rows.
        """
        head: Any = self.model.get_output_embeddings()
        with torch.autocast(runs_on(head).type, enabled=False):  # the target keeps its own precision inside a draft's autocast
            if is_sharded(head):
                self._gathered = self._gathered or {**own_tensors(head), "weight": self.head_weight}
                weight_VT = self._gathered["weight"]
                logits_NV = F.linear(hidden_NT.to(weight_VT), weight_VT, self._gathered.get("bias"))
            else:
                logits_NV = head(hidden_NT.to(runs_on(head), self.model.dtype))
            logits_NV = logits_NV.to(hidden_NT.device).float()
        if self._multiplier != 1.0:
            logits_NV = logits_NV * self._multiplier
        return logits_NV if self._soft_cap is None else torch.tanh(logits_NV / self._soft_cap) * self._soft_cap

    @torch.no_grad()
    def capture(self, batch: Batch) -> Signal:
        """Run the target over a packed batch; documents do not see each other.

        What it says comes to the batch's device, wherever its own parts are. Ranks that share the target run it over the batch of
        each in turn, and each keeps its own.
        """
        device, shape = batch["input_ids"].device, batch["input_ids"].shape
        read = ("input_ids", "documents", "positions", "ends", "pixels")
        for part, own in in_turn(self.model, {name: batch[name] for name in read if name in batch}):
            *states, places = self._seen(part, device) if "pixels" in part else (*self._states(part, device), None)
            if own:
                places_CBS = places
                kept = (s if need in self.needs else s[..., :0] for need, s in zip(("aux", "final"), states, strict=True))
                aux_BSA, hidden_BST = (s.reshape(*shape, s.shape[-1]).to(device) for s in kept)
        return Signal(aux_BSA, hidden_BST, self.head, places_CBS)

    def _seen(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Aux states, final states and places (see `Signal`) of a batch with images: rows that have some one by one, the others at once."""
        ids_BS, pixels = batch["input_ids"], batch["pixels"]
        plain = [b for b, found in enumerate(pixels) if not found]
        rows: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        if plain:
            states = self._states({name: batch[name][plain] for name in ("input_ids", "positions")}, device)
            aux_BSA, final_BST = (s.reshape(len(plain), -1, s.shape[-1]) for s in states)
            rows = {b: (aux_BSA[i], final_BST[i], None) for i, b in enumerate(plain)}
        for b in (b for b, found in enumerate(pixels) if found):
            count = int((batch["documents"][b] >= 0).sum())
            with AuxCapture(self.model, self.aux_layers, device) as captured:
                final_1ST = self._final_of(input_ids=ids_BS[b, None, :count], **pixels[b])
            behind = (0, 0, 0, ids_BS.shape[1] - count)
            rows[b] = F.pad(captured.aux_BSA[0], behind), F.pad(final_1ST[0], behind), captured.places_CBS
        aux, final, places = zip(*(rows[b] for b in range(len(pixels))), strict=True)
        return (
            torch.stack([a.to(device) for a in aux]),
            torch.stack([f.to(device) for f in final]),
            stacked(places, ids_BS.shape[1], device),
        )

    @torch.no_grad()
    def _final_of(self, **inputs: Tensor) -> Tensor:
        """Final states [B, S, T] in a forward of the whole model."""
        home, final = home_of(self.model), list[Tensor]()
        given = {n: t.to(home, self.model.dtype if t.is_floating_point() else t.dtype, non_blocking=True) for n, t in inputs.items()}
        seen = self.decoder.register_forward_hook(lambda module, arguments, out: final.append(out[0]))
        try:
            with torch.autocast(home.type, enabled=False):
                self.model(**given, use_cache=False, logits_to_keep=1)
        finally:
            seen.remove()
        return final[0]

    def _states(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Aux states, on `device`, and final states of a batch; both [.., .., width], rows and documents in the batch's order.

        Where attention goes by documents, the batch is one row. Else transformers tells documents apart by positions that restart (no
        attention mask given), its flash attention in a single row only. Families that don't (ALiBi, recurrent layers) see a document a row.
        """
        home = home_of(self.model)
        ids_BS, positions_BS = (batch[name].to(home, non_blocking=True) for name in ("input_ids", "positions"))
        with AuxCapture(self.model, self.aux_layers, device) as captured, torch.autocast(home.type, enabled=False):
            if self._by_documents:
                ends, longest = batch.get("ends") or ends_of(positions_BS)
                final_1NT = self._end_to_end(ids_BS, positions_BS, ends, longest)
                return captured.aux_BSA, final_1NT
            if self._packs:
                shape = (1, -1) if "flash" in str(self.model.config._attn_implementation) else ids_BS.shape
                out = self.decoder(input_ids=ids_BS.view(shape), position_ids=positions_BS.view(shape), use_cache=False)
                return captured.aux_BSA, out.last_hidden_state
            # Padded behind: nothing looks ahead, so no mask is needed.
            number, offset = (positions_BS == 0).flatten().cumsum(0) - 1, positions_BS.flatten()
            ids_NL = ids_BS.new_zeros(int(number[-1]) + 1, int(offset.max()) + 1)
            ids_NL[number, offset] = ids_BS.flatten()
            out = self.decoder(input_ids=ids_NL, use_cache=False)
            at = number.to(device), offset.to(device)
            return captured.aux_BSA[at], out.last_hidden_state[number, offset]

    def _end_to_end(self, ids_BS: Tensor, positions_BS: Tensor, ends: Tensor, longest: int) -> Tensor:
        """Final states [1, B·S, T] of rows laid end to end, each token seeing its own document; see `segments.attend`."""
        ends = ends.to(ids_BS.device, non_blocking=True)
        told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        with by_documents(self.model):
            row = {"input_ids": ids_BS.view(1, -1), "position_ids": positions_BS.view(1, -1)}
            return self.decoder(**row, use_cache=False, **told).last_hidden_state
