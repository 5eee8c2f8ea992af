"""What a run will take: parameters, FLOPs, memory, speed, disk and hours, from its settings and its target's config alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from ..auto import auto_draft
from ..data import Conversations, Renderer, read_records
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..files.hub import locate
from ..files.reading import read_config
from ..target.cached import KEPT
from ..target.loading import load_config, load_tokenizer
from ..target.shards import FLOAT8
from .checks import check_draft, check_settled, open_start, sources
from .cost import Cost, Shape, count_step
from .defaults import DraftTrainingArguments
from .run import fresh_draft
from .settings import RunConfig

TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250, "L40S": 362, "RTX 4090": 165, "MI300X": 1307}
"""Peak of dense bfloat16 products with float32 sums, by what a device's name holds; from the makers' data sheets."""
DEVICE, MFU = "H100", 0.4
SAMPLE = 64
"""Conversations that are looked at."""
COUNTED = 2**28
"""Bytes of data up to which its conversations are counted one by one."""


@dataclass(frozen=True)
class Text:
    """The data, from a sample of it."""

    conversations: int | None
    """None: not known without reading much."""
    tokens: float
    """Per conversation, on average, those alone that fit a row."""
    supervised: float
    """Share of the tokens."""

    @property
    def epoch(self) -> float | None:
        """Tokens of all conversations."""
        return self.conversations * self.tokens if self.conversations else None


@dataclass(frozen=True)
class Plan:
    """Of one run; per device where nothing else is said."""

    algorithm: str
    adapter: str
    rows: int
    length: int
    dtype: str
    checkpointing: bool
    text: Text | None
    trained_parameters: int
    frozen_parameters: int
    gflop_per_token: dict[str, float]
    """Needed, forward and backward, by part."""
    bytes_per_token: float
    memory: dict[str, int]
    """Bytes: draft and optimizer, target, a step whose tokens are all supervised, and the sum."""
    device: str
    tflops: float
    mfu: float
    tokens_per_second: dict[str, float]
    """With the target run, and from stored states."""
    stored_bytes_per_token: int
    """In the dtype that they are kept in (`hidden_states_dtype`)."""
    stored_bytes: float | None
    """Of all the data; None where its size is not known."""
    tokens: float | None
    """That the run trains on; None where the data's size is not known."""
    hours: float
    """Of the run; where its tokens are not known, of a thousand million."""


def plan_run(config: RunConfig, *, device: str | None = None, tflops: float | None = None, mfu: float = MFU, devices: int = 1) -> Plan:
    """What `config`'s run takes on `devices` of a kind. No weights are loaded, nothing is computed: see `count_step`.

    Raises `ForedraftError` for a run that cannot start, a device whose peak is not known, and a step that cannot be counted.
    """
    problems: list[str] = []
    (check_settled if config.draft else check_draft)(config, problems)
    if problems:
        raise ForedraftError("this run cannot start:\n  " + "\n  ".join(problems))
    name, peak = peak_of(device, tflops)
    target, training, length = load_config(config.target, config), config.training, config.data.max_length
    text = look_at(config)
    rows, micro = training.get("per_device_train_batch_size") or 8, training.get("gradient_accumulation_steps") or 1
    document = min(length, max(2, round(text.tokens))) if text else length
    settings: dict[str, Any] = {
        "dtype": dtype_of(training),
        "target_dtype": _target_dtype(config, target),
        "checkpointing": bool(training.get("gradient_checkpointing")),
        "accumulated": micro > 1,
    }

    def count(supervised: float) -> Cost:
        return count_step(lambda: make_draft(config, target), target, Shape(rows, length, supervised, document), **settings)

    fullest = count(1.0)
    usual = count(text.supervised) if text else fullest
    speed = {kind: mfu * 1e12 * peak / usual.per_token(stored=kind == "stored") for kind in ("online", "stored")}
    epoch = text.epoch if text else None
    tokens = _tokens(training, rows * length * devices * micro, epoch)
    first = min(tokens or 1e9, epoch or float("inf")) if config.hidden_states_cache else tokens or 1e9
    seconds = first / speed["online"] + ((tokens or 1e9) - first) / speed["stored"]
    draft = fullest.draft
    # transformers' Trainer fetches all micro-batches of a step before the first.
    waiting = (micro - 1) * fullest.state_bytes if config.hidden_states_cache else 0
    kept = KEPT[config.hidden_states_dtype] or settings["target_dtype"]
    scale = 4 / target.get_text_config().hidden_size if kept == FLOAT8 else 0
    stored = round(fullest.state_bytes / fullest.tokens / settings["target_dtype"].itemsize * (kept.itemsize + scale))
    return Plan(
        algorithm=draft["algorithm"],
        adapter=draft["adapter"],
        rows=rows,
        length=length,
        dtype=str(settings["dtype"]).removeprefix("torch."),
        checkpointing=settings["checkpointing"],
        text=text,
        trained_parameters=fullest.trained,
        frozen_parameters=fullest.frozen,
        gflop_per_token={part: n / usual.tokens / 1e9 for part, n in usual.flops.items()},
        bytes_per_token=fullest.bytes_per_token,
        memory={
            "draft and optimizer": fullest.draft_bytes,
            "target": fullest.target_bytes,
            "step": fullest.step_bytes + waiting,
            "sum": fullest.peak_bytes + waiting,
        },
        device=name,
        tflops=peak,
        mfu=mfu,
        tokens_per_second=speed,
        stored_bytes_per_token=stored,
        stored_bytes=epoch and epoch * stored,
        tokens=tokens,
        hours=seconds / 3600 / devices,
    )


