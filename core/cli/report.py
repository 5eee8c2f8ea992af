"""`foredraft report`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import load_draft_for


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
        import json

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
