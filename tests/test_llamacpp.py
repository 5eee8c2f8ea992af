"""Real llama.cpp on the CPU serves what was exported: same text with and without the draft, and every drafted token is ours.

Needs `FOREDRAFT_LLAMACPP`, the directory of `llama-server` (docs/engines.md says how to build one); some seconds per pair.
"""

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from in_gguf import BINARIES, Server, write_target
from test_vllm import DRAFTED, LLAMA3, NEW, accepted, in_foredraft, matrix, prompts
from tiny import TOKENS, tiny_target, tiny_tokenizer
from typer.testing import CliRunner

from foredraft import ForedraftError, auto_draft, default_registry, save_draft
from foredraft.cli import app
from foredraft.decoding import AutoregressiveDrafter
from foredraft.formats import export_draft, serve_command
from foredraft.target.loading import load_config, load_target

pytestmark = [pytest.mark.llamacpp, pytest.mark.skipif(BINARIES is None, reason="FOREDRAFT_LLAMACPP names no directory of llama-server")]
STEPS = 25
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
SHAPE = {**matrix.SHAPE, "head_dim": 32}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
matrix.TARGETS.update(
    {
        "Llama": {"model_type": "llama", **SHAPE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e4, **LLAMA3}},
        "Llama, linear": {"model_type": "llama", **SHAPE, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        "Qwen3.5": {"model_type": "qwen3_5_text", **SHAPE, **LINEAR, "num_hidden_layers": 4},
        "Qwen3, yarn": {"model_type": "qwen3", **SHAPE, "tie_word_embeddings": True, "rope_parameters": YARN},
    }
)
PAIRS = [
    ("Llama", "EAGLE-3"),
    ("Llama, linear", "EAGLE-3, normed residual"),
    ("Qwen3, yarn", "EAGLE-3"),
    ("Llama", "DFlash"),
    ("Qwen3, yarn", "DFlash"),
    ("Llama", "DSpark"),
    ("Qwen3.5", "MTP"),
]


class Preceded(AutoregressiveDrafter):
    """Reads one slot more: llama.cpp has its heads see the first token, too, beside a state that is zero as a slot of the server begins
    (afterwards that of its last request's end)."""

    def propose(self, ids: torch.Tensor, aux_1NA: torch.Tensor, limit: int, choose: Any) -> Any:
        if not self.confirmed:
            aux_1NA = torch.cat([torch.zeros_like(aux_1NA[:, :1]), aux_1NA], dim=1)
        return super().propose(torch.cat([ids[:1], ids]), aux_1NA, limit, choose)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llamacpp")


@cache
def served_target(family: str, folder: Path, outtype: str = "f32") -> Path:
    return write_target(matrix.trained_target(family), None, folder / f"{family} {outtype}.gguf", outtype)


@cache
def exported(family: str, algorithm: str, folder: Path, outtype: str = "f32") -> tuple[Any, Path]:
    """A draft and its file."""
    draft, _ = matrix.run(family, algorithm, steps=STEPS)
    path, out = folder / f"{family} {algorithm}", folder / f"{family} {algorithm} {outtype}.gguf"
    save_draft(draft, path)
    return draft, export_draft(path, out, "gguf", outtype=outtype, target=str(served_target(family, folder)))


@cache
def plain(family: str, folder: Path, outtype: str = "f32") -> list[list[int]]:
    with Server("-m", served_target(family, folder, outtype), folder=folder) as server:
        return [server.generate(prompt, NEW)[0] for prompt in prompts()]


def drafting(target: Path, draft: Path) -> list[str]:
    """What `foredraft serve-command` prints, but for the program; both caches hold float32."""
    words = serve_command(default_registry().engine("llamacpp")(), draft, str(target), DRAFTED)
    return [*shlex.split(words)[1:], "-ctkd", "f32", "-ctvd", "f32"]


@pytest.mark.parametrize(("family", "algorithm"), PAIRS)
def test_llamacpp_writes_the_same_text_and_drafts_what_we_draft(family: str, algorithm: str, folder: Path) -> None:
    target = served_target(family, folder)
    draft, file = exported(family, algorithm, folder)
    model = load_target(str(target), "float32").eval()
    if not draft.complete:
        draft.take_head(model)
    found, compared, ties = [0] * DRAFTED, 0, 0
    slots = len(prompts())
    with Server(*drafting(target, file), "-np", slots, "-c", 256 * slots, folder=folder) as server:
        for slot, (prompt, text) in enumerate(zip(prompts(), plain(family, folder), strict=True)):
            if algorithm == "MTP":
                draft.algorithm.drafter = Preceded
            before = len(server.drafted())
            written, timings = server.generate(prompt, NEW, slot)
            assert written == text, "llama.cpp's greedy text with the draft is not the one without"
            assert timings["draft_n"] > 0, "nothing was drafted"
            continued, ours = in_foredraft(model, draft, prompt, NEW + 2 * DRAFTED)
            assert text == continued[:NEW], "llama.cpp's greedy text is not transformers'"
            known, tied, whole = len(prompt) + 1, 0, prompt + continued
            for tokens in server.drafted()[before:]:
                assert len(tokens) == DRAFTED, "the server drafts blocks of another length"
                assert known in ours or tied, f"we draft nothing after {known} tokens"
                for here, (token, *alike), mine in zip(count(known), tokens, ours.get(known, []), strict=False):
                    assert mine in (token, *alike), f"token {here} of {whole} is {token}, ours {mine}"
                    compared, tied = compared + 1, tied + (mine != token)
                    if mine != token:
                        break  # behind a tie the two may go on otherwise
                # What the request has room for is verified: its last token is the target's own.
                verified = {known: [token for token, *_ in tokens[: len(prompt) + NEW - known - 1]]}
                right = accepted(verified, whole)
                found, known = [a + b for a, b in zip(found, right, strict=True)], known + 1 + sum(right)
            ties += tied
        drafts, theirs_found = server.accepted()
        with ThreadPoolExecutor(4) as pool:
            texts = [tokens for tokens, _ in pool.map(lambda prompt: server.generate(prompt, NEW), prompts())]
        assert texts == plain(family, folder)
        twice = (2 * drafts, [2 * n for n in theirs_found])
        assert algorithm == "MTP" or server.accepted() == twice, "drafts of requests at once are not those of each alone"
    print(f"\n{family}, {algorithm}: {compared - ties} of {compared} drafted tokens are ours, {ties} ties; accepted {found} of {drafts}")
    assert theirs_found == found, "the server accepts other tokens"
    assert ties <= compared / 100
    assert 0 < sum(found) < DRAFTED * drafts, "a draft that is always or never right shows little"


