"""The frozen target: what it says of a batch (`Signal`), from its own modules."""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import find_adapter_config_file

from .config import check_aux_layers
from .data import with_template
from .errors import ForedraftError
from .loading import PLAIN, Loading, Rendering, Repository
from .protocols import Batch
from .registry import default_registry

# Rows of full-vocabulary logits alive at a time while the teacher's top token and normaliser are taken.
CHUNK = 512
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
# Config fields that a family divides its logits by.
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


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


def load_config(name: str, loading: Repository = PLAIN) -> PretrainedConfig:
    """The config of the target (or draft) in a directory or on the hub. Raises `ForedraftError` if there is none."""
    default_registry()  # a plugin may bring the classes of its targets
    try:
        _check_there(name)
        config = AutoConfig.from_pretrained(name, **loading.source)
        model = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if loading.trust_remote_code and model:  # AutoModel registers it as it loads; drafts are planned before that
            cls = get_class_from_dynamic_module(model, name, **{"revision": loading.revision} if loading.revision else {})
            AutoModelForCausalLM.register(type(config), cls, exist_ok=True)
    except (OSError, ValueError, ImportError) as error:
        raise ForedraftError(f"no target or draft at '{name}': {_base_of(name, loading) or error}") from error
    return config


def load_tokenizer(name: str, loading: Loading = PLAIN) -> PreTrainedTokenizerBase:
    """The tokenizer of the target in a directory or on the hub. Raises `ForedraftError` if there is none."""
    default_registry()
    try:
        _check_there(name)
        tokenizer = AutoTokenizer.from_pretrained(name, **loading.source)
    except (OSError, ValueError, ImportError) as error:
        raise ForedraftError(f"the tokenizer of target '{name}' could not be loaded: {error}") from error
    return with_template(tokenizer, loading.chat_template, loading.template_kwargs) if isinstance(loading, Rendering) else tokenizer


def load_target(name: str, dtype: str, loading: Loading = PLAIN) -> PreTrainedModel:
    """The target in a directory or on the hub, on the CPU unless a device map says where. Raises `ForedraftError` if it is not there."""
    load_config(name, loading)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **loading.model)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ForedraftError(f"target '{name}' could not be loaded: {error}") from error
    if loading.device_map is not None and not hasattr(model, "hf_device_map"):  # transformers notes a map of several devices alone
        model.hf_device_map = {"": model.device}
    return model


