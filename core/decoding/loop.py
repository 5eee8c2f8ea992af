"""The decoding loop: what a drafter proposes (a chain, a block or a tree) is verified in one pass of the target."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..contracts.algorithm import DrafterBase
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..target.capture import AuxCapture
from .checks import check_target
from .drafters import AskedFirst, Recent
from .states import MOST_REPLAYED, TextCache
from .tree import DraftTree, Lossy, TreeDrafter, TreeShape, choose_token, grouped_attention


class DecodingLoop:
    """A `custom_generate` for `target.generate`, which prepares settings, processors, criteria and cache as ever; one generation each.

    At every token the target's own choice (argmax, or a sample) is taken, and followed down what was drafted while a child has it.
    For sampling that is exact, and the same as offering the children one by one, as each is a point mass: it is accepted with its
    probability in what remains of the target's distribution, and a refusal leaves the distribution without it. Random numbers
    are drawn once per token of the text, as without a draft: the same seed gives the same sample. Tokens of a chain that were
    themselves sampled, from q, are accepted with probability min(1, p / q), or else replaced by a sample of max(p - q, 0)
    (arXiv:2211.17192, algorithm 1). A `Lossy` rule accepts more, and none of this holds any longer.
    """

    def __init__(
        self,
        algorithm: DrafterBase,
        draft: BaseDraft | None,
        num_tokens: int,
        tree: TreeShape | None,
        stats: "DraftingStats",
        streamer: BaseStreamer | None,
        min_confidence: float = 0.0,
        lossy: Lossy | None = None,
        min_acceptance: float = 0.0,
        first: DrafterBase | None = None,
    ):
        if not 0 <= min_confidence < 1:
            raise ForedraftError(f"min_confidence={min_confidence}: a probability from 0 (drafts are as long as asked for) to below 1")
        self.drafter: Any = algorithm.drafter(draft)
        if tree is not None and not isinstance(self.drafter, TreeDrafter):
            raise ForedraftError(f"drafts by algorithm '{algorithm.name}' grow no trees: leave tree out, for a chain")
        if first is not None:
            if tree is not None:
                raise ForedraftError(f"'{first.name}' is asked before a chain: leave tree out, or first")
            self.drafter = AskedFirst(first, self.drafter, num_tokens)
            num_tokens = self.drafter.most
        self.draft, self.num_tokens, self.tree, self.stats, self.streamer = draft, num_tokens, tree, stats, streamer
        self.min_confidence, self.lossy, self.recent = min_confidence, lossy, Recent(min_acceptance)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        """Decode `input_ids` [1, L]; returns what the settings ask for. `kwargs` are the model's, the cache among them."""
        check_target(model, generation_config, kwargs, self.tree is not None)
        self.model, self.ids, self.config = model, input_ids, generation_config
        self.processors, self.criteria = logits_processor, stopping_criteria
        asked = ("scores", "logits", "hidden_states", "attentions") if generation_config.return_dict_in_generate else ()
        self.kept: dict[str, list[Any]] = {name: [] for name in asked if getattr(generation_config, f"output_{name}")}
        cache = TextCache(model, kwargs)
        capture = nullcontext() if self.draft is None else AuxCapture(model, self.draft.config.aux_layers)
        with grouped_attention(model), capture as captured:
            outputs = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs), return_dict=True)
            if self.draft is not None and captured is not None:
                self.draft.places_CBL = captured.places_CBS
            seen = list(range(input_ids.shape[1]))  # rows of the latest pass that are text that the drafter has not read
            rows, finished = self._follow(DraftTree([], []), outputs)
            cache.keep(outputs, rows, input_ids.shape[1], 0)
            while not finished:
                kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, num_new_tokens=len(rows))
                began = time.perf_counter()
                drafted, reach = self.propose(torch.empty(1, len(seen), 0) if captured is None else captured.aux_BSA[:, seen])
                if (fed := self.ids.shape[1] - cache.length) > MOST_REPLAYED:
                    drafted, reach = DraftTree([], []), 0
                proposed = time.perf_counter()
                if drafted.tokens:
                    cache.before()
                with cache.reading():
                    outputs = model(**self._inputs(drafted, fed, outputs, kwargs), return_dict=True)
                rows, finished = self._follow(drafted, outputs)
                cache.keep(outputs, rows, fed, len(drafted.tokens))
                self.recent.add(drafted.deepest, len(rows) - 1)
                self.stats.add(reach, len(rows) - 1, proposed - began, time.perf_counter() - proposed)
                seen = [fed - 1 + row for row in rows]
        if self.streamer is not None:
            self.streamer.end()
        if not generation_config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids, past_key_values=cache.held, **{name: tuple(values) for name, values in self.kept.items()}
        )

    def propose(self, aux_1NA: Tensor) -> tuple[DraftTree, int]:
        """What may follow, and how many of its tokens could be accepted at most. `aux_1NA`: see `Drafter`."""
        room = self.config.max_length - self.ids.shape[1] - 1
        if room <= 0:
            return DraftTree([], []), 0
        vocab_size = self.model.config.get_text_config().vocab_size
        device = self.ids.device if self.draft is None else self.draft.device
        draft_ids_W = torch.arange(vocab_size, device=device) if self.draft is None else self.draft.draft_ids
        chooser = Chooser(self.ids, self.processors, self.config.do_sample, draft_ids_W, vocab_size, self.min_confidence)
        ids_L, aux_1NA = self.ids[0].to(device), aux_1NA.to(device)
        if self.tree is None:
            tokens, logits = self.drafter.propose(ids_L, aux_1NA, self.recent.length(min(self.num_tokens, room)), chooser)
            return DraftTree(tokens, list(range(len(tokens))), logits), len(tokens)
        least = max(self.tree.min_confidence, self.min_confidence)
        depth = self.recent.length(min(self.tree.depth, room))
        nodes = math.ceil(self.tree.num_nodes * depth / min(self.tree.depth, room))
        shape = self.tree.model_copy(update={"depth": depth, "num_nodes": nodes, "min_confidence": least})
        return self.drafter.propose_tree(ids_L, aux_1NA, shape, chooser.rank), shape.depth

    def _inputs(self, drafted: DraftTree, fed: int, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """For the target's pass over the `fed` newest tokens of the text and the N drafted ones, behind what is cached."""
        count = len(drafted.tokens)
        ids_1L = torch.cat([self.ids, self.ids.new_tensor([drafted.tokens])], dim=1) if count else self.ids
        if count:
            kwargs = self.model._update_model_kwargs_for_generation(outputs, dict(kwargs), num_new_tokens=count)
        inputs = self.model.prepare_inputs_for_generation(ids_1L, next_sequence_length=fed + count, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1 + count
        if drafted.is_chain:
            return inputs
        past = ids_1L.shape[1] - count - 1
        # Additive: eager attention adds the mask to its scores, SDPA takes either form.
        lowest = torch.finfo(self.model.dtype).min
        mask = torch.zeros(1, 1, 1 + count, past + 1 + count, dtype=self.model.dtype, device=ids_1L.device)
        mask[..., past:].masked_fill_(~drafted.visible.to(mask.device), lowest)
        if (given := kwargs.get("attention_mask")) is not None:
            # Padding ids in the prompt, which transformers hides unless told otherwise.
            mask.masked_fill_(given[:, None, None] == 0, lowest)
        positions = inputs["position_ids"]
        return inputs | {"attention_mask": mask, "position_ids": positions[..., :1] + drafted.depths.to(positions.device)}

    def _follow(self, drafted: DraftTree, outputs: Any) -> tuple[list[int], bool]:
        """Emit the target's tokens down the draft, one after each of the rows returned; whether the text is finished."""
        count = len(drafted.tokens)
        logits_1NV = outputs.logits[:, -1 - count :].to(self.ids.device, torch.float32, copy=True)
        row: int | None = 0
        rows: list[int] = []
        finished = False
        while row is not None and not finished:
            rows.append(row)
            scores_1V = self.processors(self.ids, logits_1NV[:, row].clone())
            offered = [token for parent, token in drafted.children if parent == row]
            q_V = drafted.logits[row].softmax(-1) if row < len(drafted.logits) else None
            token = choose_token(scores_1V[0], offered, q_V, bool(self.config.do_sample), self.lossy)
            self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)
            if self.streamer is not None:
                self.streamer.put(self.ids[0, -1:].cpu())
            self._keep(outputs, row, count, scores_1V, logits_1NV[:, row])
            finished = bool(self.criteria(self.ids, tuple(self.kept["scores"]) if "scores" in self.kept else None).all())
            row = drafted.children.get((row, token))
        return rows, finished

    def _keep(self, outputs: Any, row: int, count: int, scores_1V: Tensor, logits_1V: Tensor) -> None:
        """Note what was asked for of a token that follows `row` of the 1 + `count` of the latest pass; all rows, of the prompt's."""
        for name, kept in self.kept.items():
            if name in ("scores", "logits"):
                kept.append(scores_1V if name == "scores" else logits_1V)
            elif not kept:
                kept.append(outputs[name])
            else:
                at = row - count - 1  # from the end: accepted tokens may be read again before
                last = slice(at, at + 1 or None)
                if name == "hidden_states":
                    kept.append(tuple(h[:, last] for h in outputs[name]))
                else:
                    kept.append(tuple(a[..., last, : a.shape[-1] - count + row] for a in outputs[name]))


@dataclass
class Chooser:
    """What may follow the text `ids` [1, L], by logits over the draft vocabulary: the `Choose` and the `Rank` that drafters are given.

    Of one round of drafting.
    """

    ids: Tensor
    processors: LogitsProcessorList
    do_sample: bool
    draft_ids_W: Tensor
    """The target id of each draft id."""
    vocab_size: int
    """The target's."""
    min_confidence: float = 0.0
    """A draft ends before the first token with which it would be less likely accepted whole."""
    confidence: float = 1.0
    """How likely what was drafted is accepted whole, as the draft sees it."""

    sure: Callable[[], Tensor] | None = None
    """See `Trusting`."""

    def __call__(self, logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor | None] | None:
        """See `Choose`."""
        return self.choose(logits_W, drafted)

    def choose(self, logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor | None] | None:
        """See `Choose`."""
        if not self.do_sample and not self.processors:
            at = int(logits_W.argmax())
            return (int(self.draft_ids_W[at]), None) if self._goes_on(logits_W, at) else None
        logits_V = self.processed(logits_W, self.ids.new_tensor(drafted))
        if not bool(torch.isfinite(logits_V).any()):
            return None
        at = int(torch.multinomial(logits_V.softmax(-1), 1)) if self.do_sample else int(logits_V.argmax())
        return (at, logits_V if self.do_sample else None) if self._goes_on(logits_V, at) else None

    def _goes_on(self, logits: Tensor, at: int) -> bool:
        """Whether a token is drafted here: by the likeliest one, not by that `at`, which was drawn; else samples were no longer exact."""
        if not self.min_confidence:
            return True
        q, (sure, self.sure) = logits.float().softmax(-1), (self.sure, None)
        likeliest, own = (q.max(), q[at]) if sure is None else [sure()] * 2
        enough = self.confidence * float(likeliest) >= self.min_confidence
        self.confidence *= float(own)
        return enough

    def rank(self, logits_NW: Tensor, drafted_NK: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Rank`."""
        if self.processors:
            # One by one: processors may tell the sequences of a batch apart, and these are all the first.
            rows = [self.processed(z, path) for z, path in zip(logits_NW, drafted_NK, strict=True)]
            logits_NW = torch.stack(rows).to(logits_NW.device)[:, self.draft_ids_W]
        log_p_NW = logits_NW.float().log_softmax(-1)
        log_p_NW = log_p_NW.masked_fill(log_p_NW.isnan(), float("-inf"))  # where nothing is allowed
        log_p_Nk, best_Nk = log_p_NW.topk(min(count, len(self.draft_ids_W)))
        return self.draft_ids_W[best_Nk], log_p_Nk

    def processed(self, logits_W: Tensor, drafted_K: Tensor) -> Tensor:
        """Logits after the text and the drafted tokens as the settings have them, [V]: -inf for what the draft cannot name.

        On the target's device, where processors keep their tensors.
        """
        logits_V = logits_W.new_full((self.vocab_size,), float("-inf"), dtype=torch.float32)
        logits_V[self.draft_ids_W] = logits_W.float()
        text_1L = torch.cat([self.ids, drafted_K.to(self.ids)[None]], dim=1)
        return self.processors(text_1L, logits_V.to(self.ids.device)[None])[0]


@dataclass
class DraftingStats:
    """Counts over one or many generations. The pass that reads the prompt is not counted.

    Where a text ends inside a draft, the tokens behind the end count as drafted and not as accepted.
    """

    emitted: int = 0
    """Tokens emitted by the target's passes after prefill, bonus tokens included."""
    passes: int = 0
    """The target's passes after prefill."""
    drafted: list[int] = field(default_factory=list)
    """How often position i (from 0) was drafted; of trees, how often one might have been that deep."""
    accepted: list[int] = field(default_factory=list)
    """How often it was accepted."""
    drafting: float = field(default=0.0, compare=False)
    """Seconds in which drafts were made."""
    verifying: float = field(default=0.0, compare=False)
    """Seconds of the target's passes, up to where the tokens that follow are known: so the time of a device is in them, too."""

    def add(self, drafted: int, accepted: int, drafting: float = 0.0, verifying: float = 0.0) -> None:
        """One verification: so many drafted (of a tree, the depth it might have), so many of them accepted, in so many seconds."""
        self.emitted += accepted + 1
        self.passes += 1
        self.drafting += drafting
        self.verifying += verifying
        for counts, count in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(count):
                counts[i] += 1

    @property
    def tau(self) -> float:
        """Tokens emitted per target pass after prefill, bonus token included."""
        return self.emitted / self.passes if self.passes else 1.0

    @property
    def acceptance(self) -> list[float]:
        """Per position: the share of drafts whose token there was accepted (so all before it were too)."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]
