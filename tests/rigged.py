"""A target that can be predicted, text that it wrote, and a tokenizer of single letters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import Document, tiny_rows, tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import DraftTrainer, DraftTrainingArguments

TEMPLATE = (
    "{% for m in messages %}{{ '<' if m['role'] == 'user' else '>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}.{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def predictable_target(vocab: int = 50, layers: int = 8, sharpness: float = 2.0, wobble: float = 0.0) -> LlamaForCausalLM:
    """Follows every token x by (x + 7) mod vocab, with a probability that grows with `sharpness`: its layers change nothing.

    With some `wobble` they do change something, and now and then it says something else.
    """
    model = tiny_target(layers=layers, vocab=vocab)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(wobble)
            layer.mlp.down_proj.weight.mul_(wobble)
        embedding = model.get_input_embeddings().weight
        unit = embedding / embedding.norm(dim=-1, keepdim=True)
        model.get_output_embeddings().weight.copy_(sharpness * unit.roll(7, dims=0))
    return model


def written_by(model: LlamaForCausalLM, starts: Sequence[int], length: int) -> list[list[int]]:
    """`length` tokens each: one of `starts` and what the target says after it, greedily."""
    ids = torch.tensor(starts)[:, None]
    out: Tensor = model.generate(ids, max_new_tokens=length - 1, min_new_tokens=length - 1, do_sample=False, pad_token_id=0)
    return out.tolist()


def written_rows(model: LlamaForCausalLM, count: int = 8, length: int = 16) -> list[dict[str, Any]]:
    """Packed rows of the target's own text, of different lengths: two tokens of prompt, the rest supervised."""
    texts = written_by(model, [(5 * i + 1) % model.config.vocab_size for i in range(count)], length)
    cut = [ids[: length - i % 4] for i, ids in enumerate(texts)]
    return tiny_rows([[Document(ids, "uu" + "a" * (len(ids) - 2))] for ids in cut], length)


def arguments(directory: Path, **fields: Any) -> DraftTrainingArguments:
    """Quiet training on the CPU that logs every step and saves nothing, unless told otherwise."""
    defaults = {
        "output_dir": str(directory),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "lr_scheduler_type": "constant",
    }
    return DraftTrainingArguments(**{**defaults, **fields})


def trainer_of(draft: Any, target: Any, directory: Path, rows: Sequence[dict[str, Any]], **fields: Any) -> DraftTrainer:
    """A trainer over `rows`; `eval_dataset` among the fields goes to the trainer."""
    kwargs = {"eval_dataset": fields.pop("eval_dataset")} if "eval_dataset" in fields else {}
    return DraftTrainer(draft, target, arguments(directory, **fields), train_dataset=list(rows), **kwargs)


def letter_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A token per letter: `.` (end of text), `<` and `>` (turns), a to z, blank, A to T; 50 ids."""
    letters = ".<>abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRST"
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=".", pad_token=".", unk_token=" ")
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer
