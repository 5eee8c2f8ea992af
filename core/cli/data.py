"""`foredraft preview` and `foredraft regenerate`."""

from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from ..contracts.loading import Rendering
from ..errors import ForedraftError
from .common import (
    BaseUrlOption,
    DtypeOption,
    EngineArgumentsOption,
    EngineOption,
    StrictOption,
    TargetOption,
    WorkersOption,
    load_target,
    loads_target,
    server_of,
)

SplitOption = Annotated[str, typer.Option(help="split of the source, as in train[:100]")]


@loads_target
def preview(
    source: Annotated[str, typer.Argument(help="JSONL, parquet or datasets source of conversations")],
    target: TargetOption,
    loading: Rendering,
    index: Annotated[int, typer.Option(min=0, help="which conversation to show")] = 0,
    length: Annotated[int, typer.Option("--max-length", min=8, help="tokens per packed row; more of a conversation is not shown")] = 1024,
    split: SplitOption = "train",
    strict: StrictOption = False,
) -> None:
    """Show a conversation as the target sees it: green is supervised, the rest is context."""
    from rich.console import Console
    from rich.text import Text

    from ..data import Conversations, Renderer, pack
    from ..target.loading import load_tokenizer

    conversations = Conversations.load(source, split, strict=strict)
    reader = load_tokenizer(target, loading, conversations.have_images)
    if index >= len(conversations):
        raise ForedraftError(f"--index {index}: '{source}' has {len(conversations)} conversations")
    renderer = Renderer(reader)
    shown = renderer.render(conversations[index], length)
    text = Text()
    for span, tokens in groupby(zip(shown.ids, shown.spans, strict=True), key=itemgetter(1)):  # a character may be several tokens
        text.append(renderer.tokenizer.decode([token for token, _ in tokens]), style="bold green" if span >= 0 else "dim")
    console = Console()
    console.print(text)
    supervised = sum(s >= 0 for s in shown.spans)
    how = "the template's generation tags" if renderer.template.tagged else "rendering prefixes"
    console.print(f"\n[bold]{supervised} of {len(shown.ids)} tokens are supervised[/] (spans from {how})")
    console.print(pack(conversations, reader, length, strict=strict).info.description)


@loads_target
def regenerate(
    source: Annotated[str, typer.Argument(help="conversations or prompts to answer")],
    out: Annotated[Path, typer.Option(help="JSONL to write; one that is there is continued")],
    loading: Rendering,
    target: Annotated[str | None, typer.Option(help="directory or hub id of the target; of a server (--base-url) its name there")] = None,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_arguments: EngineArgumentsOption = None,
    workers: WorkersOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="conversations that a server is asked at once")] = 32,
    timeout: Annotated[float, typer.Option(min=0.001, help="seconds that a server may take for one answer")] = 600.0,
    batch_size: Annotated[int, typer.Option(min=1, help="conversations that are answered at once in this process")] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many conversations")] = None,
    seed: int = 0,
    dtype: DtypeOption = "auto",
    split: SplitOption = "train",
    strict: StrictOption = False,
) -> None:
    """Replace the assistant turns by the target's own answers: the largest single lever on acceptance.

    The target runs in this process, in an engine that is started for it, or in any OpenAI-compatible server that runs already.
    """
    from ..data import Conversations
    from ..data.regenerate import gather
    from ..data.regenerate import regenerate as run

    if target is None and base_url is None:
        raise ForedraftError("who answers? Pass --target DIRECTORY, or --base-url of a server")
    conversations = Conversations.load(source, split, strict=strict, limit=limit)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_new_tokens": max_new_tokens}
    if conversations.have_images and (engine or base_url):
        raise ForedraftError(f"'{source}' has images, which are not sent to servers: leave engine and base_url out, and name a target")
    if workers is not None:
        from ..data.spread import spread

        if engine or base_url:
            raise ForedraftError("--workers run the target themselves: leave --engine and --base-url out")
        load = partial(_begin, str(target), dtype, loading, conversations, {"batch_size": batch_size, **sampling})
        written = gather(out, conversations, lambda todo: spread(todo, load, workers, 4 * batch_size))
    elif engine is None and base_url is None:
        model, tokenizer = load_target(str(target), dtype, loading, conversations.have_images)
        written = run(model, tokenizer, conversations, out, batch_size=batch_size, **sampling)
    else:
        from ..data.asking import Asking, ask
        from ..serving import Server

        asking = Asking(**sampling, template_kwargs=loading.template_kwargs or {})
        with server_of(engine, base_url, target, engine_arguments, dtype, loading) as url:
            server = Server(url, target if base_url else None, timeout)
            written = ask(server, conversations, out, asking, concurrency=concurrency)
    print(f"{written} conversations answered into {out}")


def _begin(target: str, dtype: str, loading: Rendering, conversations: Any, settings: dict[str, Any]) -> Any:
    """In a worker: the target, and what answers some of the conversations."""
    from ..data.regenerate import answering

    return answering(*load_target(target, dtype, loading, conversations.have_images), conversations, **settings)