def make_draft(config: RunConfig, target: PretrainedConfig) -> BaseDraft:
    """The draft that a run trains, fresh. Raises what `auto_draft` raises."""
    if config.draft is None:
        draft = fresh_draft(config, target)
    else:
        path = locate(config.draft)
        fields = read_config(path)
        draft = auto_draft(fields if "foredraft" in fields else open_start(config).config, None, **config.options)
        if config.draft_vocab_size:
            draft.resize_vocabulary(target.get_text_config().vocab_size, config.draft_vocab_size)
    draft.embed_tokens.requires_grad_(config.train_embedding)
    return draft


def look_at(config: RunConfig) -> Text | None:
    """The run's data, by its first conversations; None where it, or the tokenizer, is not there."""
    tokens, share = list[int](), list[int]()
    number: float | None = 0
    try:
        for source in sources(config.data.train):
            some = Conversations.load(source.path, config.data.split, limit=min(SAMPLE, config.data.limit or SAMPLE))
            renderer = Renderer(load_tokenizer(config.target, config, some.have_images))
            rendered, _ = renderer.render_all(some, config.data.max_length)
            tokens += [len(r.ids) for r in rendered]
            share += [sum(s >= 0 for s in r.spans) for r in rendered]
            number = number + n * source.weight if number is not None and (n := _number(source.path, config)) is not None else None
    except ForedraftError:
        return None
    if not tokens:
        return None
    counted = None if number is None else max(0, round(number) - config.data.held_out)
    return Text(counted, sum(tokens) / len(tokens), sum(share) / sum(tokens))


def _number(source: str, config: RunConfig) -> int | None:
    """Conversations of a source; None if that would take long to know."""
    files = [file for place in glob(str(Path(source).expanduser())) for file in (Path(place), *Path(place).rglob("*")) if file.is_file()]
    if not files or sum(file.stat().st_size for file in files) > COUNTED:
        return None
    return sum(1 for _ in islice(read_records(source, config.data.split), config.data.limit))


def _tokens(training: Mapping[str, Any], per_step: int, epoch: float | None) -> float | None:
    """What the run trains on."""
    if (steps := training.get("max_steps") or 0) > 0:
        return float(steps * per_step)
    epochs: float = training.get("num_train_epochs") or DraftTrainingArguments.num_train_epochs
    return None if epoch is None else epochs * epoch


def peak_of(device: str | None, tflops: float | None) -> tuple[str, float]:
    """(name, peak in TFLOP/s) of the device asked for, else of the one that is here, else of an H100."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else DEVICE
    name = device or (here if any(known in here for known in TFLOPS) else DEVICE)
    if tflops is not None:
        return name, tflops
    found = [peak for known, peak in TFLOPS.items() if known.lower() in name.lower()]
    if not found:
        raise ForedraftError(f"the peak of device '{name}' is not known: choose {', '.join(TFLOPS)}, or say it by --tflops")
    return name, float(found[0])


def dtype_of(training: Mapping[str, Any]) -> torch.dtype:
    """What the draft is computed in: bfloat16, unless the run says float16 or turns bfloat16 off."""
    if training.get("fp16"):
        return torch.float16
    return torch.float32 if training.get("bf16") is False else torch.bfloat16


def _target_dtype(config: RunConfig, target: PretrainedConfig) -> torch.dtype:
    named = target.dtype if config.target_dtype == "auto" else config.target_dtype
    found = getattr(torch, str(named).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16
