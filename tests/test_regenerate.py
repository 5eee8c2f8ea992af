"""Conversations answered anew by the target: exactly, batched, resumed, sampled."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TOKENS, chat, tiny_target, tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import Conversations, ForedraftError, pack, progress
from foredraft.data import skipped
from foredraft.data.regenerate import regenerate
from foredraft.data.sampling import SeededChoice

Messages = list[dict[str, Any]]

QUESTIONS = Conversations(
    [
        chat("short", "old"),
        chat("a much longer question, with many words", "old", "and then?", "old"),
        [{"role": "system", "content": "be brief"}, *chat("why?")],
        chat("one\u2028two", "old", "three", "old", "four"),
        chat("the last one"),
    ],
    "questions.jsonl",
)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target(layers=2, vocab=TOKENS, eos_token_id=2, pad_token_id=0)


def answer(target: LlamaForCausalLM, out: Path, conversations: Conversations = QUESTIONS, **settings: Any) -> dict[int, dict[str, Any]]:
    """Run `regenerate`; what the file holds afterwards, by index."""
    regenerate(target, tiny_tokenizer(), conversations, out, **{"max_new_tokens": 6, "batch_size": 3, "show_progress": False, **settings})
    return by_index(out)


def by_index(file: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    found = {row["index"]: row for row in rows}
    assert len(found) == len(rows), f"answered twice: {[row['index'] for row in rows]}"
    return found


def greedy(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, messages: Messages) -> list[int]:
    """Six tokens at most."""
    ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]])
    return target.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()


class TestRegenerate:
    def test_answers_equal_generate_one_by_one(self, target: LlamaForCausalLM, tmp_path: Path) -> None:
        """Batched and padded, turn by turn, each on the answers before."""
        tokenizer = tiny_tokenizer()
        rows = answer(target, tmp_path / "out.jsonl")
        for index, asked in enumerate(QUESTIONS):
            history: Messages = []
            finish = []
            for message in asked:
                if message["role"] == "assistant":
                    continue
                history.append(message)
                if message["role"] == "user":
                    new = greedy(target, tokenizer, history)
                    finish.append("stop" if 2 in new else "length")
                    history.append({"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)})
            assert rows[index] == {"messages": history, "index": index, "finish": finish}
        assert rows == answer(target, tmp_path / "single.jsonl", batch_size=1)

    def test_finish_reasons(self, target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the second token of an answer as end of text, that answer stops there."""
        tokenizer = tiny_tokenizer()
        new = greedy(target, tokenizer, QUESTIONS[4])
        assert new[0] != new[1]
        monkeypatch.setattr(target.generation_config, "eos_token_id", [2, new[1]])
        row = answer(target, tmp_path / "out.jsonl", Conversations([QUESTIONS[4]]))[0]
        assert row["finish"] == ["stop"]
        assert row["messages"][-1]["content"] == tokenizer.decode(new[:1], skip_special_tokens=True)

    def test_resumes_after_a_half_written_line(self, target: LlamaForCausalLM, tmp_path: Path) -> None:
        whole = answer(target, tmp_path / "whole.jsonl")
        out = tmp_path / "out.jsonl"
        lines = (tmp_path / "whole.jsonl").read_bytes().split(b"\n")
        for keep in (0, 1, 4):
            out.write_bytes(b"".join(line + b"\n" for line in lines[:keep]) + lines[keep][:30])
            assert answer(target, out) == whole
        before = out.read_bytes()
        assert regenerate(target, tiny_tokenizer(), QUESTIONS, out, show_progress=False) == 0
        assert out.read_bytes() == before

    def test_prompts_that_are_too_long_are_skipped_and_the_file_can_be_continued(self, target: LlamaForCausalLM, tmp_path: Path) -> None:
        conversations = Conversations([chat("q"), chat("long " * 50), chat("q", "old", "long " * 50)])
        rows = answer(target, tmp_path / "out.jsonl", conversations, max_prompt_tokens=60)
        assert rows.keys() == {0, 2}
        assert len(rows[2]["messages"]) == 2
        assert answer(target, tmp_path / "out.jsonl", conversations, max_prompt_tokens=60) == rows

    @pytest.mark.parametrize(
        ("content", "error"),
        [
            (
                '{"messages": [{"role": "user", "content": "else"}], "index": 0, "finish": []}\n',
                "line 1 answers other questions than record 0",
            ),
            ('{"messages": [], "index": 99, "finish": []}\n', "line 1 was not written by `foredraft regenerate` for this data"),
            ('{"messages": []}\n', "line 1 was not written by `foredraft regenerate`"),
            ("notes\n", "line 1 was not written by `foredraft regenerate`"),
        ],
    )
    def test_a_file_of_other_data_is_refused(self, target: LlamaForCausalLM, tmp_path: Path, content: str, error: str) -> None:
        out = tmp_path / "out.jsonl"
        out.write_text(content)
        with pytest.raises(ForedraftError, match=error):
            answer(target, out)
        assert out.read_text() == content

    def test_samples_follow_from_the_seed_and_the_conversation_alone(self, target: LlamaForCausalLM, tmp_path: Path) -> None:
        """Not from the batch, nor from where a run was interrupted."""
        settings: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
        whole = answer(target, tmp_path / "whole.jsonl", **settings)
        assert whole == answer(target, tmp_path / "single.jsonl", batch_size=1, **settings)
        (tmp_path / "part.jsonl").write_text("".join(json.dumps(whole[i]) + "\n" for i in (1, 3)))
        assert whole == answer(target, tmp_path / "part.jsonl", batch_size=2, **settings)
        assert whole != answer(target, tmp_path / "other.jsonl", seed=1, **settings)
        assert whole != answer(target, tmp_path / "greedy.jsonl")
        same = Conversations([chat("the same question")] * 2)
        assert len({row["messages"][1]["content"] for row in answer(target, tmp_path / "same.jsonl", same, **settings).values()}) == 2

    def test_what_is_drawn_has_the_models_distribution(self) -> None:
        scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, -5.0]]).repeat(4000, 1)
        choice = SeededChoice([f"0/{i}/0" for i in range(4000)], 3, temperature=0.7, top_p=0.97)
        drawn = choice(torch.zeros(4000, 5, dtype=torch.long), scores).softmax(-1).mean(0)
        expected = (scores[0] / 0.7).softmax(-1)
        expected[3:] = 0  # 0.97 is reached by the first three
        torch.testing.assert_close(drawn, expected / expected.sum(), atol=0.02, rtol=0)

    def test_cut_and_empty_answers(self, target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A cut answer loses the half of a character and teaches no end; an empty one ends its conversation; both are counted."""
        said: list[str] = []
        monkeypatch.setattr(skipped.logger, "warning", said.append)
        tokenizer = tiny_tokenizer()
        answers = {"cut": [*tokenizer("caf😀")["input_ids"][:-1]], "whole": [*tokenizer("yes")["input_ids"], 2], "silent": [2]}

        def generate(ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            asked = [tokenizer.decode(row).rsplit("user\n", 1)[1].split("<")[0] for row in ids]
            return torch.cat([ids, torch.tensor([(answers[text] + [0] * 9)[:6] for text in asked])], 1)

        monkeypatch.setattr(target, "generate", generate)
        answers["cut"] = (answers["cut"] * 3)[-6:]  # six tokens, as many as are asked for
        conversations = Conversations([chat("whole", "-", "cut", "-", "whole"), chat("whole", "-", "silent", "-", "whole"), chat("silent")])
        rows = answer(target, tmp_path / "out.jsonl", conversations)
        assert rows.keys() == {0, 1}
        assert rows[0]["finish"] == ["stop", "length", "stop"]
        cut = rows[0]["messages"][3]["content"]
        assert cut.endswith("caf")
        assert [m["content"] for m in rows[1]["messages"]] == ["whole", "yes"]
        assert "2 skipped, the first is conversations, conversation 1, answer 1: an empty answer" in said[0] or "conversation 2" in said[0]
        assert said[1] == "1 of 4 answers were cut at 6 tokens: training learns no end of them"
        packed = pack(Conversations.load(tmp_path / "out.jsonl"), tokenizer, 128)[0]
        spans = [[i for i, s in zip(packed["input_ids"], packed["spans"], strict=True) if s == span] for span in range(3)]
        assert [span[-1] == 2 for span in spans] == [True, False, True]

    def test_tools_are_told_and_their_results_end_a_conversation(self, target: LlamaForCausalLM, tmp_path: Path) -> None:
        record = {
            "messages": [*chat("q", "old"), {"role": "tool", "content": "5"}, *chat("r")],
            "tools": [{"type": "function", "function": {"name": "look_up"}}],
        }
        row = answer(target, tmp_path / "out.jsonl", Conversations.of([record]))[0]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["tools"] == record["tools"]
        assert Conversations.load(tmp_path / "out.jsonl")[0].tools == record["tools"]

    @pytest.mark.parametrize("terminal", [False, True])
    def test_progress(self, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Lines in a log: not more than one in half a minute, with the time that is left."""
        clock = iter(range(0, 1000, 20))
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
        with progress.Progress("answering", 8, done=2) as advance:
            for _ in range(3):
                advance(2)
        err = capsys.readouterr().err
        assert terminal or err == "answering: 6 of 8, 0.1 a second, 20 s left\nanswering: 8 of 8\n"
