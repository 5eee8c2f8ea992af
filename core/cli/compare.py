"""`foredraft compare`: several drafts on the same prompts; those that runs describe are trained first."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contracts.loading import Rendering
from ..errors import ForedraftError, gathering
from .common import DraftTokensOption, DtypeOption, StrictOption, load_draft_for, load_questions, load_target, loads_target

if TYPE_CHECKING:
    from ..contracts.algorithm import DrafterBase
    from ..decoding.evaluate import Evaluation, Prompt
    from ..decoding.report import Row
    from ..training.settings import RunConfig

    Measure = Callable[[Any, str], Evaluation]

RESULTS = "comparison.json"


@dataclass(frozen=True)
class Compared:
    """One of those that are compared."""

    name: str
    draft: Path | None
    """Its directory, where a run may have it yet to write; None: it has no weights."""
    run: "RunConfig | None" = None
    algorithm: "DrafterBase | None" = None


@loads_target
def compare(
    named: Annotated[
        list[str], typer.Argument(metavar="RUN.yaml|DRAFT|ALGORITHM ...", help="runs, drafts, and algorithms without weights")
    ],
    prompts: Annotated[list[Path], typer.Option(help="conversations or prompts, in any form that training reads; may be given again")],
    loading: Rendering,
    out: Annotated[Path, typer.Option(help="directory of the table, the plot and the JSON; what is finished there is kept")] = Path(
        "comparison"
    ),
    target: Annotated[str | None, typer.Option("--target", help="directory or hub id of the target; default: the runs'")] = None,
    num_draft_tokens: DraftTokensOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many prompts of each file")] = None,
    dtype: DtypeOption = "auto",
    baseline: Annotated[bool, typer.Option(help="beside each draft also decode without it: speed-ups, and whether texts are equal")] = True,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="decode each prompt once, without a draft, and see what each makes of that text: no speeds"),
    ] = False,
    strict: StrictOption = False,
) -> None:
    """Measure several drafts on the same prompts in one run, training those that are not there yet; a table, a plot and JSON.

    A comparison that was ended goes on: trainings from their checkpoints, and what is measured is kept.
    """
    from ..decoding.evaluate import have_images
    from ..files.writing import write_text
    from ..training.checks import check_writable
    from ..training.run import train

    problems: list[str] = []
    found = _found(named, problems)
    questions = load_questions(prompts, limit, strict, problems)
    with gathering(problems):
        check_writable(out, "--out")
    target, loading = _target(found, target, loading, problems)
    for one in found if target else ():
        with gathering(problems):
            _check(one, str(target), loading, num_draft_tokens)
    _check_shared(found, problems)
    if replay and temperature:
        problems.append(f"--replay --temperature {temperature:g}: what a sample would be depends on the draft: leave one of them out")
    how: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": max_new_tokens}
    decoded = {"temperature": temperature, "baseline": baseline and not replay}
    prompted = {name: _digest(json.dumps(texts, default=str).encode()) for name, texts in questions.items()}
    asked = {**how, **decoded, "replay": replay, "dtype": dtype, "target": target, "prompts": prompted}
    with gathering(problems):
        rows: dict[str, Row] = _earlier(out / RESULTS, asked, [one.name for one in found])
    if problems:
        raise ForedraftError("this comparison cannot start:\n  " + "\n  ".join(problems))
    for run in sorted((one.run for one in found if one.run is not None), key=_reads, reverse=True):
        train(run)
    model, reader = load_target(str(target), dtype, loading, any(map(have_images, questions.values())))
    measure: dict[str, Measure] = {
        name: _replaying(out / f"{name}_texts.json", asked, model, reader, texts, how)
        if replay
        else partial(_decoding, model, reader, texts, {**how, **decoded})
        for name, texts in questions.items()
    }
    for one in found:
        for _ in _measured(one, model, measure, rows):
            held = {other.name: rows[other.name].to_dict() for other in found if other.name in rows}
            write_text(out / RESULTS, json.dumps({"asked": asked, "rows": held}, indent=1))
    _told(out, {one.name: rows[one.name] for one in found})


def _told(out: Path, rows: "dict[str, Row]") -> None:
    """Write table and plot, and print the table. Raises `ForedraftError` where a draft changed a text."""
    from ..decoding.report import demand_identical, plot_comparison, tabulated
    from ..files.writing import write_text

    write_text(out / "comparison.md", tabulated(rows))
    plot_comparison(rows, out / "comparison.png")
    print(f"\n{tabulated(rows)}\nwritten: {out}/comparison.md, .json and .png")
    demand_identical({f"{name}, {file}": result for name, row in rows.items() for file, result in row.results.items()})


def _found(named: Sequence[str], problems: list[str]) -> list[Compared]:
    """What the arguments name: a run by its file, a draft by its directory, else an algorithm; each is told by a name of its own."""
    from ..decoding.generate import algorithm_and_draft
    from ..registry import default_registry
    from ..training.settings import RunConfig

    found: dict[str, Compared] = {}
    for text in named:
        with gathering(problems):
            path = Path(text)
            if path.suffix in (".yaml", ".yml"):
                run = RunConfig.load(path)
                one = Compared(path.stem, Path(run.output_dir) / "draft", run)
            elif path.exists() or "/" in text:
                from ..files.hub import find_draft

                one = Compared(path.parent.name if path.name == "draft" else path.name, find_draft(text))
            elif text in default_registry().algorithms():
                one = Compared(text, None, algorithm=algorithm_and_draft(text)[0])
            else:
                raise ForedraftError(f"'{text}' is no run file (.yaml), no directory of a draft, and no algorithm (`foredraft plugins`)")
            if one.name in found:
                raise ForedraftError(f"two are called '{one.name}': rename the run file or the draft's directory")
            same = [other.name for other in found.values() if one.draft and other.draft and other.draft.resolve() == one.draft.resolve()]
            if same:
                raise ForedraftError(f"'{one.name}' and '{same[0]}' are the same draft, in '{one.draft}'")
            found[one.name] = one
    return list(found.values())


def _target(found: Sequence[Compared], target: str | None, loading: Rendering, problems: list[str]) -> tuple[str | None, Rendering]:
    """The one target, and how it is loaded: as the runs say, if there are any."""
    runs = [one.run for one in found if one.run is not None]
    said = [(run.target, {name: getattr(run, name) for name in Rendering.model_fields}) for run in runs]
    if others := sorted({run.target for run in runs} | ({target} if target else set())):
        if len(others) > 1:
            problems.append(f"drafts are compared with one target, found {', '.join(others)}")
        elif any(how != said[0][1] for _, how in said):
            problems.append("the runs load their target in different ways (chat_template, revision, ...): let them agree")
        elif runs and loading != type(loading)():
            problems.append("how the target is loaded is said by the runs: leave it out of the command")
        return others[0], runs[0] if runs else loading
    problems.append("whose drafts? Pass --target DIRECTORY")
    return None, loading


def _check(one: Compared, target: str, loading: Rendering, num_tokens: int | None) -> None:
    """Raises `ForedraftError` unless it can be trained, where it must be, and draft for the target."""
    from ..contracts.algorithm import tokens_to_draft
    from ..files.reading import check_fields, most_tokens, read_config
    from ..registry import default_registry
    from ..target.pairing import check_named
    from ..training.checks import check_run
    from ..training.resume import earlier_run

    try:
        if one.run is not None:
            before = earlier_run(one.run)
            if not (before.get("finished") and not before["length"]):
                check_run(one.run)
            most = None if one.run.draft else default_registry().make_algorithm(one.run.algorithm, one.run.options).max_tokens
        elif one.algorithm is not None:
            most = one.algorithm.max_tokens
        else:
            fields = read_config(str(one.draft))
            if "foredraft" not in fields:
                raise ForedraftError("its config.json has no 'foredraft' entry: it is no draft, or one to `foredraft import` first")
            check_named(check_fields(fields, str(one.draft)).foredraft.target.model_dump(), target, loading)
            most = most_tokens(fields)
        tokens_to_draft(num_tokens, most)
    except ForedraftError as error:
        raise ForedraftError(f"{one.name}: {error}") from error


def _reads(run: "RunConfig") -> int:
    """How many kinds of states: the run that reads most fills a `hidden_states_cache` for those that share it."""
    from ..registry import default_registry

    return 0 if run.draft else len(default_registry().make_algorithm(run.algorithm, run.options).needs)


def _check_shared(found: Sequence[Compared], problems: list[str]) -> None:
    """Runs that keep hidden states in one directory must read the same layers of the same data."""
    import torch

    from ..target.loading import load_config
    from ..training.run import fresh_draft

    by_directory = defaultdict(list)
    for one in found:
        if one.run is not None and one.run.hidden_states_cache and not one.run.draft:
            by_directory[Path(one.run.hidden_states_cache).resolve()].append((one.name, one.run))
    for directory, sharing in by_directory.items():
        read: dict[str, list[str]] = defaultdict(list)
        for name, run in sharing if len(sharing) > 1 else ():
            with gathering([]), torch.device("meta"):  # what keeps it from being planned is told with its run
                draft = fresh_draft(run, load_config(run.target, run))
                data = {**run.data.model_dump(exclude={"strict"}), "eval_data": run.eval_data}
                read[str({"aux_layers": draft.config.aux_layers, "in": run.hidden_states_dtype, **data})].append(name)
        if len(read) > 1:
            told = "\n    ".join(f"{', '.join(names)}: {what}" for what, names in read.items())
            problems.append(f"hidden_states_cache '{directory}' is shared by runs that read other states, give them their own:\n    {told}")


def _earlier(file: Path, asked: dict[str, Any], names: Sequence[str]) -> "dict[str, Row]":
    """The rows that are there. Raises `ForedraftError` where they were measured otherwise, or would be lost."""
    from ..decoding.report import Row

    if not file.exists():
        return {}
    held = json.loads(file.read_text(encoding="utf-8"))
    told = [f"{key}: {held['asked'].get(key)} then, {now} now" for key, now in asked.items() if held["asked"].get(key) != now]
    told += [f"{name}: is there, and not named now" for name in held["rows"] if name not in names]
    if told:
        raise ForedraftError(f"'{file}' holds another comparison, choose another --out:\n    " + "\n    ".join(told))
    return {name: Row.from_dict(row) for name, row in held["rows"].items()}


def _decoding(model: Any, reader: Any, prompts: "list[Prompt]", how: dict[str, Any], drafter: Any, told: str) -> "Evaluation":
    from ..decoding import evaluate
    from ..progress import Progress

    with Progress(told, len(prompts)) as advance:
        return evaluate(model, drafter, reader, prompts, **how, progress=lambda number, stats: advance(1))


def _replaying(file: Path, asked: dict[str, Any], model: Any, reader: Any, prompts: "list[Prompt]", how: dict[str, Any]) -> "Measure":
    """The target's answers to some prompts, which are kept in a file, and drafts replayed along them."""
    import torch

    from ..decoding.evaluate import encode, have_images
    from ..decoding.replay import answers, evaluate_replayed
    from ..files.writing import write_text
    from ..progress import Progress

    of = {key: asked[key] for key in ("target", "dtype", "max_new_tokens", "prompts")}
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if held.get("of") != of:
        if have_images(prompts):
            raise ForedraftError("drafts are not replayed along answers to images: leave --replay out, so that they decode")
        asked_L = [encode(reader, prompt)["input_ids"][0] for prompt in prompts]
        said = answers(model, asked_L, how["max_new_tokens"], f"{file.stem}: the target's answers")
        write_text(file, json.dumps(held := {"of": of, "texts": [(ids_L.tolist(), known) for ids_L, known in said]}))
    texts = [(torch.tensor(ids), known) for ids, known in held["texts"]]

    def measure(drafter: Any, told: str) -> "Evaluation":
        with Progress(told, len(prompts)) as advance:
            return evaluate_replayed(model, drafter, texts, **how, progress=lambda number, stats: advance(1))

    return measure


def _measured(one: Compared, model: Any, measure: "dict[str, Measure]", rows: "dict[str, Row]") -> Iterator[None]:
    """Have its row measured, as far as it is not there, by one prompt file after the other; all anew if the draft was changed since."""
    from ..decoding.report import Row

    drafter: Any = load_draft_for(one.draft, model) if one.draft else one.algorithm
    if one.draft:
        weights = (file.read_bytes() for file in sorted(one.draft.glob("*.safetensors")))
        trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        method, noted = drafter.algorithm, drafter.config.foredraft.get("training", {})
        row = Row(_digest(str(method.options).encode(), *weights), method.name, trained, noted)
    else:
        row = Row(_digest(str(drafter.options).encode()), drafter.name)
    if one.name not in rows or rows[one.name].draft != row.draft:
        rows[one.name] = row
    for name, by in measure.items():
        if name in rows[one.name].results:
            print(f"{one.name}, {name}: measured before", flush=True)
            continue
        rows[one.name].results[name] = by(drafter, f"{one.name}, {name}")
        yield


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
