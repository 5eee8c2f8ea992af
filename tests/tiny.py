"""Tiny Llama targets, drafts by name and tokenizers for tests, beside what the conformance kit makes its own of."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import Target, auto_draft
from foredraft.testing.tiny import Document, gradients, tiny_batch, tiny_config, tiny_document, tiny_model, tiny_rows, tiny_signal

__all__ = [
    "CHATML",
    "CHATML_TAGGED",
    "TOKENS",
    "Document",
    "backbone_calls",
    "chat",
    "gradients",
    "tiny_batch",
    "tiny_config",
    "tiny_document",
    "tiny_draft",
    "tiny_rows",
    "tiny_signal",
    "tiny_target",
    "tiny_tokenizer",
]

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


def backbone_calls(draft: Any) -> list[Any]:
    """From now on, the arguments of every call of the draft's backbone: embeddings, context, layout and perhaps a cache."""
    calls: list[Any] = []
    backbone = draft.backbone
    draft.backbone = lambda *arguments: (calls.append(arguments), backbone(*arguments))[1]
    return calls


def tiny_target(layers: int = 8, vocab: int = 50, hidden: int = 32, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A random Llama in evaluation mode; `config` overrides any field of `tiny_config`."""
    model = tiny_model(tiny_config(layers, vocab, hidden, **config), seed)
    assert isinstance(model, LlamaForCausalLM)
    return model


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


def chat(*contents: str) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def spelt_out(q_BHQd: Tensor, k_BhKd: Tensor, v_BhKd: Tensor, visible_BQK: Tensor, scale: float) -> Tensor:
    """Plain softmax attention under a mask that is spelt out."""
    k, v = (x.repeat_interleave(q_BHQd.shape[1] // x.shape[1], dim=1) for x in (k_BhKd, v_BhKd))
    return (q_BHQd @ k.mT * scale).masked_fill(~visible_BQK[:, None], float("-inf")).softmax(-1) @ v


def check_table(table: Any, visible_BQK: Tensor, block: int = 128) -> None:
    """Every key that a block of queries sees is in a block of the table, a full one is seen by all of it, and none is there twice."""
    batch, queries, keys = visible_BQK.shape
    for b in range(batch):
        for i in range(-(-queries // block)):
            part, full = ({*table[f"{n}_at"][b, 0, i, : table[n][b, 0, i]].tolist()} for n in ("partial", "full"))
            assert not part & full
            for j in range(-(-keys // block)):
                seen = visible_BQK[b, i * block : (i + 1) * block, j * block : (j + 1) * block]
                assert j in part | full or not seen.any()
                assert j not in full or (seen.all() and seen.shape[1] == block)
