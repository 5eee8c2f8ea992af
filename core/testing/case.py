"""The algorithm under test with a target and a draft, and the ways in which the checks exercise them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ..contracts.algorithm import AlgorithmBase, Step
from ..contracts.signal import Signal
from ..data import DraftCollator
from ..errors import ForedraftError
from ..loss import Labels, Supervisor, Teacher, reference
from ..target.capture import AuxCapture
from ..target.target import Target
from .common import shipped
from .passes import build
from .tiny import tiny_config, tiny_model, tiny_rows

Supervise = Callable[[Signal, Tensor, Tensor], Supervisor]
"""From what the target says of a text, the text [L] and the draft's vocabulary [W]: what is learned at each of its positions."""
SUPERVISORS: Mapping[str, Supervise] = {
    "the target": lambda signal, ids_L, draft_ids_W: Teacher.of(signal, torch.arange(len(ids_L))),
    "the text": lambda signal, ids_L, draft_ids_W: Labels(ids_L.roll(-1)),
}


@dataclass
class Case:
    """A target, the algorithm under test and a draft for it with random weights."""

    model: Any
    draft: Any

    @classmethod
    def of(cls, algorithm: Any, options: Mapping[str, Any] = {}, target_config: Any = None, adapter: Any = None, **fields: Any) -> "Case":
        """`target_config` is a tiny Llama by default, `adapter` foredraft's own for it; `fields` go to `make_config`."""
        target_config = target_config or tiny_config()
        adapter = adapter or shipped().adapter_for(target_config.get_text_config().model_type, target_config)
        draft = build(adapter, target_config, algorithm(**options), **fields)
        model = _model(target_config)
        draft.take_head(model)
        torch.manual_seed(0)  # whether the target was there or not
        return cls(model, draft)

    @property
    def method(self) -> AlgorithmBase:
        """The algorithm with its options."""
        return self.draft.algorithm

    @cached_property
    def target(self) -> Target:
        """The target as training sees it."""
        return _target(self.model, tuple(self.draft.config.aux_layers), tuple(self.method.needs))

    def rows(self, packed: Sequence[Sequence[str]], length: int | None = None) -> list[dict[str, Any]]:
        """Packed rows of random tokens; see `tiny_rows`. The mask token, the last one, does not occur."""
        return tiny_rows(packed, length, high=min(49, self.draft.config.vocab_size - 1))

    def batch(self, rows: Sequence[dict[str, Any]], seed: int = 0) -> dict[str, Any]:
        """Rows with the algorithm's plan."""
        return DraftCollator(self.method, seed)(rows)

    def step(self, batch: dict[str, Any], signal: Signal | None = None, counts: Tensor | None = None) -> Step:
        """The training loss."""
        whole = batch if counts is None else {**batch, "counts": counts}
        return self.method.loss(self.draft, whole, signal or self.target.capture(batch))

    def draws(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether the plan draws at random."""
        return not equal(self.batch(rows, seed=0), self.batch(rows, seed=1))

    @torch.no_grad()
    def aux(self, ids_L: Tensor) -> Tensor:
        """The target's aux states of a text, [1, L, A]."""
        with AuxCapture(self.model, self.draft.config.aux_layers) as captured:
            self.model(input_ids=ids_L[None], use_cache=False)
        return captured.aux_BSA

    def read(self, letters: str) -> tuple[Tensor, Tensor]:
        """A text of random tokens [L], and the target's aux states of it."""
        ids = torch.tensor(self.rows([[letters]])[0]["input_ids"])
        return ids, self.aux(ids)


_models: dict[tuple[Any, ...], Any] = {}


def _model(config: Any) -> Any:
    """The tiny target of such a config, made once for all checks: none of them changes it."""
    key = (type(config), config._attn_implementation, config.to_json_string(use_diff=False))
    if key not in _models:
        _models[key] = tiny_model(config)
    return _models[key]


_target = lru_cache(64)(Target)
"""As training sees it: tried out once."""


def equal(one: Any, other: Any) -> bool:
    """Whether two batches (dicts, lists, tensors) hold the same."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def scrambled(
    case: Case, batch: dict[str, Any], signal: Signal, aux: slice, teacher: slice, tokens: slice
) -> tuple[dict[str, Any], Signal]:
    """The batch with other `tokens`, the signal with other `aux` states and other `teacher` states; the plan stays."""
    torch.manual_seed(5)
    ids_BS, aux_BSA, hidden_BST = batch["input_ids"].clone(), signal.aux_BSA.detach().clone(), signal.hidden_BST.clone()
    ids_BS[:, tokens] = (ids_BS[:, tokens] + 11) % (case.draft.config.vocab_size - 1)
    for x, places in ((aux_BSA, aux), (hidden_BST, teacher)):
        x[:, places] = 3 * torch.randn_like(x[:, places])
    return {**batch, "input_ids": ids_BS}, Signal(aux_BSA, hidden_BST, case.target.head)


def reduced(case: Case, size: int) -> Case:
    """The same with a draft vocabulary of `size` tokens spread over the ids; skips where the algorithm has none."""
    vocab = case.draft.config.vocab_size
    try:
        draft = build(type(case.draft), case.model.config, case.method, draft_vocab_size=size)
    except ForedraftError as error:
        pytest.skip(str(error))
    draft.set_draft_vocabulary(torch.arange(size) * vocab // size)
    draft.take_head(case.model)
    return Case(case.model, draft)


@torch.no_grad()
def forced(
    case: Case, ids_L: Tensor, letters: str, steps: int, supervisors: Mapping[str, Supervise]
) -> tuple[dict[str, dict[str, Tensor]], list[int]]:
    """What a fresh drafter says at every place of the text that serving reaches, when it is made to draft the text itself.

    The metrics of its logits against each of the supervisors, and the number of places per drafting step.
    """
    end, states, rows = letters.rindex("a") + 1, [[] for _ in range(steps)], [[] for _ in range(steps)]  # type: ignore[var-annotated]
    aux = case.aux(ids_L)
    for start in range(letters.index("a") + 1, end):  # the newest token is the assistant's

        def choose(logits_W: Tensor, drafted: list[int], start: int = start) -> tuple[int, None]:
            states[len(drafted)].append(logits_W)
            rows[len(drafted)].append(start - 1 + len(drafted))
            return int(ids_L[start + len(drafted)]), None

        case.method.drafter(case.draft).propose(ids_L[:start], aux[:, : start - 1], min(steps, end - start), choose)
    possible = [max(0, letters.count("a") - 1 - k) for k in range(steps)]
    hidden_LT = case.target.decoder(input_ids=ids_L[None], use_cache=False).last_hidden_state[0]
    signal = Signal(aux, hidden_LT[None], case.target.head)
    empty = torch.zeros(0, case.draft.config.draft_vocab_size)
    logits = [torch.stack(s) if s else empty for s in states]
    ones, at = [x.new_ones(len(x)) for x in logits], [torch.tensor(r).long() for r in rows]
    head = SimpleNamespace(compute_logits=lambda x: x, draft_ids=case.draft.draft_ids)
    against = {name: make(signal, ids_L, case.draft.draft_ids) for name, make in supervisors.items()}
    return {name: reference(head, logits, supervisor, at, ones).metrics for name, supervisor in against.items()}, possible


def likeliest(drafter: Any, draft: Any, ids: Tensor, aux_1NA: Tensor, limit: int) -> tuple[list[int], list[Tensor]]:
    """What a drafter proposes where the likeliest token is chosen, and the logits [W] that each was chosen from."""
    seen: list[Tensor] = []

    def choose(logits_W: Tensor, drafted: list[int]) -> tuple[int, None]:
        seen.append(logits_W.clone())
        return int(draft.draft_ids[logits_W.argmax()]), None

    return drafter.propose(ids, aux_1NA, limit, choose)[0], seen


def chi_square(counts_V: Tensor, p_V: Tensor) -> float:
    """The chance of a deviation this large if the counts follow p; rare tokens are pooled."""
    expected_V = p_V * counts_V.sum()
    rare = expected_V < 5
    observed = torch.cat([counts_V[~rare], counts_V[rare].sum()[None]]).double()
    expected = torch.cat([expected_V[~rare], expected_V[rare].sum()[None]]).double().clamp(min=1e-9)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))
