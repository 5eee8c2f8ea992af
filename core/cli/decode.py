"""`foredraft generate` and `foredraft eval`."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contracts.loading import Rendering
from ..errors import ForedraftError, gathering
from .common import (
    BaseUrlOption,
    DraftTokensOption,
    DtypeOption,
    EngineArgumentsOption,
    EngineOption,
    LossyOption,
    MinAcceptanceOption,
    MinConfidenceOption,
    StrictOption,
    TargetOption,
    check_dtype,
    load_draft_for,
    load_questions,
    load_target,
    loads_target,
)

if TYPE_CHECKING:
    from ..contracts.algorithm import DrafterBase
    from ..decoding import TreeShape
    from ..decoding.evaluate import Evaluation, Prompt
    from ..decoding.tree import Lossy

DraftOption = Annotated[str | None, typer.Option("--draft", help="directory or hub id of the draft")]
AlgorithmOption = Annotated[
    str | None, typer.Option("--algorithm", help="an algorithm that needs no draft: prompt_lookup, suffix; with --draft it is asked first")
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
    min_confidence: MinConfidenceOption = 0.0,
    min_acceptance: MinAcceptanceOption = 0.0,
    lossy: LossyOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    dtype: DtypeOption = "auto",
) -> None:
    """Stream an answer, drafted and verified, then print τ and tokens per second."""
    import torch
    from transformers import TextStreamer

    from ..contracts.algorithm import tokens_to_draft
    from ..data import conversation_of, tokenizer_of
    from ..decoding import DraftingStats
    from ..decoding import generate as run
    from ..decoding.evaluate import encode, sampling
    from ..decoding.generate import algorithm_and_draft

    problems: list[str] = []
    found, first, shape = _chosen(draft, algorithm, options, tree, dtype, problems)
    rule = _rule(lossy, problems)
    _raise(problems)
    asked = conversation_of({"prompt": prompt, **({"images": image} if image else {})})
    model, reader = load_target(target, dtype, loading, bool(image))
    tokenizer = tokenizer_of(reader)
    drafter = load_draft_for(found, model) if isinstance(found, Path) else found
    assert drafter is not None
    chain = tokens_to_draft(num_draft_tokens, algorithm_and_draft(drafter)[0].max_tokens)
    inputs: dict[str, Any] = encode(reader, asked, model)
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
        min_confidence=min_confidence,
        min_acceptance=min_acceptance,
        first=first,
        lossy=rule,
        stats=stats,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id or 0,
        **sampling(temperature),
    )
    seconds, tokens = time.perf_counter() - start, out.shape[1] - ids.shape[1]
    drafted = f"{shape}, {shape.num_nodes} nodes" if shape else f"chain of {chain}"
    acceptance = " ".join(f"{a:.2f}" for a in stats.acceptance)
    drafted += f"; LOSSY ({rule}): the text differs from the target's own" if rule else ""
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
    min_confidence: MinConfidenceOption = 0.0,
    min_acceptance: MinAcceptanceOption = 0.0,
    lossy: LossyOption = None,
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
    from ..decoding.evaluate import have_images
    from ..decoding.served import parse_loads
    from .served import Asked, evaluate_served

    loads, served, problems = [1], engine is not None or base_url is not None, list[str]()
    if served:
        with gathering(problems):
            loads = parse_loads(concurrency)
        if algorithm or options or tree or record or min_confidence or min_acceptance or lossy:
            surplus = "--algorithm and its options, --tree, --min-confidence, --min-acceptance, --lossy and --record"
            problems.append(f"a server is measured with its own --draft: leave out {surplus}")
        if engine is not None and (target is None or draft is None):
            problems.append("--engine starts a server for --target and --draft: name both; --base-url measures one that runs")
    elif target is None:
        problems.append("whose draft? Pass --target DIRECTORY, or --base-url of a server")
    found, first, shape = _chosen(draft, *(None, None) if served else (algorithm, options), tree, dtype, problems, needed=not served)
    problems += _unrecordable(draft) if record and not served else []
    if (rule := _rule(lossy, problems)) and record:
        problems.append("--record notes the τ of a draft that changes no output: leave out --lossy")
    questions = load_questions(prompts, limit, strict, problems)
    if (seeing := any(map(have_images, questions.values()))) and served:
        problems.append("the prompts have images, which are not sent to servers: leave engine and base_url out")
    _raise(problems)
    how: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": max_new_tokens, "temperature": temperature}
    if served:
        where = (target, found if isinstance(found, Path) else None, engine, base_url, engine_arguments, loads)
        evaluate_served(Asked(*where, **how, dtype=dtype, baseline=baseline, ours=ours, loading=loading), questions, out)
        return
    model, reader = load_target(str(target), dtype, loading, seeing)
    drafter = load_draft_for(found, model) if isinstance(found, Path) else found
    how |= {"tree": shape, "first": first, "min_confidence": min_confidence, "min_acceptance": min_acceptance, "lossy": rule}
    results = _measured(model, drafter, reader, questions, baseline=baseline, **how)
    for name, result in results.items():
        result.settings |= {"prompts": name, **loading.model_dump(include={"chat_template", "template_kwargs"}, exclude_none=True)}
    _tell(results, out, found if record else None)


def _tell(results: "Mapping[str, Evaluation]", out: Path | None, draft: "Path | DrafterBase | None") -> None:
    """On the terminal, as JSON and a plot, and in the config of `draft`. Raises `ForedraftError` where the draft changed the output."""
    from rich.console import Console

    from ..decoding.report import demand_identical, plot_acceptance, table
    from ..files.ours import record
    from ..files.writing import write_text

    console = Console()
    console.print(table(results))
    if out is not None:
        write_text(out, json.dumps({name: result.to_dict() for name, result in results.items()}, indent=2))
        plot_acceptance(results, out.with_suffix(".png"))
        console.print(f"written: {out} and {out.with_suffix('.png')}")
    if isinstance(draft, Path):
        shares = {name: [round(a, 4) for a in result.acceptance] for name, result in results.items()}
        record(draft, {name: {"tau": round(r.tau, 3), "acceptance": shares[name], **r.settings} for name, r in results.items()})
    demand_identical(results)


def _measured(model: Any, drafter: Any, reader: Any, questions: "Mapping[str, list[Prompt]]", **how: Any) -> "dict[str, Evaluation]":
    """What each prompt set gives in this process, with a bar for each."""
    from rich.progress import Progress

    from ..decoding import evaluate as run

    results = {}
    with Progress() as bar:
        for name, asked in questions.items():
            task = bar.add_task(name, total=len(asked))

            def show(n: int, stats: Any, task: Any = task, name: str = name) -> None:
                bar.update(task, completed=n, description=f"{name}  τ {stats.tau:.2f}")

            results[name] = run(model, drafter, reader, asked, progress=show, **how)
    return results


def _rule(lossy: str | None, problems: list[str]) -> "Lossy | None":
    from ..decoding.tree import Lossy

    with gathering(problems):
        return Lossy.parse(lossy) if lossy else None
    return None


def _unrecordable(draft: str | None) -> list[str]:
    """Why τ cannot be noted in the draft."""
    if draft is None:
        return ["--record notes τ in a draft's config.json: there is none without --draft"]
    if not Path(draft).exists():
        return [f"--record: '{draft}' is on the hub, and τ is noted in a directory: `hf download {draft} --local-dir DIR`"]
    return []


def _chosen(
    draft: str | None,
    algorithm: str | None,
    options: list[str] | None,
    tree: str | None,
    dtype: str,
    problems: list[str],
    needed: bool = True,
) -> "tuple[Path | DrafterBase | None, DrafterBase | None, TreeShape | None]":
    """Who drafts, who is asked first, in which shape; adds to `problems` what is wrong. Where none is `needed`, a named draft is found."""
    from ..decoding import TreeShape

    found, first, shape = None, None, None
    with gathering(problems):
        check_dtype(dtype)
    with gathering(problems):
        shape = TreeShape.parse(tree) if tree else None
    if needed or draft is not None:
        with gathering(problems):
            found, first = _found(draft, algorithm, options)
    return found, first, shape


def _raise(problems: list[str]) -> None:
    if problems:
        raise ForedraftError("\n".join(problems))


def _found(draft: str | None, algorithm: str | None, options: list[str] | None) -> "tuple[Path | DrafterBase, DrafterBase | None]":
    """The draft's directory or the algorithm that needs none, or both: that which is asked first is the second then.

    Raises `ForedraftError` where neither is named, or options of no algorithm.
    """
    from ..decoding.generate import without_model
    from ..files.hub import find_draft
    from ..registry import default_registry
    from ..training.settings import parse_options

    if not algorithm and (draft is None or options):
        raise ForedraftError("who drafts? Pass --draft DIRECTORY, or --algorithm NAME [key=value ...] for one that needs no draft, or both")
    how = without_model(default_registry().make_algorithm(algorithm, parse_options(options or []))) if algorithm else None
    if draft is not None:
        return find_draft(draft), how
    assert how is not None
    return how, None
