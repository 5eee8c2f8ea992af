"""`foredraft preview` and `foredraft regenerate`."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from ..contracts.loading import Rendering
from .common import DtypeOption, StrictOption, TargetOption, load_target, loads_target

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
    from ..errors import ForedraftError
    from ..target.loading import load_tokenizer

    tokenizer = load_tokenizer(target, loading)
    conversations = Conversations.load(source, split, strict=strict)
    if index >= len(conversations):
        raise ForedraftError(f"--index {index}: '{source}' has {len(conversations)} conversations")
    renderer = Renderer(tokenizer)
    shown = renderer.render(conversations[index], length)
    text = Text()
    for span, tokens in groupby(zip(shown.ids, shown.spans, strict=True), key=itemgetter(1)):  # a character may be several tokens
        text.append(tokenizer.decode([token for token, _ in tokens]), style="bold green" if span >= 0 else "dim")
    console = Console()
    console.print(text)
    supervised = sum(s >= 0 for s in shown.spans)
    how = "the template's generation tags" if renderer.template.tagged else "rendering prefixes"
    console.print(f"\n[bold]{supervised} of {len(shown.ids)} tokens are supervised[/] (spans from {how})")
    console.print(pack(conversations, tokenizer, length, strict=strict).info.description)


@loads_target
def regenerate(
    source: Annotated[str, typer.Argument(help="conversations or prompts to answer")],
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="JSONL to write; one that is there is continued")],
    loading: Rendering,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many conversations")] = None,
    seed: int = 0,
    dtype: DtypeOption = "auto",
    split: SplitOption = "train",
    strict: StrictOption = False,
) -> None:
    """Replace the assistant turns by the target's own answers: the largest single lever on acceptance."""
    from ..data import Conversations
    from ..data.regenerate import regenerate as run

    conversations = Conversations.load(source, split, strict=strict, limit=limit)
    model, tokenizer = load_target(target, dtype, loading)
    written = run(
        model,
        tokenizer,
        conversations,
        out,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    print(f"{written} conversations answered into {out}")
