"""`BaseDraft`: a draft model of any family; an adapter adds its norm, MLP, rotary embedding and attention geometry."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..contracts.algorithm import AlgorithmBase
from ..contracts.aux_layers import default_aux_layers
from ..contracts.draft import Batch, HeadParts, KeyValueCache, Layout
from ..contracts.signal import Signal
from ..errors import ForedraftError
from ..files.spellings import TARGET_HEAD
from ..registry import default_registry
from ..target.capture import depth_of
from ..target.places import places_at
from .attention.geometry import Regions
from .attention.kernels import WORDS, kernel_for, ranged_kernel
from .family import Family
from .parts import DraftParts
from .published import NoAssistant


class BaseDraft(DraftParts):
    """One family's draft. An adapter sets the class attributes and, where its attention differs, overrides `make_attention`.

    It is a `PreTrainedModel`: `save_pretrained`, Trainer, DDP and FSDP work as ever; `forward` runs the training loss of its algorithm.
    """

    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # Layers above the first are written under both names that engines read (see Fused.saved).
    _keys_to_ignore_on_load_unexpected = (r"^layers\.[1-9]\d*\.hidden_norm\.weight$",)

    def __init__(self, config: Any, algorithm: AlgorithmBase | None = None):
        super().__init__(config)
        made = config.foredraft
        self.algorithm = algorithm or default_registry().make_algorithm(made["algorithm"], made["options"])
        if self.algorithm.spec != config.spec:  # it was asked for before its target was known
            self.algorithm = type(self.algorithm)(**made["options"])
        self.wiring = self.algorithm.wiring
        self.family = Family.of(config) if config.spec.layers_of else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)  # the target's, see start_from
        for name, module in self.wiring.modules(self).items():
            setattr(self, name, module)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = self.make_rotary()
        for name, module in self.algorithm.modules(self).items():
            setattr(self, name, module)
        self.map_vocabulary()
        if config.spec.target_head:
            self.lm_head.requires_grad_(False)
            self._keys_to_ignore_on_save = self._keys_to_ignore_on_load_missing = [*TARGET_HEAD]
        self.complete = True
        self.kernel = "auto"
        """Of attention in training, by name, see `kernel_for`."""
        self.regions: Regions = None
        """How parts of it are compiled in training, see `compile`."""
        self.places_CBL: Tensor | None = None
        """Where the tokens of the texts at hand are, see `Signal`; None: at their count. Set by whoever runs the target on them."""
        self.post_init()

    # What algorithms are written against.

    @property
    def draft_ids(self) -> Tensor:
        """[W] the target id of each draft id, ascending."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids if (d2t := self._buffers.get("d2t")) is None else ids + d2t

    def embed_input_ids(self, ids_BQ: Tensor) -> Tensor:
        """Token embeddings [B, Q, D]."""
        if not self.complete:
            raise ForedraftError("this draft uses its target's embedding and head, which are not in its file: call draft.take_head(target)")
        return self.embed_tokens(ids_BQ)

    def project_hidden_states(self, aux_BSA: Tensor) -> Tensor:
        """The aux states in the draft's width, [B, S, D], as its wiring has it."""
        return self.wiring.project(self, aux_BSA)

    def backbone(self, embeds_BQD: Tensor, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None = None) -> Tensor:
        """The decoder layers, as the wiring runs them; the state to feed back, [B, Q', D]."""
        return self.wiring.backbone(self, embeds_BQD, context_BSD, layout, cache)

    def rotary(self, like: Tensor, positions_BQ: Tensor) -> Any:
        """The rotary embedding, in `like`'s dtype, of tokens by their count in the text.

        Where the target has them elsewhere, so has the draft, as engines do: in all components if its own RoPE has sections, else in the
        first of them (vLLM 0.32, `_set_positions`).
        """
        rotary: Any = self.rotary_emb
        if self.places_CBL is None:
            sections = getattr(rotary, "mrope_section", ())  # transformers' own takes all components, some of its versions nothing else
            return rotary(like, positions_BQ.expand(len(sections), *positions_BQ.shape) if sections else positions_BQ)
        places_CBQ = places_at(self.places_CBL.to(positions_BQ.device), positions_BQ)
        return rotary(like, places_CBQ if rotary.config.rope_parameters.get("mrope_section") else places_CBQ[0])

    def compute_logits(self, hidden_BQD: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [B, Q, W]; states may carry what the algorithm's `rider` reads, [B, Q, D + r]."""
        state_BQD, carried_BQr = hidden_BQD.tensor_split([self.config.hidden_size], dim=-1)
        logits_BQW = self.lm_head(self.wiring.head_input(self, state_BQD))
        rider = self.algorithm.rider(self) if carried_BQr.shape[-1] else None
        return logits_BQW if rider is None else logits_BQW + rider(carried_BQr)

    def head_parameters(self) -> list[Tensor]:
        """The trained parameters that `compute_logits` reads."""
        modules = [*self.wiring.head_modules(self), self.lm_head, self.algorithm.rider(self)]
        return [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]

    def head_parts(self) -> HeadParts | None:
        """The wiring's `head_input`, `lm_head` and the rider, unless a subclass computes logits otherwise or one was replaced (LoRA)."""
        rider, plain = self.algorithm.rider(self), (nn.Linear, type(None))
        ours = type(self).compute_logits is BaseDraft.compute_logits and type(self.lm_head) is nn.Linear and type(rider) in plain
        return (partial(self.wiring.head_input, self), self.lm_head, rider) if ours else None

    def attention_kernel(self, device: torch.device, dtype: torch.dtype) -> str:
        """By which kernel its attention is trained on `device` in `dtype`, and what that is; nothing where it has no attention of ours.

        Raises `ForedraftError` for one that was asked for and does not run there.
        """
        dims: list[int] = [dim for module in self.modules() if isinstance(dim := getattr(module, "head_dim", None), int)]
        name = (ranged_kernel if self.algorithm.by_ranges else kernel_for)(device, dtype, max(dims, default=0), self.kernel)
        return f"{name}, {WORDS[name]}" if dims else ""

    @classmethod
    def aux_layers(cls, target_config: PretrainedConfig, count: int) -> tuple[int, ...]:
        """The target layers a draft reads by default, as HF `hidden_states` indices."""
        return default_aux_layers(depth_of(target_config), count)

    def forward(self, batch: Batch, signal: Signal) -> dict[str, Any]:
        """The training step, inside the module so that DDP and FSDP wrap it: `{"loss", "metrics"}`."""
        self.places_CBL = signal.places_CBS
        try:
            step = self.algorithm.loss(self, batch, signal)
        finally:
            self.places_CBL = None
        return {"loss": step.loss, "metrics": step.metrics}

    def compile(self, **options: Any) -> None:
        """Compile, for training, what lies between its products: norms, rotation, the merge of attention.

        `options` are `torch.compile`'s. Lengths and batches may vary. What is kept for the backward pass stays the same. Compiled whole, a
        draft would be cut at every kernel, and at its loss.
        """
        regions = cache(partial(torch.compile, **{"dynamic": True, **options}))
        for module in self.modules():
            if hasattr(module, "regions"):
                module.regions = regions  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BaseDraft":
        """`to(bfloat16)` and the like; the rotary frequencies stay float32, as `from_pretrained(dtype=...)` leaves them."""
        super()._apply(fn, recurse)
        coarse = [b for b in self.rotary_emb.buffers() if b.is_floating_point() and b.dtype != torch.float32]
        if coarse:
            self.rotary_emb = self.make_rotary().to(coarse[0].device)
        return self

    def __getattr__(self, name: str) -> Any:
        """As ever; transformers asks a model given as `assistant_model` for its generation settings, and is told what a draft is."""
        if name == "generation_config":
            raise NoAssistant(
                "a draft reads its target's hidden states, so it is no `assistant_model`: use foredraft.generate(target, draft, ids), or "
                "target.generate(ids, custom_generate=DIRECTORY_OF_THE_DRAFT, trust_remote_code=True)"
            )
        return super().__getattr__(name)
