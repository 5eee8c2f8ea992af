"""A draft named in transformers' own `generate`: what `custom_generate/generate.py` in a draft's directory calls."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..auto import auto_draft
from ..errors import ForedraftError
from ..files.hub import find_draft
from .generate import generate


def decode(
    model: PreTrainedModel,
    draft: str | Path | None,
    inputs: Tensor | None = None,
    input_ids: Tensor | None = None,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """`foredraft.generate` with the draft in a directory or on the hub; the model keeps it for the next call.

    `kwargs` are those of `model.generate` and of `foredraft.generate`. Raises `ForedraftError` as both do, and if no draft is named.
    """
    ids = inputs if inputs is not None else input_ids
    if draft is None or ids is None:
        raise ForedraftError(f"which {'draft' if draft is None else 'prompt'}? Pass {'draft=DIRECTORY' if draft is None else 'input_ids'}")
    named = (str(draft), revision)
    if getattr(model, "_foredraft", (None,))[0] != named:
        loaded = auto_draft(find_draft(draft, revision)).to(model.device, model.dtype).eval()
        model._foredraft = (named, loaded)  # in a tuple: it is no part of the model
    return generate(model, model._foredraft[1], ids, **{name: value for name, value in kwargs.items() if value is not None})
