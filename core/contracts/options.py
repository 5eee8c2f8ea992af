"""The base of all settings; apart from the contracts, so that the command line need not load torch for it."""

from pydantic import BaseModel, ConfigDict

MOST = 512
"""Layers, or aux layers, that a draft could have."""


class Frozen(BaseModel):
    """A configuration value: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
