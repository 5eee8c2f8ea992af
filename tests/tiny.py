"""Tiny random targets, drafts, documents and batches for tests, all built on the CPU in milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import DraftCollator, Signal, Target, auto_draft

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template without generation tags."""
CHATML_TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same text, with generation tags."""
TOKENS = 300


def tiny_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `TOKENS` tokens; ids 0 to 3 are padding, `<|im_start|>`, `<|im_end|>` and `<|endoftext|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the user asks and the assistant answers in a sentence", "another question, another answer"], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<|pad|>")
    wrapped.chat_template = template
    return wrapped


def tiny_config(layers: int = 8, vocab: int = 50, hidden: int = 32, **config: Any) -> LlamaConfig:
    """A Llama config with 4 query and 2 key/value heads. `initializer_range` is large, so that the logits differ visibly."""
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**{**fields, **config})


def tiny_target(layers: int = 8, vocab: int = 50, hidden: int = 32, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A random Llama in evaluation mode; `config` overrides any field of `tiny_config`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(layers, vocab, hidden, **config)).eval()


def tiny_draft(
    model: LlamaForCausalLM, algorithm: str = "eagle3", seed: int = 0, draft_vocab_size: int | None = None, **options: Any
) -> Any:
    """A fresh draft for `model`, embedding and head taken over from it.

    A reduced draft vocabulary is spread evenly over the ids, so that named and unnamed tokens occur.
    """
    torch.manual_seed(seed)
    draft = auto_draft(model.config, algorithm, draft_vocab_size=draft_vocab_size, **options)
    if draft_vocab_size is not None and draft_vocab_size < model.config.vocab_size:
        draft.set_draft_vocabulary(torch.arange(draft_vocab_size) * model.config.vocab_size // draft_vocab_size)
    draft.start_from(Target(model, draft.config.aux_layers))
    return draft


@dataclass(frozen=True)
class Document:
    """Token ids, and a letter for each: `u` is not supervised, each run of another letter is an assistant span."""

    ids: list[int]
    letters: str


def tiny_document(letters: str, seed: int = 0, low: int = 1, high: int = 50) -> Document:
    """Random tokens from [low, high) under `letters`: `tiny_document("uuaaauubbb")` has two assistant spans."""
    ids = torch.randint(low, high, (len(letters),), generator=torch.Generator().manual_seed(seed))
    return Document(ids.tolist(), letters)


def tiny_rows(packed: Sequence[Sequence[Document | str]], length: int | None = None) -> list[dict[str, Any]]:
    """Packed rows as `foredraft.pack` makes them, from the documents of each row; strings become documents seeded by their place.

    Rows are padded to `length`, by default to the longest of them.
    """
    filled = [
        [d if isinstance(d, Document) else tiny_document(d, seed=100 * r + i) for i, d in enumerate(row)] for r, row in enumerate(packed)
    ]
    length = length or max(sum(len(d.ids) for d in row) for row in filled)
    return [_row(documents, length, r) for r, documents in enumerate(filled)]


def tiny_batch(algorithm: Any, rows: Sequence[dict[str, Any]], seed: int = 0) -> dict[str, Any]:
    """`rows` through `DraftCollator`: tensors and the algorithm's plan."""
    return DraftCollator(algorithm, seed)(rows)


def tiny_signal(model: LlamaForCausalLM, draft: Any, batch: dict[str, Any]) -> Signal:
    """What the target says of a batch."""
    return Target(model, draft.config.aux_layers).capture(batch)


def gradients(draft: Any) -> dict[str, Tensor]:
    """A copy of the gradient of every trainable parameter; the parameters' own are cleared."""
    found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()
    return found


def _row(documents: Sequence[Document], length: int, row: int) -> dict[str, Any]:
    ids: list[int] = []
    numbers: list[int] = []
    spans: list[int] = []
    for i, document in enumerate(documents):
        previous = "u"
        for letter in document.letters:
            starts = letter != "u" and letter != previous
            spans.append(-1 if letter == "u" else max(spans, default=-1) + starts)
            previous = letter
        ids += document.ids
        numbers += [i] * len(document.ids)
    padding = length - len(ids)
    assert padding >= 0, f"row {row} has {len(ids)} tokens, more than {length}"
    return {"input_ids": ids + [0] * padding, "documents": numbers + [-1] * padding, "spans": spans + [-1] * padding, "row": row}
