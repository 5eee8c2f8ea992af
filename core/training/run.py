"""A training run carried out, from its settings to the finished draft."""

import json
from itertools import chain
from pathlib import Path

import torch
from transformers import set_seed

from ..auto import auto_draft
from ..card import public_name
from ..checkpoint import save_draft, write_text
from ..data import Conversations, pack
from ..errors import ForedraftError
from ..target import Target, load_config, load_target, load_tokenizer
from .cache import CachedTarget
from .checks import check_run, open_start, sources
from .inputs import check_rows
from .plot import plot_training
from .resume import latest_complete
from .settings import DataConfig, RunConfig
from .trainer import DraftTrainer

RUN_FILE = "run.json"
"""The settings of the run that wrote an output_dir."""


def train(config: RunConfig) -> Path:
    """Carry out a run; returns the directory of the finished draft, `output_dir/draft`."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    arguments = check_run(config)
    _check_resume(config)
    begun = open_start(config) if config.draft else None
    tokenizer = load_tokenizer(config.target, config)
    conversations, held_out = load_split(config.data, config.eval_data)
    rows = pack(conversations, tokenizer, config.data.max_length, strict=config.data.strict)
    eval_rows = pack(held_out, tokenizer, config.data.max_length, strict=config.data.strict) if held_out else None
    print(f"training data: {rows.info.description}", flush=True)
    check_rows(rows, load_config(config.target, config).get_text_config().vocab_size, "the training data")
    model = load_target(config.target, config.target_dtype, config)
    set_seed(arguments.seed)
    draft = begun or auto_draft(
        model.config,
        config.algorithm,
        adapter=config.adapter,
        aux_layers=tuple(config.aux_layers) if config.aux_layers else None,
        draft_vocab_size=config.draft_vocab_size,
        **config.options,
    )
    for text in () if begun else draft.assumed(model.config.get_text_config()):
        print(f"assumed: {text}", flush=True)
    named = [public_name(source) for source in sources(config.data.train)]
    draft.config.foredraft["data"] = {"sources": named, "packed": rows.info.description}
    layers = draft.config.aux_layers
    target = CachedTarget(model, layers, config.hidden_states_cache) if config.hidden_states_cache else Target(model, layers)
    started = draft.retarget(target, rows, config.draft_vocab_size) if begun else draft.start_from(target, rows)
    draft.embed_tokens.requires_grad_(config.train_embedding)
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


def load_split(data: DataConfig, eval_data: list[str] | str | None = None) -> tuple[Conversations, Conversations]:
    """(train, held out): `eval_data`, or some of the first source, so that more training data leaves them the same.

    No source trains on what is held out, told by its content.
    """
    first, *others = (_load(source, data) for source in sources(data.train))
    if eval_data is None:
        conversations, held_out = first.holding_out(data.held_out, data.held_out_seed)
    else:
        held_out = Conversations(chain(*(_load(source, data) for source in sources(eval_data))), ", ".join(sources(eval_data)))
        conversations = first.without(held_out)
    for other in others:
        conversations = Conversations([*conversations, *other.without(held_out)], f"{conversations.source}, {other.source}")
    return conversations, held_out


def _load(source: str, data: DataConfig) -> Conversations:
    return Conversations.load(source, data.split, strict=data.strict, limit=data.limit)
