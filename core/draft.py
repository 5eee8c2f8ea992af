"""`BaseDraft`: a draft model of any family; an adapter adds its norm, MLP, rotary embedding and attention geometry."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from .attention import GroupedQueryAttention, take_rows
from .attention.geometry import Rotary
from .config import DraftConfigMixin, aux_layer_fields, check_aux_layers, default_aux_layers, describe_target, versions
from .errors import ForedraftError
from .protocols import AlgorithmBase, Batch, KeyValueCache, Layout, Pattern
from .target import Signal, Target
from .vocabulary import choose_vocabulary, count_tokens


class BaseDraft(PreTrainedModel):
    """One family's draft. An adapter sets the class attributes and, where its attention differs, overrides `make_attention`.

    It is a `PreTrainedModel`: `save_pretrained`, Trainer, DDP and FSDP work as ever; `forward` runs the training loss of its algorithm.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]]
    """The targets' `model_type`s this adapter drafts for."""
    architecture: ClassVar[str]
    """The name engines know this draft by."""
    norm_class: ClassVar[type[nn.Module]]
    mlp_class: ClassVar[type[nn.Module]]
    rotary_class: ClassVar[type[nn.Module]]

    base_model_prefix = ""
    main_input_name = "input_ids"
    # Layers above the first are written under both names that engines read (see save_pretrained).
    _keys_to_ignore_on_load_unexpected = (r"^layers\.[1-9]\d*\.hidden_norm\.weight$",)

    def __init__(self, config: Any, algorithm: AlgorithmBase | None = None):
        super().__init__(config)
        self.algorithm = algorithm
        width, chunk = config.hidden_size, config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width).requires_grad_(False)  # the target's, see start_from
        self.fc = nn.Linear(config.num_aux_hidden_states * chunk, width, bias=False)
        self.fc_norm = nn.ModuleList(self.make_norm(chunk) for _ in range(config.num_aux_hidden_states if config.fc_norm else 0))
        self.layers: Any = nn.ModuleList(DraftLayer(self, i) for i in range(config.num_hidden_layers))
        self.norm: Any = self.make_norm(width)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary_emb = self.rotary_class(config)
        if config.has_reduced_vocabulary:
            # The lowest ids, until set_draft_vocabulary says which.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.post_init()

    # What algorithms are written against.

    def embed_input_ids(self, ids_BQ: Tensor) -> Tensor:
        """Token embeddings [B, Q, D]."""
        return self.embed_tokens(ids_BQ)

    def project_hidden_states(self, aux_BSA: Tensor) -> Tensor:
        """fc over the concatenated aux states, each chunk normed first where the spec asks for `fc_norm`; [B, S, D]."""
        aux_BSA = aux_BSA.to(self.fc.weight.dtype)
        if self.fc_norm:
            chunks = aux_BSA.chunk(len(self.fc_norm), dim=-1)
            aux_BSA = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux_BSA)

    def backbone(self, embeds_BQD: Tensor, context_BQD: Tensor, layout: Layout, cache: KeyValueCache | None = None) -> Tensor:
        """The decoder layers; the state to feed back, [B, Q', D] (normed where the spec asks for `norm_output`)."""
        rotary: Rotary = self.rotary_emb(context_BQD, layout.positions)
        hidden_BQD = context_BQD
        for i, layer in enumerate(self.layers):
            last = i == len(self.layers) - 1  # the layers below it work on every input: the next one needs its keys and values
            pattern, rows = (layout.pattern, layout.rows) if last else (layout.below or layout.pattern, None)
            hidden_BQD = layer(embeds_BQD if i == 0 else None, hidden_BQD, rotary, pattern, cache, rows)
        return self.norm(hidden_BQD) if self.config.norm_output else hidden_BQD

    def compute_logits(self, hidden_BQD: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [B, Q, W]."""
        return self.lm_head(hidden_BQD if self.config.norm_output else self.norm(hidden_BQD))

    def head_parameters(self) -> list[Tensor]:
        """The trained parameters that `compute_logits` reads."""
        modules = (self.lm_head,) if self.config.norm_output else (self.norm, self.lm_head)
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    @classmethod
    def aux_layers(cls, target_config: PretrainedConfig, count: int) -> tuple[int, ...]:
        """The target layers a draft reads by default, as HF `hidden_states` indices."""
        return default_aux_layers(target_config.get_text_config().num_hidden_layers, count)

    def forward(self, batch: Batch, signal: Signal, counts: Tensor) -> dict[str, Any]:
        """The training step, inside the module so that DDP and FSDP wrap it: `{"loss", "metrics"}`."""
        if self.algorithm is None:
            raise ForedraftError("this draft has no algorithm to train with: build it with auto_draft(...)")
        step = self.algorithm.loss(self, batch, signal, counts)
        return {"loss": step.loss, "metrics": step.metrics}

    # What an adapter may change.

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """The native config fields of a draft for `target` (its text config): what is not derived from the algorithm."""
        raise NotImplementedError(f"adapter '{cls.name}' must state its draft's shape: def shape(cls, target) -> dict")

    def make_attention(self, layer: int, input_size: int) -> nn.Module:
        """The attention geometry of a layer."""
        return GroupedQueryAttention(self.config, layer, input_size)

    def make_mlp(self, layer: int) -> nn.Module:
        """The feed-forward module of a layer."""
        return self.mlp_class(self.config)

    def make_norm(self, size: int) -> nn.Module:
        """A norm over `size` features."""
        return self.norm_class(size, eps=self.config.rms_norm_eps)

    # Building.

    @classmethod
    def make_config(
        cls,
        target: PretrainedConfig,
        algorithm: AlgorithmBase,
        aux_layers: tuple[int, ...] | None = None,
        draft_vocab_size: int | None = None,
    ) -> Any:
        """The draft's config for a target's config. Raises `ForedraftError` where layers or vocabulary do not fit."""
        text, spec = target.get_text_config(), algorithm.spec
        layers = aux_layers if aux_layers is not None else cls.aux_layers(target, spec.num_aux)
        check_aux_layers(layers, text.num_hidden_layers)
        if len(layers) != spec.num_aux:
            raise ForedraftError(f"aux_layers={list(layers)} are {len(layers)} layers, but num_aux={spec.num_aux}: make them agree")
        size = draft_vocab_size or text.vocab_size
        if not 1 <= size <= text.vocab_size:
            raise ForedraftError(
                f"draft_vocab_size={size} does not fit the target's vocabulary of {text.vocab_size}: choose 1 to {text.vocab_size}"
            )
        return cls.config_class(
            **cls.shape(text),
            **aux_layer_fields(layers),
            num_hidden_layers=spec.num_layers,
            vocab_size=text.vocab_size,
            draft_vocab_size=size,
            target_hidden_size=text.hidden_size,
            tie_word_embeddings=False,
            fc_norm=spec.fc_norm,
            norm_output=spec.norm_output,
            foredraft={
                "algorithm": algorithm.name,
                "options": algorithm.options.model_dump(mode="json"),
                "adapter": cls.name,
                "architecture": cls.architecture,
                "spec": spec.model_dump(mode="json"),
                "target": describe_target(target),
                "versions": versions(),
            },
        )

    @torch.no_grad()
    def start_from(self, target: Target | PreTrainedModel, rows: Iterable[dict[str, Any]] | None = None) -> None:
        """Start near the target: its embedding (frozen), head and final norm, its last layers, and fc passing the last aux state.

        The fresh draft then is the target's last layers on its last aux state; what it must learn is to look at the next
        token. Parameters whose counterpart has another name or shape keep their random start. With packed training `rows`, a
        reduced draft vocabulary becomes the tokens they supervise most often; without, set it before.

        Raises `ForedraftError` if the target's width is not the draft's.
        """
        if not isinstance(target, Target):
            target = Target(target, self.config.aux_layers)
        if target.embedding_weight.shape != self.embed_tokens.weight.shape:
            raise ForedraftError(
                f"the target's embedding is {tuple(target.embedding_weight.shape)}, the draft's {tuple(self.embed_tokens.weight.shape)}: "
                "a draft takes over its target's embedding, so they must agree"
            )
        if rows is not None and self.config.has_reduced_vocabulary:
            counts_V = count_tokens(rows, self.config.vocab_size)
            self.set_draft_vocabulary(choose_vocabulary(counts_V, self.config.draft_vocab_size))
        self.embed_tokens.weight.copy_(target.embedding_weight)
        self.lm_head.weight.copy_(target.head_weight[self.draft_ids.to(target.head_weight.device)])
        if target.norm_weight is not None:
            self.norm.weight.copy_(target.norm_weight)
        width = self.config.hidden_size
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += torch.eye(width, dtype=self.fc.weight.dtype, device=self.fc.weight.device)
        for layer, source in zip(reversed(self.layers), reversed(target.decoder.layers), strict=False):
            layer.start_from(source)

    @property
    def draft_ids(self) -> Tensor:
        """[W] the target id of each draft id, ascending."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids + self.d2t if self.config.has_reduced_vocabulary else ids

    def set_draft_vocabulary(self, ids_W: Tensor) -> None:
        """Let draft id j stand for target id `ids_W[j]`. Raises `ForedraftError` unless they are W distinct, ascending target ids."""
        config: DraftConfigMixin = self.config
        ids_W = ids_W.to(self.lm_head.weight.device)
        if not config.has_reduced_vocabulary:
            return
        in_range = len(ids_W) == config.draft_vocab_size and bool((ids_W[1:] > ids_W[:-1]).all())
        if not in_range or int(ids_W[0]) < 0 or int(ids_W[-1]) >= self.config.vocab_size:
            raise ForedraftError(
                f"a draft vocabulary of {config.draft_vocab_size} distinct ascending ids below {self.config.vocab_size} is needed, "
                f"found {len(ids_W)} ids"
            )
        self.d2t.copy_(ids_W - torch.arange(len(ids_W), device=ids_W.device))
        self.t2d.zero_()
        self.t2d[ids_W] = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BaseDraft":
        """`to(bfloat16)` and the like; the rotary frequencies stay float32, as `from_pretrained(dtype=...)` leaves them."""
        super()._apply(fn, recurse)
        coarse = [b for b in self.rotary_emb.buffers() if b.is_floating_point() and b.dtype != torch.float32]
        if coarse:
            self.rotary_emb = self.rotary_class(self.config).to(coarse[0].device)
        return self

    def save_pretrained(
        self, save_directory: str | Path, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """As ever; layers above the first carry their norm under both names that engines read (`input_layernorm`, `hidden_norm`)."""
        state = dict(state_dict if state_dict is not None else self.state_dict())
        for i in range(1, len(self.layers)):
            state[f"layers.{i}.hidden_norm.weight"] = state[f"layers.{i}.input_layernorm.weight"].clone()
        super().save_pretrained(save_directory, *args, state_dict=state, **kwargs)


class DraftLayer(nn.Module):
    """A decoder layer; the first reads embedding and context side by side, each under its own norm (EAGLE-3, figure 5)."""

    def __init__(self, draft: BaseDraft, layer: int):
        super().__init__()
        width = draft.config.hidden_size
        self.input_layernorm = draft.make_norm(width)
        if layer == 0:
            self.hidden_norm = draft.make_norm(width)
        self.self_attn = draft.make_attention(layer, 2 * width if layer == 0 else width)
        self.post_attention_layernorm = draft.make_norm(width)
        self.mlp = draft.make_mlp(layer)

    def start_from(self, source: nn.Module) -> None:
        """Copy a target's layer; in the first layer its input is the context half, and the embedding's half stays random."""
        theirs = dict(source.named_parameters())
        first = hasattr(self, "hidden_norm")
        for name, mine in self.named_parameters():
            if first and name.startswith("input_layernorm."):
                continue
            other = theirs.get(name.replace("hidden_norm.", "input_layernorm."))
            if other is not None and other.shape == mine.shape:
                mine.copy_(other)
            elif other is not None and mine.shape == (other.shape[0], 2 * other.shape[-1]):
                mine[:, other.shape[-1] :] = other

    def forward(
        self,
        embeds_BQD: Tensor | None,
        hidden_BQD: Tensor,
        rotary: Rotary,
        pattern: Pattern,
        cache: KeyValueCache | None,
        rows: Tensor | None,
    ) -> Tensor:
        """The layer's output at the inputs `rows`, [B, Q', D]."""
        if embeds_BQD is not None:
            x = torch.cat([self.input_layernorm(embeds_BQD), self.hidden_norm(hidden_BQD)], dim=-1)
        else:
            x = self.input_layernorm(hidden_BQD)
        hidden_BQD = take_rows(hidden_BQD, rows) + self.self_attn(x, rotary, pattern, cache, rows)
        return hidden_BQD + self.mlp(self.post_attention_layernorm(hidden_BQD))
