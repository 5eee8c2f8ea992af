"""Training: the trainer, runs described by a YAML file, checkpoints to resume from."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..target.cached import CachedTarget
    from .defaults import DraftTrainingArguments
    from .trainer import DraftTrainer, NonFiniteLoss

__all__ = ["CachedTarget", "DraftTrainer", "DraftTrainingArguments", "NonFiniteLoss"]


def __getattr__(name: str) -> Any:
    """On first use, so that the settings of a run can be read without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'foredraft.training' has no attribute '{name}'")
    if name == "CachedTarget":
        from ..target import cached as cache

        return cache.CachedTarget
    from . import trainer

    return getattr(trainer, name)
