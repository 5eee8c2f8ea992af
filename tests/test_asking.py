"""Conversations answered by a server: many at once, whatever it does, and nothing lost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from killed import kill_at_random
from stub_server import serving
from tiny import chat
from typer.testing import CliRunner

from foredraft import Conversations, ForedraftError
from foredraft.cli import app
from foredraft.data.asking import Asking, ask
from foredraft.serving import Server

MANY = Conversations([chat(f"question {i}", "old", f"and {i}?", "old") for i in range(12)], "many.jsonl")
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def rows_of(out: Path) -> dict[int, Any]:
    rows = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    found = {row["index"]: row for row in rows}
    assert len(found) == len(rows), "answered twice"
    return found


def asked(url: str, conversations: Conversations, out: Path, **settings: Any) -> int:
    how = {name: settings.pop(name) for name in ("temperature", "template_kwargs") if name in settings}
    return ask(Server(url, timeout=0.5, retries=2), conversations, out, Asking(**how), **{"show_progress": False, **settings})


def test_answers(tmp_path: Path) -> None:
    """Turn after turn on the answers before; reasoning, calls and tools are kept, and read again as they were."""
    records = [
        *({"messages": m} for m in MANY),
        {"messages": chat("think", "-", "cut")},
        {"messages": chat("call", "-", "x"), "tools": TOOLS},
    ]
    conversations = Conversations.of([*records, {"messages": [{"role": "system", "content": "nothing"}]}])
    out = tmp_path / "out" / "own.jsonl"
    with serving() as stub:
        assert asked(stub.url, conversations, out, concurrency=5, temperature=0.5, template_kwargs={"enable_thinking": False}) == 14
        assert 1 < stub.most_at_once <= 5
        seeds = {request["seed"] for request in stub.asked}
        assert len(seeds) == len(stub.asked), "each turn of each conversation has a seed of its own"
        assert {(r["temperature"], str(r["chat_template_kwargs"])) for r in stub.asked} == {(0.5, "{'enable_thinking': False}")}
        assert [r["tools"] for r in stub.asked if "tools" in r] == [TOOLS]
    rows = rows_of(out)
    for i in range(12):
        assert rows[i]["messages"] == chat(f"question {i}", f"question {i}"[::-1], f"and {i}?", f"and {i}?"[::-1])
    assert (rows[12]["messages"][1]["reasoning_content"], rows[12]["finish"]) == ("let me see", ["stop", "length"])
    assert (len(rows[13]["messages"]), rows[13]["finish"], rows[13]["tools"]) == (2, ["tool_calls"], TOOLS)
    again = Conversations.load(out)
    (called,) = (c for c in again if c.tools)
    assert called[1]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"a": 1}}


def test_failures_are_counted_listed_and_asked_again(tmp_path: Path) -> None:
    """What a server may answer another time is asked again at once; what it does not answer is listed; the rest is written."""
    told = {
        "busy": None,
        "hang": "no answer within the time allowed",
        "nonsense": "is not understood|is no chat completion",
        "wrong": "no chat completion",
        "refuse": "answers 400: .*that is too long",
        "empty": "answer 0 is empty",
    }
    conversations = Conversations([chat(text) for text in told], "odd.jsonl")
    out = tmp_path / "own.jsonl"
    with serving() as stub:
        for _ in range(2):
            with pytest.raises(ForedraftError, match=r"5 of 6 conversations could not be answered: '.*own.jsonl.failed.jsonl' says why"):
                asked(stub.url, conversations, out)
            assert rows_of(out).keys() == {0}
            failed = {
                line["index"]: line["error"] for line in map(json.loads, (tmp_path / "own.jsonl.failed.jsonl").read_text().splitlines())
            }
            for index, error in enumerate(told.values()):
                assert (index in failed) is (error is not None)
                assert error is None or re.search(error, failed[index]), failed[index]
        assert (stub.tries["busy"], stub.tries["refuse"], stub.tries["hang"]) == (3, 2, 6)


def test_a_server_that_vanishes_ends_it_and_nothing_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    with (
        serving(lasts=9) as stub,
        pytest.raises(ForedraftError, match=r"(?s)cannot be reached.*of 12 conversations are answered.*run again"),
    ):
        asked(stub.url, MANY, out, concurrency=2)
    assert 3 <= len(rows_of(out)) <= 5
    with serving() as stub:
        asked(stub.url, MANY, out)
        assert len(stub.asked) < 24
    assert rows_of(out).keys() == set(range(12))
    with pytest.raises(ForedraftError, match="cannot be reached"):
        asked(stub.url, MANY, tmp_path / "other.jsonl")


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_point_it_goes_on(tmp_path: Path, kills: int) -> None:
    out, whole = tmp_path / "own.jsonl", tmp_path / "whole.jsonl"
    with serving() as stub:
        asked(stub.url, MANY, whole)
        for _ in kill_at_random(lambda: asked(stub.url, MANY, out, concurrency=2), kills, 0.4):
            if out.exists() and out.read_bytes().count(b"\n") == len(MANY):
                out.unlink()
        asked(stub.url, MANY, out)
    assert rows_of(out) == rows_of(whole)


def test_command(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "own.jsonl"
    source.write_text("".join(json.dumps({"messages": m}) + "\n" for m in MANY))
    with serving() as stub:
        result = CliRunner().invoke(app, ["regenerate", str(source), "--base-url", f"{stub.url}/v1", "--out", str(out), "--limit", "3"])
        assert (result.exit_code, "3 conversations answered" in result.output) == (0, True), result.output
        for more, error in ((["--target", "other"], "serves stub; asked for was other"), ([], "who answers")):
            place = ["--base-url", stub.url] if more else []
            failed = CliRunner().invoke(app, ["regenerate", str(source), "--out", str(out), *place, *more])
            assert error in str(failed.exception)
