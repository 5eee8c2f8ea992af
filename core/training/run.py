"""A training run carried out, from its settings to the finished draft."""

import json
import sys
from pathlib import Path

import torch
from transformers import set_seed

from ..auto import auto_draft
from ..card import public_name
from ..checkpoint import save_draft, write_text
from ..data import Conversations, pack
from ..errors import ForedraftError
from ..target import Target, load_target, load_tokenizer
from .cache import CachedTarget
from .plot import plot_training
from .resume import latest_complete
from .settings import DataConfig, RunConfig
from .trainer import DraftTrainer, DraftTrainingArguments

RUN_FILE = "run.json"
"""The settings of the run that wrote an output_dir."""


def train(config: RunConfig) -> Path:
    """Carry out a run; returns the directory of the finished draft, `output_dir/draft`."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    arguments = _arguments(config)
    _check_resume(config)
    tokenizer, model = load_tokenizer(config.target, config), load_target(config.target, config.target_dtype, config)
    conversations, held_out = load_split(config.data)
    rows = pack(conversations, tokenizer, config.data.max_length)
    eval_rows = pack(held_out, tokenizer, config.data.max_length) if held_out else None
    print(f"training data: {rows.info.description}", flush=True)
    set_seed(arguments.seed)
    draft = auto_draft(
        model.config,
        config.algorithm,
        adapter=config.adapter,
        aux_layers=tuple(config.aux_layers) if config.aux_layers else None,
        draft_vocab_size=config.draft_vocab_size,
        **config.options,
    )
    sources = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    draft.config.foredraft["data"] = {"sources": [public_name(source) for source in sources], "packed": rows.info.description}
    spec = draft.config.spec
    if config.train_embedding and (spec.target_head or spec.num_layers == 0):
        raise ForedraftError(
            f"train_embedding: a draft by algorithm '{config.algorithm}' "
            + ("has no embedding of its own, it uses its target's" if spec.target_head else "reads no embedding")
        )
    draft.embed_tokens.requires_grad_(config.train_embedding)
    layers = draft.config.aux_layers
    target = CachedTarget(model, layers, config.hidden_states_cache) if config.hidden_states_cache else Target(model, layers)
    started = draft.start_from(target, rows)
    print(f"draft: {started}", flush=True)
    trainer = DraftTrainer(draft, target, arguments, train_dataset=rows, eval_dataset=eval_rows)
    if trainer.is_world_process_zero():
        write_text(Path(config.output_dir) / RUN_FILE, config.model_dump_json(indent=1))
    trainer.train(resume_from_checkpoint=config.resume)
    if eval_rows is not None and arguments.eval_strategy == "no":
        trainer.evaluate()
    finished = Path(config.output_dir) / "draft"
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        write_text(
            finished.parent / "training.json", json.dumps({"run": config.model_dump(), "start": started, "history": history}, indent=1)
        )
        plot_training(history, finished.parent / "training.png")
        save_draft(draft, finished)
    trainer.accelerator.wait_for_everyone()
    return finished


def _arguments(config: RunConfig) -> DraftTrainingArguments:
    try:
        # A bar on a terminal, lines in a log file.
        defaults = {"save_strategy": "epoch", "disable_tqdm": not sys.stderr.isatty()}
        arguments = DraftTrainingArguments(**{**defaults, **config.training, "output_dir": config.output_dir})
    except (ValueError, TypeError, ImportError) as error:
        raise ForedraftError(f"training arguments: {error}") from error
    if arguments.eval_strategy != "no" and not config.data.held_out:
        raise ForedraftError("training.eval_strategy asks for evaluations: set data.held_out, there is nothing to evaluate on")
    return arguments


def _check_resume(config: RunConfig) -> None:
    """A run resumes what it was, or says what changed: a finished checkpoint would otherwise pass for the new run's result."""
    output = Path(config.output_dir)
    newest = latest_complete(output) if config.resume else None
    if newest is None or not (output / RUN_FILE).exists():
        return
    before, now = json.loads((output / RUN_FILE).read_text()), json.loads(config.model_dump_json())
    changed = [
        f"{key}: {before.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted({*before, *now} - {"resume"})
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise ForedraftError(
            f"'{newest}' belongs to a run with other settings:\n  " + "\n  ".join(changed) + "\n"
            "  Choose another output_dir, or resume=false to start anew in this one"
        )
    print(f"resuming from {newest}", flush=True)


def load_split(data: DataConfig) -> tuple[Conversations, Conversations]:
    """(train, held out): what is held out comes from the first source, so that more training data leaves it the same."""
    first, *others = [data.train] if isinstance(data.train, str) else data.train
    conversations, held_out = _load(first, data).holding_out(data.held_out, data.held_out_seed)
    for other in others:
        conversations = Conversations([*conversations, *_load(other, data)], f"{conversations.source}, {other}")
    return conversations, held_out


def _load(source: str, data: DataConfig) -> Conversations:
    return Conversations(Conversations.load(source, data.split)[: data.limit], source)
