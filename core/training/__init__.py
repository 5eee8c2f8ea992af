"""Training: the trainer, runs described by a YAML file, checkpoints to resume from."""

from .cache import CachedTarget
from .trainer import DraftTrainer, DraftTrainingArguments, NonFiniteLoss

__all__ = ["CachedTarget", "DraftTrainer", "DraftTrainingArguments", "NonFiniteLoss"]
