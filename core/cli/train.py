"""Commands on a run: `foredraft train`, `capture`, `plan`, `report`; and `init`, which needs none."""

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..contracts.loading import Rendering
from ..registry import DEFAULT_ALGORITHM
from .common import BaseUrlOption, EngineArgumentsOption, EngineOption, WorkersOption, load_draft_for, loads_target, show_keys

if TYPE_CHECKING:
    from ..training.plan import Plan


RunArgument = Annotated[Path, typer.Argument(help="YAML file that describes the run; paths in it are relative to the current directory")]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="key=value, dotted: training.learning_rate=1e-4")]
SHAPE = ("adapter", "aux_layers", "draft_vocab_size")


def _keys(asked: bool) -> None:
    if not asked:
        return
    from ..registry import default_registry
    from . import keys

    show_keys("run file", keys.run_keys())
    show_keys("training arguments of other defaults than transformers'", keys.training_keys())
    for r in keys.offered(default_registry()):
        if rows := keys.options(r):
            show_keys(f"options of {r.kind} {r.name}", rows)
    raise typer.Exit


def train(
    run: RunArgument,
    overrides: OverridesArgument = None,
    keys: Annotated[bool, typer.Option("--keys", callback=_keys, is_eager=True, help="print every key, and exit")] = False,
) -> None:
    """Train a draft as a YAML file says; `key=value` overrides its entries."""
    from ..training.settings import RunConfig

    config = RunConfig.load(run, overrides or [])  # before torch is loaded: a misspelt key is told at once
    import torch.distributed as dist

    from ..training.run import train as carry_out

    draft = carry_out(config)
    print(f"\ndraft: {draft}\ncurves: {draft.parent / 'training.png'}")
    print(f"next: foredraft eval --target {config.target} --draft {draft} --prompts FILE")
    if dist.is_initialized():  # its threads must not outlive the interpreter, nor DDP it
        gc.collect()
        dist.destroy_process_group()


@loads_target
def init(
    target: Annotated[str, typer.Argument(help="directory or hub id of the target")],
    out: Annotated[Path, typer.Argument(help="where the draft goes")],
    loading: Rendering,
    settings: Annotated[
        list[str] | None, typer.Argument(help=f"key=value: {', '.join(SHAPE)}, and the algorithm's options (`foredraft info NAME`)")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="drafting algorithm")] = DEFAULT_ALGORITHM,
    data: Annotated[str | None, typer.Option(help="conversations that a reduced vocabulary and a mask token are chosen by")] = None,
    length: Annotated[int, typer.Option("--max-length", min=8, help="tokens per packed row")] = 1024,
) -> None:
    """Write an untrained draft that has started from its target, as a run would: to look at, to serve as a baseline, or to train."""
    from ..training.settings import RunConfig, parse_options

    options = parse_options(settings or [])
    shape = {name: options.pop(name) for name in SHAPE if name in options}
    fields = {"target": target, "output_dir": str(out), "data": {"train": data or "none", "max_length": length}, "algorithm": algorithm}
    config = RunConfig.check({**loading.model_dump(), **fields, **shape, "options": options}, "init")
    from transformers.utils import logging

    from ..training.run import init as carry_out

    logging.disable_progress_bar()
    print(f"{out}: {carry_out(config, with_data=data is not None)}\nnext: foredraft train RUN draft={out}")


def capture(
    run: RunArgument,
    overrides: OverridesArgument = None,
    batch_size: Annotated[int, typer.Option(min=1, help="rows that the target runs over at once, in this process")] = 8,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_arguments: EngineArgumentsOption = None,
    workers: WorkersOption = None,
) -> None:
    """Store the target's hidden states that a run will read, in its `hidden_states_cache`; a capture that was ended goes on.

    The target runs in this process, in several workers, in an engine that is started for it, or in a server that runs already and
    extracts hidden states.
    """
    from ..training.settings import RunConfig

    config = RunConfig.load(run, overrides or [])
    from ..training.capture import capture as carry_out

    stored = carry_out(config, batch_size=batch_size, engine=engine, base_url=base_url, engine_arguments=engine_arguments, workers=workers)
    told = f"{stored} rows were captured beside training" if isinstance(stored, int) else f"{stored}\nnext: foredraft train {run}"
    print(f"{config.hidden_states_cache}: {told}")


