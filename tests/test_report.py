"""A run seen: by trackers, and as one page."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rigged import letter_tokenizer, predictable_target, trainer_of, written_rows
from tiny import tiny_draft
from typer.testing import CliRunner

from foredraft import ForedraftError, save_draft
from foredraft.cli import app
from foredraft.decoding.traced import trace
from foredraft.training.report import write_report

TARGET = predictable_target(wobble=0.3)


class Page(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.spans: list[tuple[str, str]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        given = dict(attributes)
        self.fetched += [given[name] for name in ("src", "href") if name in given]
        self._open = [given] if tag == "span" else []

    def handle_data(self, data: str) -> None:
        if self._open and "class" in self._open[0]:
            self.spans.append((self._open[0]["class"], data))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training that reports to tensorboard, as `foredraft train` would leave it, with its target."""
    directory = tmp_path_factory.mktemp("seen") / "run"
    draft, rows = tiny_draft(TARGET, ttt_steps=2), written_rows(TARGET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(directory / "events"))
        fields = {"report_to": "tensorboard", "max_steps": 12, "eval_strategy": "steps", "eval_steps": 6, "eval_dataset": rows[:2]}
        trainer = trainer_of(draft, TARGET, directory, rows, **fields)
        trainer.train()
    TARGET.save_pretrained(directory.parent / "target")
    letter_tokenizer().save_pretrained(directory.parent / "target")
    draft.config.foredraft["data"] = {"sources": ["my <data>.jsonl"], "packed": "8 conversations in 8 rows of 16 tokens"}
    save_draft(draft, directory / "draft")
    settings = {
        "target": str(directory.parent / "target"),
        "output_dir": str(directory),
        "data": {"train": "x"},
        "finished": True,
        "rows": "0",
    }
    (directory / "run.json").write_text(json.dumps(settings))
    (directory / "training.json").write_text(json.dumps({"history": trainer.state.log_history}))
    return directory


def test_trackers_get_our_metrics_by_name(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (run / "events").rglob("events.out.*")
    events = EventAccumulator(str(file)).Reload()
    names = {"loss", "accuracy_1", "accuracy_2", "cross_entropy", "tau", "tau_greedy"}
    assert {f"{phase}/{name}" for phase in ("train", "eval") for name in names} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("train/tau")) == 12


def test_a_trace_is_the_answer(run: Path) -> None:
    """Without what was rejected it is the target's own text; the draft was sometimes right and sometimes not."""
    import torch

    draft = tiny_draft(TARGET, ttt_steps=2)
    tokenizer = letter_tokenizer()
    prompt = [{"role": "user", "content": "ho"}]
    found = trace(TARGET, draft, tokenizer, prompt, 24)
    ids = torch.tensor([tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]])
    plain = TARGET.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert "".join(p.text for p in found.pieces if p.origin != "rejected") == tokenizer.decode(plain)
    assert {p.origin for p in found.pieces} >= {"target", "rejected"}
    emitted = sum(len(p.text) for p in found.pieces if p.origin != "rejected")
    passes = sum(p.origin == "target" for p in found.pieces) - 1  # the first is prefill's
    assert found.tau == pytest.approx((emitted - 1) / passes, abs=0.3)


def test_page(run: Path, tmp_path: Path) -> None:
    """It fetches nothing, escapes what it shows, and shows what was measured."""
    measured = {"bench": {"tau": 1.87, "acceptance": [0.6, 0.27], "speedup": 1.3}}
    load = {"concurrency": 4, "tau": 1.5, "acceptance": [0.5, 0.1]}
    (run / "eval.json").write_text(json.dumps(measured))
    (run / "served.json").write_text(json.dumps({"bench": {"drafted": [load], "speedups": [1.1]}}))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "ho"}\n{"prompt": "CJQ"}\n')
    result = CliRunner().invoke(app, ["report", str(run), "--prompts", str(prompts), "--max-new-tokens", "12"], catch_exceptions=False)
    file = run / "report.html"
    assert str(file) in result.output
    text = file.read_text()
    page = Page(text)
    assert [part[:22] for part in page.fetched] == ["data:image/png;base64,"]
    for shown in (
        "1.87",
        "0.60 0.27",
        "1.30×",
        "engine, 4 at once",
        "my &lt;data&gt;.jsonl",
        "8 rows of 16 tokens",
        "eval_tau",
        "user: CJQ",
    ):
        assert shown in text, shown
    assert {"accepted", "target", "rejected", "bar"} >= {name for name, _ in page.spans} >= {"target"}


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="holds no run"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ForedraftError, match="has logged nothing yet"):
        write_report(tmp_path)
