"""From a text to token ids, and to the characters that each of them spells."""

from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

Array = np.ndarray[Any, Any]
_ASKED = {"add_special_tokens": False, "return_offsets_mapping": True, "return_attention_mask": False, "return_token_type_ids": False}
_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}
_PROBE = "A probe:  two\n\tlines, 37 Straßen\r\n"


class Encoding:
    """Token ids of texts and where each begins and ends, by a fast tokenizer.

    A tokenizer that tracks places takes a third longer, and some leave spaces out of them. Where tokens stand for bytes, and those of
    a text's tokens are the text, which is looked at each time, places follow from them. A part of a character is as wide as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> tuple[list[int], Array, Array]:
        """Ids [n], and int64 arrays [n] of the first character of each and of the one behind its last."""
        return (self._spelt_out(text) if self._of_bytes else None) or self._tracked(text)

    def _tracked(self, text: str) -> tuple[list[int], Array, Array]:
        encoded = self.tokenizer(text, **_ASKED)
        offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return encoded["input_ids"], offsets[:, 0], offsets[:, 1]

    @cached_property
    def _of_bytes(self) -> bool:
        """Whether tokens stand for bytes, and a call of the tokenizer is one of its Rust half."""
        if not isinstance(self.tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
            return False
        found = self._spelt_out(_PROBE)
        return found is not None and found[0] == self._tracked(_PROBE)[0]

    @cached_property
    def _bytes(self) -> "_Bytes":
        return _Bytes(self.tokenizer.backend_tokenizer)

    def _spelt_out(self, text: str) -> tuple[list[int], Array, Array] | None:
        """None where the tokens' bytes are not the text's: one that was normalised, say, or cut as another call had asked for."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = self.tokenizer.split_special_tokens  # another call may have asked otherwise
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        parts, written = [self._bytes[number] for number in ids], text.encode()
        if b"".join(parts) != written:
            return None
        widths = np.fromiter(map(len, parts), np.int64, len(parts))
        ends = np.cumsum(widths)
        starts = ends - widths
        if len(written) == len(text):
            return ids, starts, ends
        character = np.cumsum(np.frombuffer(written, np.uint8) & 0xC0 != 0x80)  # that a byte is part of, from 1
        return ids, character[starts] - 1, character[ends - 1]


class _Bytes(dict[int, bytes]):
    """Of each token that was asked for; nothing where it has none of its own."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self |= {number: token.content.encode() for number, token in tokenizer.get_added_tokens_decoder().items()}

    def __missing__(self, number: int) -> bytes:
        token = self.tokenizer.id_to_token(number) or ""
        self[number] = bytes(_BYTES[char] for char in token) if all(char in _BYTES for char in token) else b""
        return self[number]
