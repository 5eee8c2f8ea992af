"""Places of tokens in a text: as a tokenizer tracks them where it does so whole, and by the tokens' bytes where it does not."""

import random

import numpy as np
import pytest
from tiny import chat, tiny_tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from foredraft.data import Renderer
from foredraft.data.encoding import Encoding

TEXTS = ["", "a", " ", "é", "😀\n日本 語", "the answer  is\n\n\tin a sentence ", "<|im_end|>\n<|im_start|> x", "a\u0301 e\u0301"]


def same(ours: tuple[list[int], object, object], tracked: tuple[list[int], object, object]) -> bool:
    return all(np.array_equal(own, other) for own, other in zip(ours, tracked, strict=True))  # type: ignore[arg-type]


def test_as_the_tokenizer_tracks_them() -> None:
    encoding, draw = Encoding(tiny_tokenizer()), random.Random(0)
    units = ["the ", "answer", "\n", "  ", "é", "😀", "語", "<|im_end|>", "x\u0301", "7", "\r\n", "\u200d"]
    for text in [*TEXTS, *("".join(draw.choices(units, k=40)) for _ in range(50))]:
        assert encoding._spelt_out(text) is not None
        assert same(encoding(text), encoding._tracked(text)), text


def test_what_another_call_asked_for_does_not_stay() -> None:
    tokenizer = tiny_tokenizer()
    encoding, text = Encoding(tokenizer), "the answer is in a sentence<|im_end|>"
    whole = encoding(text)
    tokenizer(text, truncation=True, max_length=3)
    assert same(encoding(text), whole)
    tokenizer(text, padding="max_length", max_length=60)
    assert same(encoding(text), whole)
    tokenizer(text, split_special_tokens=True)
    assert same(encoding(text), whole)
    tokenizer.split_special_tokens = True
    assert same(encoding(text), encoding._tracked(text))
    assert len(encoding(text)[0]) > len(whole[0])


@pytest.mark.parametrize("spelt", ["normalised", "prefixed", "stripped", "no bytes"])
def test_what_tokens_do_not_spell_is_tracked(spelt: str) -> None:
    tokenizer = tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    if spelt == "normalised":
        backend.normalizer = normalizers.NFC()
    elif spelt == "prefixed":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif spelt == "stripped":
        tokenizer.add_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True)])
    else:
        backend.decoder = None
    encoding = Encoding(tokenizer)
    for text in [*TEXTS, "a <|x|> b"]:
        assert same(encoding(text), encoding._tracked(text)), text
    assert encoding._of_bytes == (spelt in ("normalised", "stripped"))
    if spelt == "normalised":
        assert encoding._spelt_out(TEXTS[-1]) is None


def test_spaces_are_learnt_where_the_tokenizer_leaves_them_out_of_its_places() -> None:
    """As those do that trim offsets: indentation would never be supervised."""
    conversation = chat("why?", "if so:\n    a = 1\n\n        return")
    plain, trimming = tiny_tokenizer(), tiny_tokenizer()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    _, starts, ends = Encoding(trimming)._tracked("a    b")
    assert (starts == ends).any()
    assert Renderer(trimming).render(conversation) == Renderer(plain).render(conversation)
