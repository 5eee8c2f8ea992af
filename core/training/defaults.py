"""transformers' TrainingArguments with the defaults that training a draft needs."""

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_in_notebook, is_torch_bf16_gpu_available

from ..errors import ForedraftError
from .arguments import check_training
from .progress import A_TWENTIETH


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the defaults that training a draft needs."""

    output_dir: str | None = field(default="runs/draft", metadata={"help": "where checkpoints go"})
    learning_rate: float = field(default=4e-4, metadata={"help": "peak learning rate"})
    logging_steps: float = field(default=A_TWENTIETH, metadata={"help": "by default 20 times in a run, at least every 10 steps"})
    remove_unused_columns: bool = field(default=False, metadata={"help": "the collator reads all columns"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "a non-finite loss must stop the run, not be logged as 0"})
    report_to: str | list[str] | None = field(default="none", metadata={"help": "integrations to report to"})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints kept"})
    bf16: bool | None = field(default=None, metadata={"help": "products in bfloat16, weights in float32; by default where a device has it"})
    dataloader_num_workers: int | None = field(default=None, metadata={"help": "processes that make batches; default: 2, on the CPU none"})
    use_cpu: bool = field(default=False, metadata={"help": "train on the CPU; implied where there is no accelerator"})

    def __post_init__(self) -> None:
        """Without an accelerator the CPU is meant: transformers refuses `bf16` there unless told so. Bars are for terminals.

        Raises `ForedraftError` for values of another type, out of range, or naming trackers that are not installed.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init and getattr(self, f.name) != f.default}
        given = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        typed, problems = check_training(given)
        if problems:
            raise ForedraftError("\n".join(problems))
        for name, value in typed.items():
            setattr(self, name, value)
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.bf16 is None:
            self.bf16 = not (self.use_cpu or self.fp16) and has_bf16(torch.accelerator.current_accelerator())
        if self.dataloader_num_workers is None:
            self.dataloader_num_workers = 0 if self.use_cpu else 2
            self.dataloader_persistent_workers = not self.use_cpu
        if "accelerator_config" not in values and self.dataloader_pin_memory and not self.use_cpu:
            self.accelerator_config = {"non_blocking": True}
        if "disable_tqdm" not in values:
            self.disable_tqdm = not (sys.stderr.isatty() or is_in_notebook())
        if os.environ.pop("ACCELERATE_USE_FSDP", "false") == "true":  # by accelerate launch
            self.fsdp = True
        if self.fsdp and self.fsdp_config:
            raise ForedraftError(f"training.fsdp_config={self.fsdp_config}: leave it out, a draft is shared out as one unit")
        try:
            super().__post_init__()
            self.fsdp_plugin_args = None  # Accelerate would shard head and embedding by themselves, and losses read the head's weights
            for tracker in get_reporting_integration_callbacks(self.report_to):
                tracker()  # Trainer makes its own; this one tells what is not installed
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise ForedraftError(f"training arguments: {error}") from error


def has_bf16(device: torch.device | None) -> bool:
    """Whether a device multiplies bfloat16 itself: of CUDA's, those of compute capability 8.0 on."""
    if device is None or device.type == "cpu":
        return False
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else is_torch_bf16_gpu_available()