def place(model: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    """`model` on `device`, unless a device map has put its parts where they belong."""
    return model if hasattr(model, "hf_device_map") else model.to(device)


def _check_there(name: str) -> None:
    """Raises `OSError` for what can only be a directory and is none: the hub need not be asked, and would only confuse."""
    if not Path(name).is_dir() and (Path(name).exists() or not HUB_ID.fullmatch(name)):
        raise NotADirectoryError("it is a file, a directory is expected" if Path(name).exists() else "no such directory")


def _base_of(name: str, loading: Repository) -> str | None:
    """What to do about weights that peft wrote for another model; None if there is no such thing at `name`."""
    try:
        file = find_adapter_config_file(name, **{"revision": loading.revision} if loading.revision else {})
        base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path") if file else None
    except (OSError, ValueError, AttributeError):
        return None
    if not file:
        return None
    return (
        f"it is a LoRA adapter for {base or 'a model that it does not name'}, no model of its own: merge them, and name what comes out\n"
        f"  AutoPeftModelForCausalLM.from_pretrained('{name}').merge_and_unload().save_pretrained('merged'), and the tokenizer beside it"
    )


class Target:
    """A causal language model seen by drafts: it captures hidden states and applies its head; it is never trained.

    Raises `ForedraftError` where its layers are not found, or its head is not understood (final norm and head, applied by
    hand, must give its own logits).
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]):
        self.model = model.eval().requires_grad_(False)
        self.aux_layers = check_aux_layers(aux_layers, model.config.get_text_config().num_hidden_layers)
        text = model.config.get_text_config()
        self._multiplier = getattr(text, "logit_scale", None) or 1.0
        for divisor in DIVISORS:
            self._multiplier /= getattr(text, divisor, None) or 1.0
        self._soft_cap: float | None = getattr(text, "final_logit_softcapping", None)
        self._check_head()
        self._packs = self._keeps_documents_apart()

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers, final norm included."""
        return decoder_of(self.model)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, T]."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[V, T]."""
        return self.model.get_output_embeddings().weight

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return decoder_layers(self.model)

    @property
    def norm_weight(self) -> Tensor | None:
        """What the final norm multiplies each feature by, [T], where it has a weight."""
        norms = [m for m in self.decoder.children() if getattr(getattr(m, "weight", None), "ndim", 0) == 1]
        return norm_scale(norms[-1]) if norms else None  # the last one: some have another behind their embedding

    def head(self, hidden_NT: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits of post-norm hidden states, over the tokens `ids_W` (ascending) or all, float32."""
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if ids_W is not None and len(ids_W) < len(weight):
            ids_W = ids_W.to(weight.device)
            weight, bias = weight[ids_W], None if bias is None else bias[ids_W]
        with torch.autocast(weight.device.type, enabled=False):  # the target keeps its own precision inside a draft's autocast
            logits = F.linear(hidden_NT.to(weight.device, weight.dtype), weight, bias).to(hidden_NT.device).float() * self._multiplier
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap

    @torch.no_grad()
    def capture(self, batch: Batch) -> Signal:
        """Run the target over a packed batch; documents do not see each other.

        transformers tells documents apart by positions that restart (no attention mask given); its flash attention does so
        for a single row only, so there the batch becomes one. Families that don't (ALiBi, recurrent layers) see a document a row.
        What it says comes back to the batch's device, wherever its own parts are.
        """
        device = self.model.device
        ids_BS, positions_BS = batch["input_ids"].to(device), batch["positions"].to(device)
        with AuxCapture(self.model, self.aux_layers) as captured, torch.autocast(ids_BS.device.type, enabled=False):
            if self._packs:
                shape = (1, -1) if "flash" in str(self.model.config._attn_implementation) else ids_BS.shape
                out = self.decoder(input_ids=ids_BS.view(shape), position_ids=positions_BS.view(shape), use_cache=False)
                states = captured.aux_BSA, out.last_hidden_state
            else:
                # Padded behind: nothing looks ahead, so no mask is needed.
                number, offset = (positions_BS == 0).flatten().cumsum(0) - 1, positions_BS.flatten()
                ids_NL = ids_BS.new_zeros(int(number[-1]) + 1, int(offset.max()) + 1)
                ids_NL[number, offset] = ids_BS.flatten()
                out = self.decoder(input_ids=ids_NL, use_cache=False)
                states = captured.aux_BSA[number, offset], out.last_hidden_state[number, offset]
        aux_BSA, hidden_BST = (s.view(*ids_BS.shape, -1).to(batch["input_ids"].device) for s in states)
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
        if self.embedding_weight.is_meta or self.head_weight.is_meta:
            raise ForedraftError(
                "the target's embedding or head is offloaded, and drafts read both: keep them on a device, by device_map or more memory"
            )
        ids = torch.arange(1, 5, device=self.model.device)[None] % self.embedding_weight.shape[0]
        with torch.autocast(ids.device.type, enabled=False):
            theirs = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.head(self.decoder(input_ids=ids, use_cache=False).last_hidden_state).to(theirs.device)
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
            raise ForedraftError(
                f"the head of {type(self.model).__name__} is not understood: final hidden state × head differs from its logits by up to "
                f"{float((ours - theirs).abs().max()):.3g}.\n  Known extras: logit_scale, {', '.join(DIVISORS)}, final_logit_softcapping"
            )

    @torch.no_grad()
    def _keeps_documents_apart(self) -> bool:
        """Whether positions that restart start a document: a document that comes twice then gets the same states twice."""
        ids_12 = torch.arange(1, 5, device=self.model.device).repeat(2)[None] % self.embedding_weight.shape[0]
        positions_12 = torch.arange(4, device=ids_12.device).repeat(2)[None]
        try:
            with torch.autocast(ids_12.device.type, enabled=False):
                states = self.decoder(input_ids=ids_12, position_ids=positions_12, use_cache=False).last_hidden_state[0].float()
        except TypeError:  # it takes no positions
            return False
        return torch.allclose(states[:4], states[4:], rtol=1e-2, atol=1e-2 * float(states.abs().max()))


def decoder_of(model: PreTrainedModel) -> Any:
    """The stack of decoder layers, embedding and final norm included, without the head."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder  # Llama 4's text model is named as if it were multimodal


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a target, whatever its family calls them. Raises `ForedraftError` if it has no such list."""
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ForedraftError(f"{type(model).__name__} has no list of its {count} decoder layers: its hidden states cannot be captured")


@torch.no_grad()
def norm_scale(norm: nn.Module) -> Tensor:
    """What a norm multiplies each normed feature by, [D]; asked of the norm itself, since Gemma's keep it less one."""
    weight: Any = norm.weight
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    loud = 4096 * signs  # RMS and deviation are a power of two that drowns epsilon; a mean is 0, a bias drops out below
    return (norm(loud) - norm(-loud)) / 2 * signs


class AuxCapture:
    """While open, remembers what the aux layers put out in the latest forward.

    By hooks on the decoder layers: transformers' list form of `output_hidden_states` counts layer outputs in 5.18 and
    `hidden_states` entries in 5.23, without a word, and it clashes with a user's own `output_hidden_states=True`.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]):
        layers = decoder_layers(model)
        self._device = model.device
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
        """The concatenated aux states of the latest forward, on the device that the model reads its ids on."""
        return torch.cat([self._states[i].to(self._device) for i in self._layers], dim=-1)

    def _keep(self, i: int, module: Any, arguments: Any, output: Any) -> None:
        self._states[i] = output[0] if isinstance(output, tuple | list) else output
