"""What several commands share: loading models, and options that mean the same everywhere."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ForedraftError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..draft import BaseDraft

TargetOption = Annotated[str, typer.Option("--target", help="directory or hub id of the target")]
DraftOption = Annotated[str, typer.Option("--draft", help="directory of the draft")]
DtypeOption = Annotated[str, typer.Option(help="dtype to run in: auto, float32, bfloat16, float16")]
DraftTokensOption = Annotated[
    int,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        min=1,
        help="tokens drafted per pass of the target; drafts made at once hold no more than was trained (a block of DFlash: block_size - 1)",
    ),
]


def load_target(name: str, dtype: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The target, on the GPU if there is one, and its tokenizer. Raises `ForedraftError` if it is not there."""
    import torch
    from transformers.utils import logging

    from .. import target

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ForedraftError(f"--dtype {dtype}: choose auto, float32, bfloat16 or float16")
    logging.disable_progress_bar()
    tokenizer, model = target.load_tokenizer(name), target.load_target(name, dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def load_draft_for(path: str, target: Any) -> "BaseDraft":
    """The draft in `path`, in the target's dtype and on its device."""
    from ..auto import auto_draft
    from ..checkpoint import read_config
    from ..decoding.generate import check_pair

    if "foredraft" not in read_config(path):  # auto_draft would plan a fresh draft for it
        raise ForedraftError(f"'{path}' is no draft: its config.json has no 'foredraft' entry")
    draft = auto_draft(path)
    check_pair(target, draft)
    return draft.to(target.device, target.dtype).eval()
