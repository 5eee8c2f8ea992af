"""What several commands share: loading models, and options that mean the same everywhere."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contracts.loading import Loading, Rendering
from ..errors import ForedraftError, gathering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..data import Reader
    from ..decoding.evaluate import Prompt
    from ..draft.model import BaseDraft

TargetOption = Annotated[str, typer.Option("--target", help="directory or hub id of the target")]
DtypeOption = Annotated[str, typer.Option(help="dtype to run in: auto, float32, bfloat16, float16")]
StrictOption = Annotated[bool, typer.Option("--strict", help="stop at the first record that cannot be used, instead of skipping it")]
EngineOption = Annotated[str | None, typer.Option("--engine", help="start this engine's server for it: vllm, ... (`foredraft plugins`)")]
BaseUrlOption = Annotated[str | None, typer.Option("--base-url", help="a server that runs already, as in http://localhost:8000")]
EngineArgumentsOption = Annotated[
    str | None, typer.Option("--engine-arguments", help="further arguments of the server, as in '--tensor-parallel-size 8'")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="processes that each run the target, here or on a Ray cluster (foredraft[ray])")
]
DraftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        min=1,
        help="tokens drafted per pass of the target; default: all that the draft makes at once (a block of DFlash), else 4",
    ),
]

LossyOption = Annotated[
    str | None,
    typer.Option(
        "--lossy",
        metavar="RULE",
        help="accept more than the target would say, so that the output is NOT the target's: lenience=0.8, or typical=0.09,0.3",
    ),
]
MinConfidenceOption = Annotated[
    float,
    typer.Option(
        "--min-confidence",
        min=0,
        max=0.999,
        help="end a draft (of a tree: a branch) that would be less likely accepted whole, as the draft sees it; 0: never",
    ),
]

MinAcceptanceOption = Annotated[
    float,
    typer.Option(
        "--min-acceptance",
        min=0,
        max=0.999,
        help="draft only as many tokens as would, at the rate of the latest rounds, be accepted whole with this chance; 0: no matter",
    ),
]


def loads_target(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of its `Repository`, `Loading` or `Rendering` as options, handed to it as `loading`."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["loading"].annotation
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[
                bool if field.annotation is bool else str | None, typer.Option(f"--{name.replace('_', '-')}", help=field.description)
            ],
        )
        for name, field in kind.model_fields.items()
    ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        loading = kind(**{option.name: given.pop(option.name) for option in options})
        command(**given, loading=loading)

    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in signature.parameters.items() if name != "loading"]
    with_options.__dict__["__signature__"] = signature.replace(parameters=[*own, *options])
    return with_options


def show_keys(title: str, rows: "Iterable[tuple[str, str, str, str]]") -> None:
    """A table of keys on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in ("key", "type", "default", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def check_dtype(dtype: str) -> None:
    """Raises `ForedraftError` for a name that is none."""
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ForedraftError(f"--dtype {dtype}: choose auto, float32, bfloat16 or float16")


def load_target(name: str, dtype: str, loading: Loading, images: bool = False) -> "tuple[PreTrainedModel, Reader]":
    """The target, on the GPU if there is one and nothing else is asked for, and its tokenizer or, for `images`, its processor.

    Raises `ForedraftError` if there is none.
    """
    import torch
    from transformers.utils import logging

    from ..target import loading as load

    check_dtype(dtype)
    logging.disable_progress_bar()
    tokenizer = load.load_tokenizer(name, loading, images)
    return load.load_target(name, dtype, loading, "cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def load_draft_for(path: Path, target: Any) -> "BaseDraft":
    """The draft in `path`, a directory of ours or a file of any format, in the target's dtype and on its device."""
    from ..files.reading import read_config
    from ..formats import open_draft
    from ..target.pairing import check_pair

    if not path.is_file() and "foredraft" not in read_config(path):
        raise ForedraftError(f"'{path}' is no draft: its config.json has no 'foredraft' entry")
    draft = open_draft(path, target.config.name_or_path)
    check_pair(target, draft)
    return draft.to(target.device, target.dtype).eval()


def load_questions(files: list[Path], limit: int | None, strict: bool, problems: list[str]) -> "dict[str, list[Prompt]]":
    """The prompts of each file, by its name; adds to `problems` what keeps them from being asked."""
    from ..decoding import load_prompts

    questions = {}
    for file in files:
        with gathering(problems):
            questions[file.stem] = load_prompts(file, limit, strict=strict)
    if len({file.stem for file in files}) < len(files):
        problems.append(f"prompt files are told apart by their names, found {', '.join(map(str, files))}")
    return questions


def server_of(
    engine: str | None, base_url: str | None, target: str | None, arguments: str | None, dtype: str, loading: Loading
) -> "AbstractContextManager[str]":
    """The base URL of the server that is there, or of one that `engine` starts for the target and that ends with the block."""
    from ..registry import default_registry
    from ..serving.process import running_engine

    if base_url is not None:
        return nullcontext(base_url)
    started = default_registry().engine(str(engine))()
    command = started.server(str(target))
    if command is None:
        raise ForedraftError(f"engine '{engine}' has no server: leave --engine out, and transformers runs the target")
    template = ["--chat-template", loading.chat_template] if isinstance(loading, Rendering) and loading.chat_template else []
    return running_engine([*command, *template, *started.repository_arguments(loading, dtype)], arguments)
