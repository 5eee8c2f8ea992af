"""The frozen target: a model that is tried out before drafts learn of it, and what they start from."""

import warnings
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..contracts.aux_layers import check_aux_layers, reads_end
from ..errors import ForedraftError
from .capture import Captured, decoder_layers, depth_of, home_of
from .segments import ASKED, score_cap, wanted
from .weights import matrix_of, norm_behind, norm_scale, own_tensors

# Config fields that a family multiplies its logits by, or divides them by.
FACTORS = ("logit_scale", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


class Target(Captured):
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
        self._soft_cap = getattr(text, "final_logit_softcapping", None)
        self._vocabulary = text.vocab_size
        self._gathered = {}
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
    def embedding_weight(self) -> Tensor:
        """[V, T], whole, where the target keeps it."""
        return matrix_of(self.model.get_input_embeddings(), self.model.dtype)

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
        # In half precision theirs are rounded once more by each thing done to them (soft caps), ours are not.
        room = max(1e-3, 2 * torch.finfo(self.model.dtype).eps)
        for multiplier in (self._multiplier, 1.0):  # what is built around a text model may leave its scale out (Aya Vision)
            self._multiplier = multiplier
            ours = self.head(final[0][0].to(theirs.device))
            if torch.allclose(ours, theirs, rtol=room, atol=room * float(theirs.abs().max())):
                return
        raise ForedraftError(
            f"the head of {type(self.model).__name__} is not understood: final hidden state × head differs from its logits by up to "
            f"{float((ours - theirs).abs().max()):.3g}.\n  Known extras: {', '.join((*FACTORS, *DIVISORS))}, final_logit_softcapping"
        )

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
            except RuntimeError as error:  # no kernel for these heads on this device
                if not by_documents or isinstance(error, torch.OutOfMemoryError):
                    raise
                warnings.warn(
                    f"the target attends under masks, which takes longer: its attention by documents fails on this device: {error}",
                    stacklevel=4,
                )
                return None


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.allclose(one, other, rtol=1e-2, atol=1e-2 * float(one.abs().max()))
