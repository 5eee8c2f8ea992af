"""Prompt lookup and suffixes: what they find, and that decoding without any weights leaves the text as it is."""

from typing import Any

import pytest
import torch
from rigged import letter_tokenizer, predictable_target
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from foredraft import ForedraftError, auto_draft, default_registry, evaluate, generate
from foredraft.decoding import DraftingStats

PromptLookup, Suffix = (default_registry().algorithm(name) for name in ("prompt_lookup", "suffix"))


@pytest.mark.parametrize(
    ("text", "options", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], {}, 10, [3, 4, 1, 2]),
        ([1, 2, 3, 4, 1, 2], {}, 2, [3, 4]),
        ([1, 2, 5, 9, 2, 6, 1, 2], {}, 1, [5]),  # two tokens count for more than one that is nearer
        ([1, 2, 5, 9, 2, 6, 1, 2], {"max_ngram": 1}, 1, [6]),
        ([1, 2, 5, 1, 2, 6, 1, 2], {}, 1, [6]),  # the latest
        ([7, 7, 7, 7], {}, 2, [7]),
        ([7, 7, 7, 7, 7, 7], {}, 2, [7, 7]),  # the latest that two tokens follow
        ([1, 2, 3], {}, 5, []),
        ([1], {}, 5, []),
    ],
)
def test_what_is_found(text: list[int], options: dict[str, Any], limit: int, expected: list[int]) -> None:
    drafter = PromptLookup(**options).drafter(None)
    assert drafter.propose(torch.tensor(text), torch.empty(1, len(text) - 1, 0), limit, None) == (expected, [])


@pytest.mark.parametrize(
    ("text", "options", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], {}, 10, [3, 4]),  # as many as were found again
        ([1, 2, 3, 4, 1, 2], {"max_spec_factor": 2}, 10, [3, 4, 1, 2]),
        ([1, 2, 3, 4, 1, 2], {"max_spec_factor": 2}, 3, [3, 4, 1]),
        ([1, 5, 2, 1, 5, 3, 1, 6, 4, 1], {}, 1, [5]),  # the most frequent, where the lookup takes the latest: [6]
        ([1, 5, 1, 6, 1], {}, 1, [6]),  # of equals the latest
        ([9, 1, 5, 1, 6, 1, 6, 9, 1], {}, 3, [5, 1]),  # a longer match, two sure tokens, for one that came twice of three times
        ([2, 1, 5, 1, 6, 1, 6, 1], {"min_token_prob": 0.9}, 3, [6, 1]),  # "6, 1" went on with 6 always; "1" alone did not
        ([1, 5, 1, 6, 1], {"min_token_prob": 0.9}, 3, []),
        ([1, 2, 3], {}, 5, []),
        ([1], {}, 5, []),
    ],
)
def test_what_a_suffix_finds(text: list[int], options: dict[str, Any], limit: int, expected: list[int]) -> None:
    assert Suffix(**options).propose(torch.tensor(text), torch.empty(1, len(text) - 1, 0), limit, None) == (expected, [])


def repeating(length: int) -> Tensor:
    """A text that the predictable target goes on with, its period of 50 tokens once behind it."""
    return ((3 + 7 * torch.arange(length)) % 50)[None]


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize(("algorithm", "k", "most"), [("prompt_lookup", None, 10), ("prompt_lookup", 1, 1), ("suffix", None, 24)])
def test_the_text_is_the_targets_own(algorithm: str, k: int | None, most: int, sampling: bool) -> None:
    """Token for token, samples too: a drafted token without logits is taken where the target's own draw is that token."""
    target, stats = predictable_target(wobble=0.3), DraftingStats()
    settings = {"do_sample": sampling, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    sampled = {"temperature": 0.7, "top_k": 0, "repetition_penalty": 0.9} if sampling else {}
    for seed, length in enumerate((60, 3)):
        texts = []
        for decode in (lambda **kw: generate(target, algorithm, num_draft_tokens=k, stats=stats, **kw), target.generate):
            torch.manual_seed(seed)
            texts.append(decode(input_ids=repeating(length), **settings, **sampled).tolist())
        assert texts[0] == texts[1]
    assert 0 < len(stats.drafted) <= most
    assert 0 < stats.accepted[0] < stats.drafted[0]


def test_processors_and_criteria_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every token, with the text so far; and the target is not captured."""
    monkeypatch.setattr("foredraft.decoding.loop.AuxCapture", None)
    target, lengths = predictable_target(), []

    def until_80(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        lengths.append(ids.shape[1])
        return torch.tensor([ids.shape[1] == 80])

    never_5 = lambda ids, scores: scores.index_fill(1, torch.tensor([5]), float("-inf"))  # noqa: E731
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    kwargs = {"logits_processor": LogitsProcessorList([never_5]), "stopping_criteria": StoppingCriteriaList([until_80])}
    ours = generate(target, PromptLookup(num_tokens=4), repeating(60), **kwargs, **settings)
    assert lengths == list(range(61, 81))
    assert ours.tolist() == target.generate(repeating(60), **kwargs, **settings).tolist()


def test_it_is_measured_and_not_built() -> None:
    target = predictable_target()
    asked = [[{"role": "user", "content": "ovCJQbipwDKRcjqxELSdkryFMTelsz"}]]
    found = evaluate(target, PromptLookup(num_tokens=4), letter_tokenizer(), asked, max_new_tokens=24)
    assert (found.identical, found.settings["algorithm"], found.settings["num_draft_tokens"]) == (1, "prompt_lookup", 4)
    for build in (lambda: auto_draft(target.config, "prompt_lookup"), lambda: generate(target, "eagle3", repeating(3))):
        with pytest.raises(ForedraftError, match=r"algorithm '(prompt_lookup' has no weights|eagle3' drafts with a model)"):
            build()
