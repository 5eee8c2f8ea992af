"""While a draft is trained, what is frozen in it and equal to its target's is its target's: one table on the device, not two."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from ..target.weights import is_plain


class Borrow(TrainerCallback):
    """Puts the target's embedding and head in place of the draft's copies, once a checkpoint is loaded into these.

    They must be frozen, on one device and of the same values; in the draft's own dtype, or in the one that `products` are taken in
    (autocast), which they would be cast to. Copies come back by `give_back`, so that whatever is done to the draft later stays its own.
    """

    def __init__(self, target: PreTrainedModel, products: torch.dtype | None):
        self._theirs = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        self._products = products
        self._lent: dict[str, tuple[Any, torch.dtype, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """After the checkpoint is loaded."""
        for name, theirs in self._theirs.items():
            module, weight = getattr(model, name), getattr(theirs, "weight", None)
            if weight is not None and self._may_stand_for(weight, module.weight):
                dtype = module.weight.dtype
                hook = (
                    module.register_forward_hook(lambda module, given, out, dtype=dtype: out.to(dtype)) if name == "embed_tokens" else None
                )
                self._lent[name] = module, dtype, hook
                module.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def _may_stand_for(self, theirs: Tensor, own: Tensor) -> bool:
        there = is_plain(theirs) and not own.requires_grad and theirs.device == own.device and theirs.shape == own.shape
        return there and theirs.dtype in (own.dtype, self._products) and torch.equal(theirs.to(own.dtype), own)

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the draft with what is borrowed in the draft's dtype, as it is saved."""
        lent = {f"{name}.weight": dtype for name, (_, dtype, _) in self._lent.items()}
        return {name: t.to(lent[name]) if name in lent and t is not None else t for name, t in state.items()}

    def give_back(self) -> None:
        """The draft has copies again."""
        for module, dtype, hook in self._lent.values():
            module.weight = nn.Parameter(module.weight.detach().to(dtype, copy=True), requires_grad=False)
            if hook is not None:
                hook.remove()
        self._lent.clear()
