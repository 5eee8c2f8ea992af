"""The course of a training as a picture, and a run as one HTML page that needs nothing beside it."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import IO, Any

from jinja2 import Environment

from .. import __version__
from ..decoding.report import picture
from ..decoding.traced import Traced
from ..errors import ForedraftError
from ..files.writing import write_text
from .resume import RUN_FILE, latest_complete


def write_report(directory: str | Path, out: str | Path | None = None, samples: Sequence[Traced] = ()) -> Path:
    """Write `report.html` of the run in `directory`, finished or not; results of `foredraft eval --out` that lie there are shown.

    Returns where. Raises `ForedraftError` where there is no run, or it has logged nothing yet.
    """
    directory = Path(directory)
    settings = _json(directory / RUN_FILE)
    if settings is None:
        raise ForedraftError(f"'{directory}' holds no run: no {RUN_FILE}; name the output_dir of `foredraft train`")
    history = _history(directory)
    if not history:
        raise ForedraftError(f"the run in '{directory}' has logged nothing yet: it writes its course with every checkpoint, and at its end")
    curves = io.BytesIO()
    plot_training(history, curves)
    draft = (_json(directory / "draft" / "config.json") or {}).get("foredraft", {})
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (resources.files("foredraft") / "templates" / "report.html.txt").read_text(encoding="utf-8")
    )
    text = page.render(
        name=directory.name,
        version=__version__,
        finished=settings.get("finished"),
        curves=base64.b64encode(curves.getvalue()).decode(),
        latest={**_last(history, "loss"), **_last(history, "eval_loss")},
        settings=json.dumps({k: v for k, v in settings.items() if v not in (None, {}, [])}, indent=1, ensure_ascii=False),
        data=draft.get("data", {}),
        coverage=draft.get("vocabulary_coverage"),
        evaluations=_evaluations(directory),
        samples=samples,
    )
    out = Path(out or directory / "report.html")
    write_text(out, text)
    return out


def _history(directory: Path) -> list[dict[str, Any]]:
    """What was logged: of a finished run all, else up to its newest checkpoint."""
    if (finished := _json(directory / "training.json")) is not None:
        return list(finished["history"])
    newest = latest_complete(directory)
    return list((_json(newest / "trainer_state.json") or {}).get("log_history", [])) if newest else []


def _last(history: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The latest log that has `name`."""
    found: dict[str, Any] = next((log for log in reversed(history) if name in log), {})
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


def _evaluations(directory: Path) -> list[dict[str, Any]]:
    """By prompt set: where from, τ, and acceptance per position by whom."""
    found: list[dict[str, Any]] = []
    for file in sorted(directory.glob("*.json")):
        results = _json(file)
        for name, result in results.items() if isinstance(results, dict) else ():
            if not isinstance(result, dict):
                continue
            if {"tau", "acceptance"} <= result.keys():
                told = {"by": "foredraft", "tau": result["tau"], "acceptance": result["acceptance"], "speedup": result.get("speedup")}
                found.append({"file": file.name, "prompts": name, **told})
                continue
            for i, load in enumerate(result.get("drafted") or ()):
                speedup = (result.get("speedups") or [None] * (i + 1))[i]
                told = {
                    "by": f"engine, {load['concurrency']} at once",
                    "tau": load["tau"],
                    "acceptance": load["acceptance"],
                    "speedup": speedup,
                }
                found.append({"file": file.name, "prompts": name, **told})
    return found


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def plot_training(history: Sequence[Mapping[str, Any]], file: str | Path | IO[bytes]) -> None:
    """Loss, accuracy per drafted position and estimated τ over the steps (held-out values as dots) into a PNG."""
    places = {"left": 0.04, "right": 0.99, "bottom": 0.13, "top": 0.91, "wspace": 0.14}  # matplotlib's own layouts draw it twice
    with picture(file, 3, figsize=(13, 3.8), gridspec_kw=places) as axes:
        positions = sorted({int(k.rsplit("_", 1)[1]) for log in history for k in log if k.startswith("accuracy_")})
        panels = [["loss"], [f"accuracy_{p}" for p in positions], ["tau"]]
        for axis, names, title in zip(axes, panels, ("loss", "accuracy per drafted position", "estimated τ (teacher-forced)"), strict=True):
            for i, name in enumerate(names):
                for prefix, style in (("", "-"), ("eval_", "o--")):
                    points = [(log["step"], log[prefix + name]) for log in history if prefix + name in log]
                    if points:
                        label = name.replace("accuracy_", "position ") + (" (held out)" if prefix else "")
                        axis.plot(
                            *zip(*points, strict=True), style, color=f"C{i}", label=label, markersize=4, alpha=0.9 if not prefix else 0.7
                        )
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=7)
