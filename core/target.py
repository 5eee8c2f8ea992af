"""The frozen target: what it says of a batch (`Signal`), from its own modules."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .config import check_aux_layers
from .errors import ForedraftError
from .protocols import Batch

# Rows of full-vocabulary logits alive at a time while the teacher's top token and normaliser are taken.
CHUNK = 512


@dataclass(frozen=True)
class Signal:
    """What the target said of a batch. The teacher's rows are those the algorithm's plan asked for, in that order."""

    aux_BSA: Tensor
    """Concatenated hidden states of the aux layers."""
    hidden_BST: Tensor
    """Hidden states after the target's final norm."""
    top_R: Tensor
    """The teacher's most likely token at each of the plan's `teacher_rows`."""
    logsumexp_R: Tensor
    """The normaliser over the full vocabulary at each of the plan's `teacher_rows`, float32."""
    target: "Target"

    def logits(self, hidden_NT: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """The target's logits (soft-cap and scaling included), over the tokens `ids_W` or all, float32."""
        return self.target.head(hidden_NT, ids_W)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the target in a directory or on the hub. Raises `ForedraftError` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ForedraftError(f"the tokenizer of target '{name}' could not be loaded: {error}") from error


def load_target(name: str, dtype: str) -> PreTrainedModel:
    """The target in a directory or on the hub, on the CPU. Raises `ForedraftError` if it is not there."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ForedraftError(f"target '{name}' could not be loaded: {error}") from error


class Target:
    """A causal language model seen by drafts: it captures hidden states and applies its head; it is never trained.

    Raises `ForedraftError` where its head is not understood (final norm and head, applied by hand, must give its own logits).
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]):
        self.model = model.eval().requires_grad_(False)
        self.aux_layers = check_aux_layers(aux_layers, model.config.get_text_config().num_hidden_layers)
        text = model.config.get_text_config()
        self._multiplier = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
        self._soft_cap: float | None = getattr(text, "final_logit_softcapping", None)
        self._check_head()

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers, final norm included."""
        return self.model.get_decoder()

    @property
    def embedding_weight(self) -> Tensor:
        """[V, T]."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[V, T]."""
        return self.model.get_output_embeddings().weight

    @property
    def norm_weight(self) -> Tensor | None:
        """The final norm's weight [T], where it has one."""
        return getattr(getattr(self.decoder, "norm", None), "weight", None)

    def head(self, hidden_NT: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits of post-norm hidden states, over the tokens `ids_W` (ascending) or all, float32."""
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if ids_W is not None and len(ids_W) < len(weight):
            weight, bias = weight[ids_W], None if bias is None else bias[ids_W]
        with torch.autocast(weight.device.type, enabled=False):  # the target keeps its own precision inside a draft's autocast
            logits = F.linear(hidden_NT.to(weight.dtype), weight, bias).float() * self._multiplier
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap

    @torch.no_grad()
    def capture(self, batch: Batch) -> Signal:
        """Run the target over a packed batch; documents do not see each other.

        transformers tells documents apart by positions that restart (no attention mask given); its flash attention does so
        for a single row only, so there the batch becomes one.
        """
        ids_BS, positions_BS = batch["input_ids"], batch["positions"]
        shape = (1, -1) if "flash" in str(self.model.config._attn_implementation) else ids_BS.shape
        with AuxCapture(self.model, self.aux_layers) as captured, torch.autocast(ids_BS.device.type, enabled=False):
            out = self.decoder(input_ids=ids_BS.view(shape), position_ids=positions_BS.view(shape), use_cache=False)
        aux_BSA, hidden_BST = (states.view(*ids_BS.shape, -1) for states in (captured.aux_BSA, out.last_hidden_state))
        return self.signal(aux_BSA, hidden_BST, batch["teacher_rows"])

    @torch.no_grad()
    def signal(self, aux_BSA: Tensor, hidden_BST: Tensor, teacher_rows_R: Tensor) -> Signal:
        """A signal from hidden states; the teacher's rows are indices into the flattened [B·S]."""
        rows_RT = hidden_BST.flatten(0, 1)[teacher_rows_R]
        top, normaliser = [], []
        for chunk_NT in rows_RT.split(CHUNK):
            logits_NV = self.head(chunk_NT)
            top.append(logits_NV.argmax(-1))
            normaliser.append(logits_NV.logsumexp(-1))
        empty = rows_RT.new_empty(0)
        return Signal(
            aux_BSA,
            hidden_BST,
            torch.cat(top) if top else empty.long(),
            torch.cat(normaliser) if normaliser else empty.float(),
            self,
        )

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(1, 5, device=self.model.device)[None] % self.embedding_weight.shape[0]
        with torch.autocast(ids.device.type, enabled=False):
            theirs = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.head(self.decoder(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
            raise ForedraftError(
                f"the head of {type(self.model).__name__} is not understood: final hidden state × head differs from its logits by up to "
                f"{float((ours - theirs).abs().max()):.3g}.\n  Known extras are logit_scale, logits_scaling and final_logit_softcapping"
            )


class AuxCapture:
    """While open, remembers what the aux layers put out in the latest forward.

    By hooks on the decoder layers: transformers' list form of `output_hidden_states` counts layer outputs in 5.18 and
    `hidden_states` entries in 5.23, without a word, and it clashes with a user's own `output_hidden_states=True`.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]):
        layers = model.get_decoder().layers
        self._layers = {i: layers[i - 1] for i in aux_layers}
        self._states: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "AuxCapture":
        for i, layer in self._layers.items():
            self._hooks.append(layer.register_forward_hook(partial(self._keep, i)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def aux_BSA(self) -> Tensor:
        """The concatenated aux states of the latest forward."""
        return torch.cat([self._states[i] for i in self._layers], dim=-1)

    def _keep(self, i: int, module: Any, arguments: Any, output: Any) -> None:
        self._states[i] = output[0] if isinstance(output, tuple) else output