def report(
    run: Annotated[Path, typer.Argument(help="output_dir of a run, finished or not")],
    prompts: Annotated[Path | None, typer.Option(help="show how some of these are answered by the finished draft and its target")] = None,
    samples: Annotated[int, typer.Option(min=1, help="how many")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    out: Annotated[Path | None, typer.Option(help="the page; default: report.html in the run")] = None,
) -> None:
    """A run as one HTML page that needs nothing beside it: curves, data, acceptance, drafted answers, settings."""
    from ..training.report import write_report

    found = []
    if prompts is not None:
        from ..decoding import load_prompts
        from ..decoding.traced import trace
        from ..errors import ForedraftError
        from ..target.loading import load_target, load_tokenizer
        from ..training.settings import RunConfig

        if not (run / "draft" / "config.json").exists():
            raise ForedraftError(f"--prompts: '{run}' has no finished draft to answer them")
        noted = json.loads((run / "run.json").read_text(encoding="utf-8"))
        config = RunConfig.check({key: value for key, value in noted.items() if key in RunConfig.model_fields}, str(run / "run.json"))
        model, tokenizer = load_target(config.target, config.target_dtype, config).eval(), load_tokenizer(config.target, config)
        draft = load_draft_for(run / "draft", model)
        found = [trace(model, draft, tokenizer, prompt, max_new_tokens) for prompt in load_prompts(prompts, samples)]
    print(write_report(run, out, found))


def plan(
    run: RunArgument,
    overrides: OverridesArgument = None,
    device: Annotated[str | None, typer.Option(help="kind of device, as in H100; default: the one that is here, else an H100")] = None,
    tflops: Annotated[float | None, typer.Option(min=0.001, help="peak of a device in TFLOP/s, where it is not known")] = None,
    mfu: Annotated[float, typer.Option(min=0.001, max=1, help="share of the peak that is reached")] = 0.4,
    devices: Annotated[int, typer.Option(min=1, help="how many train side by side")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes and tokens")] = False,
) -> None:
    """What a run takes: parameters, FLOPs per token, memory, speed, disk and hours. Nothing is loaded but the target's config."""
    from ..training.settings import RunConfig

    config = RunConfig.load(run, overrides or [])
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from transformers.utils import logging

    from ..errors import printable
    from ..training.plan import plan_run

    logging.set_verbosity_error()
    made = plan_run(config, device=device, tflops=tflops, mfu=mfu, devices=devices)
    if as_json:
        print(json.dumps(asdict(made), indent=1))
        return
    table = Table(show_header=False, box=None)
    for title, text in lines(made, devices).items():
        table.add_row(f"[bold]{title}[/]", escape(printable(text)))
    Console().print(table)


def lines(plan: "Plan", devices: int) -> dict[str, str]:
    """Title → text."""
    gib = {part: f"{n / 2**30:.1f}" for part, n in plan.memory.items()}
    flops, text = plan.gflop_per_token, plan.text
    data = "not read: all of it counts as supervised, a document a row"
    if text:
        number = f"{text.conversations} conversations" if text.conversations else "of unknown size"
        data = f"{number}, {text.tokens:.0f} tokens each, {text.supervised:.0%} supervised (by the first ones)"
    stored = (
        f"{plan.stored_bytes / 2**30:.1f} GiB"
        if plan.stored_bytes
        else f"{plan.stored_bytes_per_token * 1e9 / 2**40:.1f} TiB per 10^9 tokens"
    )
    trains = f"the run's {plan.tokens / 1e6:.1f} M tokens" if plan.tokens else "10^9 tokens (the data's size is not known)"
    return {
        "draft": f"by {plan.algorithm}, adapter {plan.adapter}: {plan.trained_parameters / 1e6:.1f} M parameters trained, "
        f"{plan.frozen_parameters / 1e6:.1f} M frozen",
        "step": f"{plan.rows} rows × {plan.length} tokens on a device, in {plan.dtype}{', checkpointed' if plan.checkpointing else ''}",
        "data": data,
        "needed": f"{sum(flops.values()):.3g} GFLOP per token: " + ", ".join(f"{part} {n:.3g}" for part, n in flops.items() if n),
        "memory": f"{gib['sum']} GiB on a device, all tokens supervised: draft and optimizer {gib['draft and optimizer']}, target "
        f"{gib['target']}, step {gib['step']}; {plan.bytes_per_token / 1e6:.3f} MB for a further token",
        "speed": f"{plan.tokens_per_second['online']:,.0f} tokens/s a device, the target run; {plan.tokens_per_second['stored']:,.0f} "
        f"from stored states; {plan.mfu:.0%} of {plan.tflops:g} TFLOP/s ({plan.device})",
        "stored states": f"{stored}, {plan.stored_bytes_per_token / 1024:.1f} KiB a token",
        "time": f"{plan.hours:.3g} hours for {trains} on {devices} device(s)",
    }
