"""A training run carried out, from its settings to the finished draft."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedModel, set_seed

from ..auto import auto_draft
from ..data import Conversations, Reader, pack, tokenizer_of
from ..draft.model import BaseDraft
from ..errors import ForedraftError, gathering
from ..files.card import public_name
from ..files.ours import save_draft
from ..files.writing import check_new, write_text
from ..target.cached import CachedTarget, store_of
from ..target.fingerprint import Fingerprint, fingerprint_of, weights_of_files
from ..target.loading import load_config, load_target, load_tokenizer
from ..target.store import Store
from ..target.target import Target
from .checks import check_draft, check_run, open_start, sources
from .defaults import DraftTrainingArguments
from .ready import check_rows
from .report import plot_training
from .resume import LENGTH, alone_in, digest, earlier_run, latest_complete, note
from .settings import DataConfig, RunConfig
from .trainer import DraftTrainer


def train(config: RunConfig) -> Path:
    """Carry out a run; returns the directory of the finished draft, `output_dir/draft`.

    A run that was begun goes on, longer than it was if asked; one that is finished does nothing but say so. Raises `ForedraftError` if it
    cannot start, if another process trains into `output_dir`, or if that belongs to a run with another result; `TrainingStopped`
    at a signal.
    """
    arguments = check_run(config)
    with alone_in(config.output_dir):
        before = earlier_run(config)
        if before.get("finished") and not before["length"] and (Path(config.output_dir) / "draft" / "config.json").exists():
            print(f"'{config.output_dir}' is finished: train longer by {' or '.join(LENGTH)}, or anew by resume=false", flush=True)
            return Path(config.output_dir) / "draft"
        return _carry_out(config, arguments, before)


def _carry_out(config: RunConfig, arguments: DraftTrainingArguments, before: dict[str, Any]) -> Path:
    torch.set_float32_matmul_precision(config.matmul_precision)
    begun = open_start(config) if config.draft else None
    tokenizer, rows, eval_rows = packed_rows(config)
    if before and before.get("rows", digest(rows)) != digest(rows):
        raise ForedraftError(
            f"the data packs to other rows than those that '{config.output_dir}' was trained on: it, or how it is rendered, has changed.\n"
            "  Choose another output_dir, or resume=false to start anew in this one"
        )
    if before and (newest := latest_complete(config.output_dir)):
        print(f"resuming from {newest}", flush=True)
        for key, was, now in before["length"]:
            print(f"{key} was {was}, is {now}: from here the learning rate is that of a run of this length", flush=True)
    set_seed(arguments.seed)
    draft = begun or fresh_draft(config, load_config(config.target, config))
    stored = None
    with suppress(ForedraftError):  # files may name weights otherwise than modules: then the target itself is compared, and tells
        stored = store_of_run(config, draft, tokenizer)
    whole = stored is not None and (stored.streams or not stored.wanted([part for part in (rows, eval_rows) if part is not None]).missing)
    model = load_target(config.target, config.target_dtype, config, arguments.device, layers=not whole)
    for text in () if begun else draft.assumed(model.config.get_text_config()):
        print(f"assumed: {text}", flush=True)
    named = [public_name(source.path) for source in sources(config.data.train)]
    draft.config.foredraft["data"] = {"sources": named, "packed": rows.info.description}
    if config.hidden_states_cache:
        target: Target = cached_target(config, draft, tokenizer, model, stored.of if whole and stored else None)
    else:
        target = Target(model, draft.config.aux_layers, draft.algorithm.needs)
    started = draft.retarget(target, rows, config.draft_vocab_size) if begun else draft.start_from(target, rows)
    draft.embed_tokens.requires_grad_(config.train_embedding)
    draft.kernel = config.kernel
    if config.compile:
        draft.compile()
    half = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else draft.dtype
    if kernel := draft.attention_kernel(arguments.device, half):
        print(f"attention kernel: {kernel}", flush=True)
    print(f"draft: {started}", flush=True)
    trainer = DraftTrainer(draft, target, arguments, train_dataset=rows, eval_dataset=eval_rows)
    if isinstance(target, CachedTarget):
        target.release()
    if trainer.is_world_process_zero():
        note(config, rows, finished=False)
    trainer.train(resume_from_checkpoint=config.resume)
    if eval_rows is not None and arguments.eval_strategy == "no":
        trainer.evaluate()
    finished, state = Path(config.output_dir) / "draft", trainer.state_dict()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        seconds = max((log.get("seconds", 0.0) for log in history), default=0.0)
        draft.config.foredraft["training"] = {"steps": trainer.state.global_step, "seconds": seconds}
        write_text(
            finished.parent / "training.json", json.dumps({"run": config.model_dump(), "start": started, "history": history}, indent=1)
        )
        plot_training(history, finished.parent / "training.png")
        save_draft(draft, finished, state)
        note(config, rows, finished=True)
    trainer.accelerator.wait_for_everyone()
    return finished


def packed_rows(config: RunConfig) -> tuple[Reader, Dataset, Dataset | None]:
    """(the tokenizer or, of images, the processor; rows to train on; rows to evaluate on, if any).

    Raises `ForedraftError` for data that does not fit the target.
    """
    conversations, held_out = load_split(config.data, config.eval_data)
    tokenizer = load_tokenizer(config.target, config, conversations.have_images or held_out.have_images)
    asked: dict[str, Any] = {"strict": config.data.strict, "show_progress": True}
    rows = pack(conversations, tokenizer, config.data.max_length, **asked)
    eval_rows = pack(held_out, tokenizer, config.data.max_length, **asked) if held_out else None
    print(f"training data: {rows.info.description}", flush=True)
    check_rows(rows, load_config(config.target, config).get_text_config().vocab_size, "the training data")
    return tokenizer, rows, eval_rows


def init(config: RunConfig, with_data: bool) -> str:
    """Write the untrained draft that a run would start from to its output_dir; its vocabulary is chosen `with_data` of the run, or whole.

    Returns what it took over from the target. Raises `ForedraftError` for what does not fit, and for a place that is taken.
    """
    problems: list[str] = []
    with gathering(problems):
        check_new(config.output_dir)
    check_draft(config, problems)
    if config.draft_vocab_size is not None and not with_data:
        problems.append(f"draft_vocab_size={config.draft_vocab_size}: a reduced vocabulary is chosen by what data uses: name some (--data)")
    if problems:
        raise ForedraftError("\n".join(problems))
    rows = None
    if with_data:
        conversations = load_split(config.data)[0]
        rows = pack(conversations, load_tokenizer(config.target, config, conversations.have_images), config.data.max_length)
    model = load_target(config.target, config.target_dtype, config)
    set_seed(DraftTrainingArguments.seed)
    draft = fresh_draft(config, model.config)
    started = draft.start_from(model, rows)
    save_draft(draft, config.output_dir)
    return started


def draft_of(config: RunConfig, target: PretrainedConfig) -> BaseDraft:
    """The draft that a run trains, for a target with this config: the one that it starts from, else a fresh one."""
    return open_start(config) if config.draft else fresh_draft(config, target)


def cached_target(
    config: RunConfig, draft: BaseDraft, reader: Reader, model: PreTrainedModel, of: Fingerprint | None = None
) -> CachedTarget:
    """The run's target, read from its `hidden_states_cache`; `of`: see `CachedTarget`."""
    assert config.hidden_states_cache is not None
    return CachedTarget(
        model,
        draft.config.aux_layers,
        config.hidden_states_cache,
        draft.algorithm.needs,
        kept=config.hidden_states_dtype,
        tokenizer=reader,
        of=of,
        streams=config.hidden_states_room is not None,
    )


