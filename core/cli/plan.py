"""`foredraft plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..training.plan import Plan


def plan(
    run: Annotated[Path, typer.Argument(help="YAML file that describes the run; paths in it are relative to the current directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: data.max_length=4096")] = None,
    device: Annotated[str | None, typer.Option(help="kind of device, as in H100; default: the one that is here, else an H100")] = None,
    tflops: Annotated[float | None, typer.Option(min=0.001, help="peak of a device in TFLOP/s, where it is not known")] = None,
    mfu: Annotated[float, typer.Option(min=0.001, max=1, help="share of the peak that is reached")] = 0.4,
    devices: Annotated[int, typer.Option(min=1, help="how many train side by side")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes and tokens")] = False,
) -> None:
    """What a run takes: parameters, FLOPs per token, memory, speed, disk and hours. Nothing is loaded but the target's config."""
    from ..training.settings import RunConfig

    config = RunConfig.load(run, overrides or [])
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from transformers.utils import logging

    from ..errors import printable
    from ..training.plan import plan_run

    logging.set_verbosity_error()
    made = plan_run(config, device=device, tflops=tflops, mfu=mfu, devices=devices)
    if as_json:
        print(json.dumps(made.to_json(), indent=1))
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
