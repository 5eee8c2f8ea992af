"""`foredraft generate` and `foredraft eval`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contracts.loading import Rendering
from ..errors import ForedraftError
from .common import (
    BaseUrlOption,
    DraftTokensOption,
    DtypeOption,
    EngineArgumentsOption,
    EngineOption,
    StrictOption,
    TargetOption,
    load_draft_for,
    load_target,
    loads_target,
)

if TYPE_CHECKING:
    from ..contracts.algorithm import DrafterBase

DraftOption = Annotated[str | None, typer.Option("--draft", help="directory or hub id of the draft")]
AlgorithmOption = Annotated[
    str | None, typer.Option("--algorithm", help="in place of a draft, an algorithm that needs none: prompt_lookup")
]
OptionsArgument = Annotated[list[str] | None, typer.Argument(help="key=value: options of that algorithm (`foredraft info NAME`)")]
TreeOption = Annotated[
    str | None, typer.Option("--tree", metavar="DEPTH,TOP_K,NODES", help="draft trees of this shape instead of chains, such as 5,8,32")
]


@loads_target
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask")],
    target: TargetOption,
    loading: Rendering,
    options: OptionsArgument = None,
    image: Annotated[list[Path] | None, typer.Option(help="file of an image that the question is about; may be given again")] = None,
    draft: DraftOption = None,
    algorithm: AlgorithmOption = None,
    num_draft_tokens: DraftTokensOption = None,
    tree: TreeOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    dtype: DtypeOption = "auto",
) -> None:
    """Stream an answer, drafted and verified, then print τ and tokens per second."""
    import torch
    from transformers import TextStreamer

    from ..contracts.algorithm import tokens_to_draft
    from ..data import conversation_of, tokenizer_of
    from ..decoding import DraftingStats, TreeShape
    from ..decoding import generate as run
    from ..decoding.evaluate import encode, sampling
    from ..decoding.generate import algorithm_and_draft

    shape, found = TreeShape.parse(tree) if tree else None, _found(draft, algorithm, options)
    asked = conversation_of({"prompt": prompt, **({"images": image} if image else {})})
    model, reader = load_target(target, dtype, loading, bool(image))
    tokenizer = tokenizer_of(reader)
    drafter = load_draft_for(found, model) if isinstance(found, Path) else found
    chain = tokens_to_draft(num_draft_tokens, algorithm_and_draft(drafter)[0].max_tokens)
    inputs: dict[str, Any] = encode(reader, asked, model.device)
    ids = inputs["input_ids"]
    stats = DraftingStats()
    start = time.perf_counter()
    out = run(
        model,
        drafter,
        **inputs,
        attention_mask=torch.ones_like(ids),  # else transformers hides what looks like padding
        num_draft_tokens=chain,
        tree=shape,
        stats=stats,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id or 0,
        **sampling(temperature),
    )
    seconds, tokens = time.perf_counter() - start, out.shape[1] - ids.shape[1]
    drafted = f"{shape}, {shape.num_nodes} nodes" if shape else f"chain of {chain}"
    acceptance = " ".join(f"{a:.2f}" for a in stats.acceptance)
    print(f"\nτ {stats.tau:.2f} ({drafted}), accepted per position: {acceptance}; {tokens / seconds:.1f} tokens/s ({model.dtype})")


@loads_target
def evaluate(
    prompts: Annotated[list[Path], typer.Option(help="conversations or prompts, in any form that training reads; may be given again")],
    loading: Rendering,
    target: Annotated[str | None, typer.Option("--target", help="directory or hub id of the target; not needed with --base-url")] = None,
    options: OptionsArgument = None,
    draft: DraftOption = None,
    algorithm: AlgorithmOption = None,
    num_draft_tokens: DraftTokensOption = None,
    tree: TreeOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many prompts")] = None,
    dtype: DtypeOption = "auto",
    baseline: Annotated[bool, typer.Option(help="also decode without the draft, and compare")] = True,
    out: Annotated[Path | None, typer.Option(help="write the result as JSON here, and the plot beside it")] = None,
    record: Annotated[bool, typer.Option(help="note τ in the draft's config.json")] = False,
    strict: StrictOption = False,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_arguments: EngineArgumentsOption = None,
    concurrency: Annotated[str, typer.Option(help="of a server: how many requests at once")] = "1,4,16",
    ours: Annotated[
        bool, typer.Option(help="with --engine: also draft in this process, to show its acceptance beside the engine's")
    ] = True,
) -> None:
    """Measure τ, acceptance per position and speed; greedy outputs must equal plain decoding's.

    In this process, or where the draft serves: `--engine` starts the engine's server with and without it, `--base-url` asks one that runs.
    """
    from rich.console import Console
    from rich.progress import Progress

    from ..decoding import TreeShape, load_prompts
    from ..decoding import evaluate as run
    from ..decoding.evaluate import have_images
    from ..decoding.report import demand_identical, plot_acceptance, table
    from ..files.ours import record as note
    from ..files.writing import write_text

    served = engine is not None or base_url is not None
    if served and (algorithm or options or tree or record):
        raise ForedraftError("a server is measured with its own --draft: leave out --algorithm and its options, --tree and --record")
    if target is None and not served:
        raise ForedraftError("whose draft? Pass --target DIRECTORY, or --base-url of a server")
    found = None if served and draft is None else _found(draft, algorithm, options)
    if record and draft is None:
        raise ForedraftError("--record notes τ in a draft's config.json: there is none without --draft")
    if record and not Path(str(draft)).exists():
        raise ForedraftError(f"--record: '{draft}' is on the hub, and τ is noted in a directory: `hf download {draft} --local-dir DIR`")
    questions = {file.stem: load_prompts(file, limit, strict=strict) for file in prompts}
    if len(questions) < len(prompts):
        raise ForedraftError(f"prompt files are told apart by their names, found {', '.join(str(file) for file in prompts)}")
    seeing = any(map(have_images, questions.values()))
    if seeing and served:
        raise ForedraftError("the prompts have images, which are not sent to servers: leave engine and base_url out")
    if served:
        from .served import Asked, evaluate_served

        given = found if isinstance(found, Path) else None
        how: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": max_new_tokens, "temperature": temperature}
        where = (target, given, engine, base_url, engine_arguments, concurrency)
        evaluate_served(Asked(*where, **how, dtype=dtype, baseline=baseline, ours=ours, loading=loading), questions, out)
        return
    shape = TreeShape.parse(tree) if tree else None
    model, tokenizer = load_target(str(target), dtype, loading, seeing)
    assert found is not None
    drafter = load_draft_for(found, model) if isinstance(found, Path) else found
    console = Console()
    results = {}
    with Progress(console=console) as bar:
        for name, asked in questions.items():
            task = bar.add_task(name, total=len(asked))
            results[name] = run(
                model,
                drafter,
                tokenizer,
                asked,
                num_draft_tokens=num_draft_tokens,
                tree=shape,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                baseline=baseline,
                progress=lambda n, stats, task=task, name=name: bar.update(task, completed=n, description=f"{name}  τ {stats.tau:.2f}"),
            )
            template = loading.model_dump(include={"chat_template", "template_kwargs"}, exclude_none=True)
            results[name].settings |= {"prompts": name, **template}
    console.print(table(results))
    if out is not None:
        write_text(out, json.dumps({name: result.to_dict() for name, result in results.items()}, indent=2))
        plot_acceptance(results, out.with_suffix(".png"))
        console.print(f"written: {out} and {out.with_suffix('.png')}")
    if record and isinstance(found, Path):
        note(found, {name: {"tau": round(result.tau, 3), **result.settings} for name, result in results.items()})
    demand_identical(results)


def _found(draft: str | None, algorithm: str | None, options: list[str] | None) -> "Path | DrafterBase":
    """The draft's directory, or the algorithm that needs none. Raises `ForedraftError` unless it is one of them."""
    from ..decoding.generate import algorithm_and_draft
    from ..files.hub import find_draft
    from ..registry import default_registry
    from ..training.settings import parse_options

    if draft is not None and not (algorithm or options):
        return find_draft(draft)
    if draft is not None or algorithm is None:
        raise ForedraftError("who drafts? Pass --draft DIRECTORY, or --algorithm NAME [key=value ...] for one that needs no draft")
    return algorithm_and_draft(default_registry().make_algorithm(algorithm, parse_options(options or [])))[0]
