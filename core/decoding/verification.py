"""Decoding with draft trees: a loop of its own inside `target.generate` (transformers' assisted loop verifies chains only)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..target.capture import AuxCapture
from .candidates import drafter_of, processed
from .stats import DraftingStats
from .tree import DraftTree, TreeDrafter, TreeShape


class TreeDecoding:
    """A `custom_generate` for `target.generate`, which prepares settings, processors, criteria and cache as ever; one generation each.

    At every token the target's own choice (argmax, or a sample) is taken, and followed down the tree while a child has it. For
    sampling that is exact, and the same as offering the children one by one: each is a point mass, so it is accepted with its
    probability in what remains of the target's distribution, and a refusal leaves the distribution without it. Random numbers
    are drawn once per token of the text, as without a draft: the same seed gives the same sample.
    """

    def __init__(self, draft: BaseDraft, captured: AuxCapture, shape: TreeShape, stats: DraftingStats, streamer: BaseStreamer | None):
        drafter = drafter_of(draft)
        if not isinstance(drafter, TreeDrafter):
            raise ForedraftError(f"drafts by algorithm '{draft.config.foredraft['algorithm']}' grow no trees: leave tree out, for a chain")
        self.drafter: TreeDrafter = drafter
        self.draft, self.captured, self.shape, self.stats, self.streamer = draft, captured, shape, stats, streamer
        self.draft_ids = draft.draft_ids

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decode `input_ids` [1, L]; returns what the settings ask for."""
        check_tree_decoding(model, generation_config, model_kwargs.get("past_key_values"))
        self.processors, self.criteria, self.config = logits_processor, stopping_criteria, generation_config
        self.ids = input_ids
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.hidden: list[tuple[Tensor, ...]] = []
        cache, mask, positions = model_kwargs["past_key_values"], model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        # transformers hides padding ids in the prompt, unless told otherwise: hidden they stay, and positions count the others.
        self.hides = [] if mask is None else (mask[0] == 0).nonzero().flatten().tolist()
        self.shift = 0 if positions is None else int(positions[0, -1]) + 1 - input_ids.shape[1]
        tree, past, depth = DraftTree([], []), 0, 0
        outputs = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs))
        aux_1NA = self.captured.aux_BSA
        while True:
            rows, finished = self._follow(tree, outputs, whole=past == 0)
            if past:
                keep_rows(cache, past, rows)
                self.stats.add(depth, len(rows) - 1)
                aux_1NA = self.captured.aux_BSA[:, rows]
            if finished:
                break
            past = cache.get_seq_length()
            depth = max(0, min(self.shape.depth, generation_config.max_length - self.ids.shape[1] - 1))
            tree = self._propose(aux_1NA, depth)
            outputs = self._verify(model, cache, tree, past)
        if self.streamer is not None:
            self.streamer.end()
        if not generation_config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=tuple(self.scores) if generation_config.output_scores else None,
            logits=tuple(self.logits) if generation_config.output_logits else None,
            hidden_states=tuple(self.hidden) if generation_config.output_hidden_states else None,
            past_key_values=cache,
        )

    def _propose(self, aux_1NA: Tensor, depth: int) -> DraftTree:
        if depth == 0:
            return DraftTree([], [])
        shape = self.shape.model_copy(update={"depth": depth})
        return self.drafter.propose_tree(self.ids[0].to(self.draft.device), aux_1NA.to(self.draft.device), shape, self._rank)

    def _rank(self, logits_NW: Tensor, drafted_NK: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Rank`."""
        ids_W = self.draft_ids
        if self.processors:
            text_NL = torch.cat([self.ids.to(drafted_NK.device).expand(len(drafted_NK), -1), drafted_NK], dim=1)
            # One by one: processors may tell the sequences of a batch apart, and these are all the first.
            rows = zip(text_NL, logits_NW, strict=True)
            logits_NW = torch.stack([processed(self.processors, ids, z, ids_W, self.draft.config.vocab_size)[ids_W] for ids, z in rows])
        log_p_NW = logits_NW.float().log_softmax(-1)
        log_p_NW = log_p_NW.masked_fill(log_p_NW.isnan(), float("-inf"))  # where nothing is allowed
        log_p_Nk, best_Nk = log_p_NW.topk(min(count, len(ids_W)))
        return ids_W[best_Nk], log_p_Nk

    def _verify(self, model: PreTrainedModel, cache: DynamicCache, tree: DraftTree, past: int) -> Any:
        """The target's forward over the newest token and the tree: [1, N + 1] rows behind `past` cached ones."""
        tokens = torch.tensor([tree.tokens], dtype=self.ids.dtype, device=self.ids.device)
        # Additive: eager attention adds the mask to its scores, SDPA takes either form.
        mask = torch.zeros(1, 1, len(tree.visible), past + len(tree.visible), dtype=model.dtype, device=self.ids.device)
        mask[..., past:].masked_fill_(~tree.visible.to(mask.device), torch.finfo(mask.dtype).min)
        mask[..., self.hides] = torch.finfo(mask.dtype).min
        return model(
            input_ids=torch.cat([self.ids[:, -1:], tokens], dim=1),
            attention_mask=mask,
            position_ids=past + self.shift + tree.depths.to(self.ids.device)[None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=self.config.output_hidden_states,
        )

    def _follow(self, tree: DraftTree, outputs: Any, whole: bool) -> tuple[list[int], bool]:
        """Emit the target's tokens down the tree, one after each of the rows returned; whether the text is finished.

        `whole`: the forward read the prompt, and the root is its last row.
        """
        logits_1NV = outputs.logits[:, -1 - len(tree.tokens) :].to(torch.float32, copy=True)
        row: int | None = 0
        rows: list[int] = []
        finished = False
        while row is not None and not finished:
            rows.append(row)
            scores_1V = self.processors(self.ids, logits_1NV[:, row].clone())
            token = torch.multinomial(scores_1V.softmax(-1), 1) if self.config.do_sample else scores_1V.argmax(-1, keepdim=True)
            self.ids = torch.cat([self.ids, token], dim=1)
            if self.streamer is not None:
                self.streamer.put(token[0].cpu())
            if self.config.return_dict_in_generate:
                self.scores += [scores_1V] if self.config.output_scores else []
                self.logits += [logits_1NV[:, row]] if self.config.output_logits else []
                if self.config.output_hidden_states:
                    self.hidden.append(tuple(h if whole else h[:, row : row + 1] for h in outputs.hidden_states))
            finished = bool(self.criteria(self.ids, tuple(self.scores) or None).all())
            row = tree.children.get((row, int(token)))
        return rows, finished


def check_tree_decoding(model: PreTrainedModel, config: GenerationConfig, cache: Any) -> None:
    """Raises `ForedraftError` that names every reason why a tree cannot be verified here."""
    text = model.config.get_text_config(decoder=True)
    attention, reasons = text._attn_implementation, []
    if attention not in ("eager", "sdpa"):
        reasons.append(f"its attention is '{attention}', which takes no mask of a tree: load it with attn_implementation='sdpa'")
    # A cache of the user's own may not show what the target needs.
    layers = [*DynamicCache(config=text).layers, *(cache.layers if cache is not None else [])]
    if other := sorted({type(layer).__name__ for layer in layers} - {DynamicLayer.__name__}):
        reasons.append(f"it keeps states in {', '.join(other)}: branches of a tree need layers that keep every token apart")
    if cache is None:
        reasons.append("use_cache=False: a tree is verified against the cache of the text before it")
    if config.return_dict_in_generate and config.output_attentions:
        reasons.append("output_attentions: attention over a tree is not attention over its text")
    if reasons:
        raise ForedraftError(
            f"{type(model).__name__} cannot verify a tree:\n  " + "\n  ".join(reasons) + "\n  Or leave tree out, for a chain"
        )


def keep_rows(cache: DynamicCache, past: int, rows: Sequence[int]) -> None:
    """Of what the cache holds behind the first `past` tokens, keep these ascending `rows`."""
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            states[..., past : past + len(rows), :] = states[..., [past + row for row in rows], :]
    cache.crop(past + len(rows) - cache.get_seq_length())