def fresh_draft(config: RunConfig, target: PretrainedConfig) -> BaseDraft:
    """A new draft as the run's settings describe it, for a target with this config."""
    return auto_draft(
        target,
        config.algorithm,
        adapter=config.adapter,
        aux_layers=tuple(config.aux_layers) if config.aux_layers else None,
        draft_vocab_size=config.draft_vocab_size,
        **config.options,
    )


def load_split(data: DataConfig, eval_data: list[str] | str | None = None) -> tuple[Conversations, Conversations]:
    """(train, held out): `eval_data`, or some of the first source, so that more training data leaves them the same.

    No source trains on what is held out, told by its content. Each is taken as often as its weight says.
    """
    named = sources(data.train)
    first, *others = (_load(source.path, data) for source in named)
    if eval_data is None:
        conversations, held_out = first.holding_out(data.held_out, data.held_out_seed)
    else:
        held_out = Conversations.joined([_load(source.path, data) for source in sources(eval_data)])
        conversations = first.without(held_out)
    kept = [conversations, *(other.without(held_out) for other in others)]
    return Conversations.joined([part.weighted(source.weight) for part, source in zip(kept, named, strict=True)]), held_out


def _load(source: str, data: DataConfig) -> Conversations:
    return Conversations.load(source, data.split, strict=data.strict, limit=data.limit)


def store_of_run(config: RunConfig, draft: BaseDraft, reader: Reader) -> Store | None:
    """What a run keeps states in; None where it keeps none, or its target is no directory of safetensors that is read as it stands.

    Raises `ForedraftError` if another target's states are there.
    """
    settled = config.device_map or config.tp_plan or config.quantization
    directory = Path(config.target)
    as_it_stands = (directory / "config.json").exists() and any(directory.glob("*.safetensors")) and not list(directory.glob("adapter_*"))
    if config.hidden_states_cache is None or settled or not as_it_stands:
        return None
    target = load_config(config.target, config)
    dtype = target.dtype if config.target_dtype == "auto" else getattr(torch, config.target_dtype)
    if not isinstance(dtype, torch.dtype):
        return None
    needs = draft.algorithm.needs
    of = fingerprint_of(target, weights_of_files(config.target), draft.config.aux_layers, needs, dtype, tokenizer_of(reader))
    return store_of(config.hidden_states_cache, target, of, dtype, config.hidden_states_dtype, config.hidden_states_room is not None)