@pytest.mark.parametrize(("algorithm", "spoilt"), [("EAGLE-3", "target_layers"), ("EAGLE-3", "rows"), ("DFlash", "mask")])
def test_what_is_wrong_shows(algorithm: str, spoilt: str, folder: Path) -> None:
    """Layers off by one, rows in the other order, another mask token: the text stays, and the drafts are others."""
    from foredraft.plugins.gguf import GGUF, INSIDE
    from foredraft.target.gguf import library, read_gguf

    _, file = exported("Llama", algorithm, folder)
    raw = read_gguf(file)
    fields = {name: field.contents() for name, field in library().GGUFReader(file).fields.items() if not name.startswith("GGUF.")}
    tensors = {name: raw.load(name) for name in raw.tensors}
    if spoilt == "target_layers":
        fields["eagle3.target_layers"] = [i - 1 for i in fields["eagle3.target_layers"]]
    elif spoilt == "mask":
        fields["tokenizer.ggml.mask_token_id"] = 3
    else:
        held = GGUF().open(file)
        tensors |= {name: held.load(name) for name in tensors if "attn_q" in name or "attn_k" in name}
    wrong = folder / f"{spoilt}.gguf"
    GGUF().save(wrong, {INSIDE: fields}, tensors)
    logs = []
    for served in (file, wrong):
        with Server(*drafting(served_target("Llama", folder), served), folder=folder) as server:
            assert [server.generate(prompt, NEW)[0] for prompt in prompts()] == plain("Llama", folder)
            logs.append(server.drafted())
    assert sum(a != b for a, b in zip(*logs, strict=False)) > min(map(len, logs)) / 10


@pytest.mark.parametrize("outtype", ["q8_0", "q4_1"])
def test_quantised(outtype: str, folder: Path) -> None:
    """Target and draft of few bits: the text is the quantised target's own."""
    _, file = exported("Llama", "EAGLE-3", folder, outtype)
    with Server(*drafting(served_target("Llama", folder, outtype), file), folder=folder) as server:
        for prompt, text in zip(prompts(), plain("Llama", folder, outtype), strict=True):
            written, timings = server.generate(prompt, NEW)
            assert written == text
            assert timings["draft_n"] > 0


def test_measured_with_and_without_a_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval` starts both servers: one text, acceptance as we count it; a draft that is not set up is an error with the server's words."""
    monkeypatch.setenv("PATH", f"{BINARIES}{os.pathsep}{os.environ['PATH']}")
    target, draft, prompts, out = (folder / f"said{end}" for end in (" by.gguf", "", ".jsonl", ".json"))
    model = tiny_target(layers=8, vocab=TOKENS, hidden=128, head_dim=32, eos_token_id=2, pad_token_id=0)
    write_target(model, tiny_tokenizer(), target)
    prompts.write_text("".join(json.dumps({"prompt": f"what is {i}?"}) + "\n" for i in range(4)))
    options = {"block_size": 3, "num_layers": 1, "num_aux": 2, "mask_token_id": 7, "enable_confidence_head": False}
    made = auto_draft(load_config(str(target)), "dspark", **options)
    made.start_from(load_target(str(target), "float32"))
    save_draft(made, draft)
    asked = {
        "target": target,
        "draft": draft,
        "prompts": prompts,
        "out": out,
        "max-new-tokens": 24,
        "dtype": "float32",
        "engine": "llamacpp",
    }
    command = ["eval", *(word for name, value in asked.items() for word in (f"--{name}", str(value)))]
    small = "-t 1 -c 2048 -np 2"
    CliRunner().invoke(app, [*command, "--concurrency", "1,2", "--engine-arguments", small], catch_exceptions=False)
    found = json.loads(out.read_text())["said"]
    assert found["identical"] == 4
    assert [load["tau"] for load in found["plain"]] == [None, None]
    for load in found["drafted"]:
        assert load["acceptance"] == pytest.approx(found["ours"]["acceptance"], abs=0.15)
    unsure = ["--no-ours", "--no-baseline", "--concurrency", "1", "--engine-arguments", f"{small} --spec-draft-p-min 0.5"]
    with pytest.raises(ForedraftError, match=r"(?s)without drafting a token.*no confidence head: please set --spec-draft-p-min 0"):
        CliRunner().invoke(app, [*command, *unsure], catch_exceptions=False)


def test_a_target_is_what_llamacpp_runs(folder: Path) -> None:
    """A file of Q8_0, dequantised: its greedy text in transformers is llama.cpp's of the same weights as floats."""
    packed = served_target("Llama", folder, "q8_0")
    model = load_target(str(packed), "float32").eval()
    floats = write_target(model, None, folder / "floats.gguf")
    with Server("-m", floats, folder=folder) as server:
        for prompt in prompts()[:4]:
            out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert server.generate(prompt, NEW)[0] == out[0, len(prompt) :].tolist()
