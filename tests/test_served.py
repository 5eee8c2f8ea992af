"""Servers measured: what they count, what is asked of them, what is told."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from stub_server import serving
from tiny import tiny_draft, tiny_target
from typer.testing import CliRunner

from foredraft import EngineBase, ForedraftError, default_registry, save_draft
from foredraft.cli import app
from foredraft.contracts.engine import Accepted, Config, Metrics
from foredraft.plugins.llamacpp import LlamaCpp
from foredraft.serving import Server
from foredraft.serving.metrics import parse_metrics

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a \\"b\\", c}}"}} {0}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {1}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {3}
vllm:some_gauge NaN
"""
"""As vLLM 0.32 writes them; of two engines each position has two samples."""
SGLANG = """sglang:generation_tokens_total{{model_name="m",is_streaming="true"}} {0}
sglang:num_requests_total{{model_name="m",is_streaming="true"}} {1}
sglang:spec_verify_calls_total{{model_name="m"}} {2}
sglang:spec_accept_length{{model_name="m"}} 9.9
"""
"""By the names in SGLang 0.5.23's own source; no server of it ran."""
LLAMACPP = """llamacpp:spec_decode_num_drafts_total {0}
llamacpp:spec_decode_num_accepted_tokens_total {1}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {2}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {3}
"""


@pytest.mark.parametrize(
    ("name", "text", "before", "after", "expected"),
    [
        ("vllm", VLLM, (10, 8, 6, 2), (30, 28, 21, 7), Accepted(2.0, [0.75, 0.25])),
        ("vllm", VLLM, (10, 8, 6, 2), (10, 8, 6, 2), None),
        ("llamacpp", LLAMACPP, (10, 8, 6, 2), (30, 28, 21, 7), Accepted(2.0, [0.75, 0.25])),
        ("sglang", SGLANG, (100, 4, 30), (200, 8, 78), Accepted(2.0, [])),
        ("sglang", "", (), (), None),
    ],
)
def test_counters(name: str, text: str, before: tuple[int], after: tuple[int], expected: Accepted | None) -> None:
    """Between two looks; in one process with what it has counted before."""
    engine = default_registry().engine(name)()
    assert engine.accepted(*(parse_metrics(text.format(*values)) for values in (before, after))) == expected


def test_a_server_that_runs(tmp_path: Path) -> None:
    """At each load all prompts; tokens as the server counts them; its counters told by their names."""
    prompts, out = tmp_path / "short.jsonl", tmp_path / "eval.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "cdef", "ghi")))
    with serving(metrics=lambda n: VLLM.format(n, 3 * n // 4, n // 2, n // 4)) as stub:
        command = ["eval", "--base-url", stub.url, "--prompts", str(prompts), "--concurrency", "1,2,4", "--out", str(out)]
        result = CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "200"})
        assert stub.most_at_once <= 4
        assert len(stub.asked) == 1 + 3 + 4 + 8
    found = json.loads(out.read_text())["short"]
    assert [(load["concurrency"], load["tokens"]) for load in found["drafted"]] == [(1, 9), (2, 11), (4, 24)]
    assert all(load["tokens_per_second"] > 0 < load["first_token"] <= load["first_token_slow"] for load in found["drafted"])
    assert found["drafted"][2]["acceptance"] == pytest.approx([0.5, 0.25], abs=0.07)
    assert found["drafted"][2]["tau"] == pytest.approx(1.75, abs=0.07)
    assert (found["plain"], found["ours"], found["speedups"]) == ([], None, [])
    assert "1.7" in result.output
    assert out.with_suffix(".png").stat().st_size > 1000


class Stubborn(EngineBase):
    """The stub as an engine, whose drafts may not be set up."""

    name = "stubborn"
    summary = "of a test"
    counters = LLAMACPP.format("@", "@", "@", 0)

    def refuses(self, config: Config) -> str | None:
        return None

    def server(self, target: str) -> list[str]:
        return [sys.executable, str(Path(__file__).parent / "stub_server.py"), "--counters", "llamacpp:tokens_total 1"]

    def accepted(self, before: Metrics, after: Metrics) -> Accepted | None:
        return LlamaCpp().accepted(before, after)

    def prepare(self, config: Config, draft: str, target: str) -> list[str]:
        return ["true"] if self.counters else ["ls", "no-such-file"]

    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        return [*self.server(target)[:-1], self.counters, "--says", "E set-up failed: no head"]


def test_an_engine_is_started_with_and_without_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it counts is told; where nothing was drafted, and where what it needs before fails, the reason is."""
    prompts, out = tmp_path / "short.jsonl", tmp_path / "eval.json"
    prompts.write_text('{"prompt": "ab"}\n')
    save_draft(tiny_draft(tiny_target()), tmp_path / "draft")
    monkeypatch.setattr(default_registry(), "engine", lambda name: Stubborn)
    command = [
        "eval",
        "--engine",
        "stubborn",
        "--target",
        "any",
        "--draft",
        str(tmp_path / "draft"),
        "--prompts",
        str(prompts),
        "--no-ours",
    ]
    more = ["--concurrency", "2", "--out", str(out)]
    assert "4 of 4 answers are the same" in CliRunner().invoke(app, [*command, *more], catch_exceptions=False).output
    found = json.loads(out.read_text())["short"]
    assert (found["plain"][0]["tau"], found["drafted"][0]["tau"], found["drafted"][0]["acceptance"]) == (None, 2, [1, 0])
    for counters, told in (("llamacpp:tokens_total 1", r"(?s)without drafting a token.*E set-up failed: no head"), ("", "no-such-file")):
        monkeypatch.setattr(Stubborn, "counters", counters)
        with pytest.raises(ForedraftError, match=told):
            CliRunner().invoke(app, [*command, "--no-baseline"], catch_exceptions=False)


def test_errors(tmp_path: Path) -> None:
    prompts = tmp_path / "odd.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": "refuse"}\n')
    with serving() as stub:
        for more, *errors in (
            (["--base-url", stub.url], "answers 400"),
            (["--engine", "vllm", "--tree", "2,2,3", "--dtype", "half"], "leave out --algorithm", "name both", "--dtype half: choose"),
            (["--record", "--tree", "2"], "whose draft", "tree '2': expected", "who drafts", "none without --draft"),
            (["--base-url", stub.url, "--concurrency", "1,many", "--prompts", "no.jsonl"], "numbers of requests", "no such file"),
        ):
            failed = CliRunner().invoke(app, ["eval", "--prompts", str(prompts), *more])
            assert isinstance(failed.exception, ForedraftError)
            assert all(error in str(failed.exception) for error in errors), failed.exception


@pytest.mark.parametrize(
    ("asked", "told"), [("broken", "with an error: .*out of room"), ("nonsense", "streamed no token"), ("wrong", "streamed no token")]
)
def test_a_stream_that_is_no_answer(asked: str, told: str) -> None:
    with serving() as stub, pytest.raises(ForedraftError, match=told):
        Server(stub.url).stream([{"role": "user", "content": asked}])


def test_a_signal_ends_the_server_too() -> None:
    """Of a program that SIGTERM ends, nothing runs on."""
    program = (
        "import sys, time\n"
        "from foredraft.serving.process import free_port, running\n"
        "port = free_port()\n"
        "with running([sys.executable, sys.argv[1], '--port', str(port)], port) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    stub = str(Path(__file__).parent / "stub_server.py")
    with subprocess.Popen([sys.executable, "-c", program, stub], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urlopen(f"{url}/health") as reply:
            assert reply.status == 200
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(URLError):
        urlopen(f"{url}/health", timeout=5)
