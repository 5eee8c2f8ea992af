"""The frozen target: what it says of a batch (`Signal`), from its own modules."""

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..contracts.aux_layers import check_aux_layers, reads_end
from ..contracts.draft import Batch
from ..contracts.signal import Signal
from ..data.collate import ends_of
from ..errors import ForedraftError
from .capture import AuxCapture, decoder_layers, decoder_of, depth_of, norm_behind, norm_scale
from .places import stacked
from .segments import ASKED, by_documents, score_cap, wanted
from .weights import home_of, in_turn, is_sharded, matrix_of, own_tensors, runs_on

# Config fields that a family multiplies its logits by, or divides them by.
FACTORS = ("logit_scale", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


class Target:
    """A causal language model seen by drafts: it captures hidden states and applies its head; it is never trained.

    Of its states it hands out those that an algorithm `needs` (`AlgorithmBase.needs`).

    Raises `ForedraftError` where its layers are not found, or its head is not understood (final norm and head, applied by
    hand, must give its own logits).
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...], needs: Sequence[str] = ("aux", "final")):
        self.model = model.eval().requires_grad_(False)
        self.needs = needs
        text, depth = model.config.get_text_config(), depth_of(model.config)
        self.aux_layers = check_aux_layers(aux_layers, depth, reads_end(aux_layers, depth))
        factors, divisors = ([getattr(text, name, None) or 1.0 for name in names] for names in (FACTORS, DIVISORS))
        self._multiplier = prod(factors) / prod(divisors)
        self._soft_cap: float | None = getattr(text, "final_logit_softcapping", None)
        self._vocabulary = text.vocab_size
        self._gathered: dict[str, Tensor] = {}
        self._try_out()

    def _try_out(self) -> None:
        """Run it over a few tokens: is its head understood, and how are documents in a row told apart?"""
        how = self.model.config.get_text_config()._attn_implementation
        asked, cap = how == ASKED, score_cap(self.model.config)
        if cap is not None and how == "sdpa":
            warnings.warn(
                f"the target's attention caps its scores at {cap:g}, and transformers' SDPA does not: engines read other states than "
                "these. Load it with attn_implementation='eager', 'flex_attention' or 'flash_attention_2'",
                stacklevel=3,
            )
        refusal = f"attn_implementation: {type(self.model).__name__} does not work by '{ASKED}': leave it out, or choose another"
        try:
            self._check_head()
        except ValueError as error:  # capped scores, of which SDPA says so
            if not asked:
                raise
            raise ForedraftError(refusal) from error
        # A compressor, which pools more tokens than twins have, would not show by them.
        states_8T = None if self.model._is_stateful else self._states_of_twins()
        self._packs = states_8T is not None and _alike(states_8T[:4], states_8T[4:])
        self._by_documents = self._packs and wanted(self.model) and _alike(states_8T, self._states_of_twins(by_documents=True))
        if asked and not self._by_documents:
            raise ForedraftError(refusal)

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers, final norm included."""
        return decoder_of(self.model)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, T], whole, where the target keeps it."""
        return matrix_of(self.model.get_input_embeddings(), self.model.dtype)

    @property
    def head_weight(self) -> Tensor:
        """[V, T], whole, where the target keeps it; of a quantised head what it multiplies by."""
        return matrix_of(self.model.get_output_embeddings(), self.model.dtype)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return decoder_layers(self.model)

    @property
    def final_norm(self) -> dict[str, Tensor]:
        """The parameters of the final norm by name, each [T]; its weight is what it multiplies features by."""
        norm = norm_behind(self.decoder)
        return {} if norm is None else {**own_tensors(norm), "weight": norm_scale(norm)}

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
            logits_NV = logits_NV.to(hidden_NT.device).float() * self._multiplier
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

    @torch.no_grad()
    def _check_head(self) -> None:
        """In one forward, where the target lives: whether its logits are the head's of its final states."""
        if self.model.get_output_embeddings() is None:
            raise ForedraftError(f"{type(self.model).__name__} says of no module that it is its head (get_output_embeddings)")
        ids, final = torch.arange(1, 5, device=home_of(self.model))[None] % self._vocabulary, []
        seen = self.decoder.register_forward_hook(lambda module, given, out: final.append(out[0]))
        try:
            with torch.autocast(ids.device.type, enabled=False):
                theirs = self.model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            seen.remove()
        for multiplier in (self._multiplier, 1.0):  # what is built around a text model may leave its scale out (Aya Vision)
            self._multiplier = multiplier
            ours = self.head(final[0][0].to(theirs.device))
            if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
                return
        raise ForedraftError(
            f"the head of {type(self.model).__name__} is not understood: final hidden state × head differs from its logits by up to "
            f"{float((ours - theirs).abs().max()):.3g}.\n  Known extras: {', '.join((*FACTORS, *DIVISORS))}, final_logit_softcapping"
        )

    def _end_to_end(self, ids_BS: Tensor, positions_BS: Tensor, ends: Tensor, longest: int) -> Tensor:
        """Final states [1, B·S, T] of rows laid end to end, each token seeing its own document; see `segments.attend`."""
        ends = ends.to(ids_BS.device, non_blocking=True)
        told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        with by_documents(self.model):
            row = {"input_ids": ids_BS.view(1, -1), "position_ids": positions_BS.view(1, -1)}
            return self.decoder(**row, use_cache=False, **told).last_hidden_state

    @torch.no_grad()
    def _states_of_twins(self, by_documents: bool = False) -> Tensor | None:
        """Final states [8, T] of a document of four tokens that comes twice in a row; None where the target cannot be told of positions."""
        ids_18 = torch.arange(1, 5, device=home_of(self.model)).repeat(2)[None] % self._vocabulary
        positions_18 = torch.arange(4, device=ids_18.device).repeat(2)[None]
        with torch.autocast(ids_18.device.type, enabled=False):
            try:
                if by_documents:
                    return self._end_to_end(ids_18, positions_18, torch.tensor([0, 4, 8], dtype=torch.int32), 4)[0].float()
                return self.decoder(input_ids=ids_18, position_ids=positions_18, use_cache=False).last_hidden_state[0].float()
            except (TypeError, ValueError):
                return None


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.allclose(one, other, rtol=1e-2, atol=1e-2 * float(one.abs().max()))
