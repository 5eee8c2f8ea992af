"""Hidden states taken from the target's own modules as it runs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import ForedraftError
from .places import places_of
from .weights import home_of, own_tensors


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


def norm_behind(decoder: nn.Module) -> nn.Module | None:
    """The norm behind the last layer, by its vector of weights; some families have another one behind their embedding."""
    return next((m for m in reversed(list(decoder.children())) if getattr(getattr(m, "weight", None), "ndim", 0) == 1), None)


@torch.no_grad()
def norm_scale(norm: nn.Module) -> Tensor:
    """What a norm multiplies each normed feature by, [D]; asked of the norm itself, since Gemma's keep it less one."""
    weight = own_tensors(norm)["weight"]
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    loud = 4096 * signs  # RMS and deviation are a power of two that drowns epsilon; a mean is 0, a bias drops out below
    return (norm(loud) - norm(-loud)) / 2 * signs


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
