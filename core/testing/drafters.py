"""`DrafterTests`: what an algorithm without weights must do, wherever its tokens come from; see `docs/testing.md`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ..contracts.algorithm import DrafterBase
from ..decoding import generate
from .case import chi_square
from .common import Conformance, check_options, missing, registry_of
from .passes import check_lossless
from .tiny import tiny_config, tiny_model

TEXT = [7, 3, 9, 3, 9, 4, 7, 3, 9, 3, 9, 4, 7, 3, 9]
"""A text that repeats itself, as drafters without weights like it."""


class DrafterTests(Conformance):
    """Subclass it as `class TestMine(DrafterTests)` and supply the fixture `algorithm`; `options` if the defaults are large."""

    @pytest.fixture
    def algorithm(self) -> type[DrafterBase]:
        """The algorithm under test."""
        raise missing(self, "algorithm", "the algorithm under test, a class", "MyLookup")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Its options; by default none."""
        return {}

    @pytest.fixture
    def method(self, algorithm: type[DrafterBase], options: dict[str, Any]) -> DrafterBase:
        """The algorithm with its options."""
        return algorithm(**options)

    @pytest.fixture
    def model(self) -> Any:
        """A tiny target."""
        return tiny_model(tiny_config(layers=2))

    def test_contract(self, algorithm: type[DrafterBase], options: dict[str, Any]) -> None:
        """Options are strict, described and survive JSON."""
        check_options(algorithm)
        method = algorithm(**options)
        again = registry_of(algorithm).make_algorithm(method.name, method.options.model_dump(mode="json"))
        assert again.max_tokens == method.max_tokens, "max_tokens changes when the options are saved and read again: derive it from them"

    @pytest.mark.parametrize("limit", [1, 2, 5])
    def test_keeps_its_word(self, method: DrafterBase, limit: int) -> None:
        """At most `limit` tokens of the vocabulary, after texts of any length, with a logit each or none at all."""
        for end in range(1, len(TEXT) + 1):
            tokens, scores = propose(method.drafter(None), end, limit)
            most = min(limit, method.max_tokens or limit)
            assert len(tokens) <= most, f"asked for at most {most} tokens, it drafted {len(tokens)}"
            wrong = [token for token in tokens if type(token) is not int or not 0 <= token < 50]
            assert not wrong, f"it drafted {wrong}: tokens are ints below the vocabulary's size (.tolist(), or int())"
            assert len(scores) in (0, len(tokens)), f"{len(tokens)} tokens with {len(scores)} logits: give each its own, or none any"

    def test_drafting_again(self, method: DrafterBase) -> None:
        """Whatever was drafted before, a drafter proposes what a fresh one would."""
        drafter = method.drafter(None)
        for end in (3, 4, 8, 12, len(TEXT)):
            again, fresh = propose(drafter, end, 4)[0], propose(method.drafter(None), end, 4)[0]
            assert again == fresh, (
                f"after {end} tokens in several calls it proposes {again}, a fresh one {fresh}: keep nothing of its own drafts"
            )

    def test_greedy_is_lossless(self, method: DrafterBase, model: Any) -> None:
        """Greedy decoding gives the target's own text."""
        check_lossless(model, method)

    @torch.no_grad()
    def test_sampling_is_lossless(self, method: DrafterBase, model: Any) -> None:
        """Drafted, accepted or drawn again, a token follows the target's distribution (χ² test)."""
        ids, vocab = torch.tensor([TEXT]), torch.arange(50)
        first_V = (model(ids).logits[0, -1] / 3).softmax(-1)  # warm, so that many tokens occur
        after_V = (model(torch.cat([ids.expand(50, -1), vocab[:, None]], dim=1)).logits[:, -1] / 3).softmax(-1)
        torch.manual_seed(0)
        settings: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 3, "pad_token_id": 0}
        tokens = min(2, method.max_tokens or 2)
        drawn = torch.stack([generate(model, method, ids, num_draft_tokens=tokens, **settings)[0, -2] for _ in range(200)])
        chance = chi_square(torch.bincount(drawn, minlength=50).float(), first_V @ after_V)
        assert chance > 1e-4, f"200 sampled tokens follow the target's distribution with a probability of {chance:.1g} only"


def propose(drafter: Any, end: int, limit: int) -> tuple[list[int], list[Tensor]]:
    """What it drafts after the first `end` tokens of the text."""
    found: tuple[list[int], list[Tensor]] = drafter.propose(torch.tensor(TEXT[:end]), torch.zeros(1, end - 1, 0), limit, likeliest)
    return found


def likeliest(logits_W: Tensor, drafted: list[int]) -> tuple[int, None]:
    """A `choose` that takes the likeliest token."""
    return int(logits_W.argmax()), None
