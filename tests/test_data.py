"""Conversations from files, what of them is supervised, how they are packed, and answering them anew."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny import CHATML, CHATML_TAGGED, TOKENS, tiny_target, tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import AlgorithmBase, Conversations, DraftCollator, ForedraftError, pack
from foredraft.data import Renderer
from foredraft.data.collate import positions_within, seed_of
from foredraft.data.regenerate import regenerate

Messages = list[dict[str, Any]]


def chat(*contents: str) -> Messages:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


THREE = [chat(f"question {i}", f"answer {i}") for i in range(3)]
JSONL = "\n".join(json.dumps({"messages": messages}) for messages in THREE) + "\n"


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


class TestLoad:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", JSONL),
            ("a.json", json.dumps([{"messages": m} for m in THREE])),
            ("a.jsonl.gz", gzip.compress(JSONL.encode())),
        ],
    )
    def test_json(self, tmp_path: Path, name: str, content: str | bytes) -> None:
        loaded = Conversations.load(write(tmp_path / name, content))
        assert loaded == THREE
        assert loaded.source == str(tmp_path / name)

    def test_parquet(self, tmp_path: Path) -> None:
        datasets.Dataset.from_list([{"messages": m} for m in THREE]).to_parquet(tmp_path / "a.parquet")
        assert Conversations.load(tmp_path / "a.parquet") == THREE

    def test_folder_and_split(self, tmp_path: Path) -> None:
        write(tmp_path / "data" / "train.jsonl", JSONL)
        write(tmp_path / "data" / "test.jsonl", JSONL.replace("answer", "reply"))
        assert Conversations.load(tmp_path / "data") == THREE
        assert Conversations.load(tmp_path / "data", split="test")[0] == chat("question 0", "reply 0")
        with pytest.raises(ForedraftError, match=r"'.*data' could not be read: .*[Uu]nknown split \"dev\""):
            Conversations.load(tmp_path / "data", split="dev")

    def test_sharegpt(self, tmp_path: Path) -> None:
        turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
        loaded = Conversations.load(write(tmp_path / "a.jsonl", json.dumps({"conversations": turns}) + "\n"))
        assert loaded == [[{"role": "system", "content": "s"}, *chat("q", "a")]]

    def test_further_fields_of_a_turn_are_kept_and_gaps_are_not(self, tmp_path: Path) -> None:
        first = [{"role": "user", "content": "q", "name": "ada"}, {"role": "assistant", "content": "a"}]
        loaded = Conversations.load(write(tmp_path / "a.jsonl", json.dumps({"messages": first}) + "\n"))
        assert loaded == [first]  # no name=None on the second turn

    def test_line_separators_inside_text(self, tmp_path: Path) -> None:
        messages = chat("one\u2028two", "three\x85four")
        file = write(tmp_path / "a.jsonl", json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        assert Conversations.load(file) == [messages]

    @pytest.mark.parametrize(
        ("name", "content", "error"),
        [
            ("a.txt", "hello", r"a.txt': unknown file type '.txt'; known: .jsonl, .json, .gz, .parquet"),
            ("a.jsonl", "", r"a.jsonl' is empty"),
            ("a.jsonl", JSONL[:-20], r"a.jsonl' could not be read: .*row 2"),
            ("a.jsonl", JSONL.replace("}]}", "nonsense", 1), r"a.jsonl' could not be read: .*row 0"),
            ("a.json", json.dumps([{"messages": m} for m in THREE])[:-20], r"a.json' could not be read: .*position \d+"),
            ("a.jsonl.gz", gzip.compress(JSONL.encode())[:-15], r"a.jsonl.gz' could not be read: EOFError"),
            ("a.parquet", "PAR1", r"a.parquet' could not be read: .*Parquet"),
            ("a.jsonl", '{"text": "hi"}\n', r"a.jsonl, record 0: expected a list under 'messages' or 'conversations', .*found .*'text'"),
            ("a.jsonl", JSONL + '{"text": "hi"}\n', r"a.jsonl, record 3: expected a list under 'messages'"),
            ("a.jsonl", JSONL + '{"messages": []}\n', r"a.jsonl, record 3: expected a list under 'messages'"),
            ("a.jsonl", '{"messages": ["hi", "ho"]}\n', r"a.jsonl, record 0, turn 0: expected an object .* found 'hi'"),
            ("a.jsonl", '{"messages": [{"role": "user", "text": "hi"}]}\n', r"a.jsonl, record 0, turn 0: expected 'role' and 'content'"),
        ],
    )
    def test_errors_name_the_file_and_the_record(self, tmp_path: Path, name: str, content: str | bytes, error: str) -> None:
        with pytest.raises(ForedraftError, match=error):
            Conversations.load(write(tmp_path / name, content))

    @pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/no/such/folder"])
    def test_missing(self, source: str) -> None:
        with pytest.raises(ForedraftError, match=f"data '{source}': no such file"):
            Conversations.load(source)


class TestHoldingOut:
    conversations = Conversations([chat(str(i), "a") for i in range(20)], "somewhere")

    def test_a_partition_in_order(self) -> None:
        train, held_out = self.conversations.holding_out(5)
        assert (len(train), len(held_out)) == (15, 5)
        assert sorted([*train, *held_out], key=self.conversations.index) == self.conversations
        assert train == sorted(train, key=self.conversations.index)
        assert (train.source, held_out.source) == ("somewhere", "somewhere (held out)")

    def test_the_seed_decides(self) -> None:
        assert self.conversations.holding_out(5, seed=1) == self.conversations.holding_out(5, seed=1)
        assert self.conversations.holding_out(5, seed=1) != self.conversations.holding_out(5, seed=2)

    def test_none_and_too_many(self) -> None:
        assert self.conversations.holding_out(0) == (self.conversations, [])
        with pytest.raises(ForedraftError, match="cannot hold out 20 of the 20 conversations of 'somewhere'"):
            self.conversations.holding_out(20)


def supervised(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], spans: Sequence[int]) -> list[str]:
    """The text of each span."""
    return [tokenizer.decode([i for i, s in zip(ids, spans, strict=True) if s == span]) for span in range(max(spans) + 1)]


class TestRenderer:
    @pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED], ids=["prefixes", "tags"])
    def test_what_is_supervised(self, template: str) -> None:
        """Each turn is a span of its own, with its end-of-turn token and without the newline after it."""
        tokenizer = tiny_tokenizer(template)
        messages = [{"role": "system", "content": "be brief"}, *chat("hello", "hi — 😀", "more\nplease", "no\n", "why?")]
        rendered = Renderer(tokenizer).render(messages)
        assert rendered.ids == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
        assert supervised(tokenizer, rendered.ids, rendered.spans) == ["hi — 😀<|im_end|>", "no\n<|im_end|>"]

    @pytest.mark.parametrize(
        "messages", [chat("a", "b"), chat("a", "b", "c", "d"), chat("a", "", "c", "d"), chat("q"), [*chat("a", "b"), *chat("c")]]
    )
    def test_prefixes_and_tags_agree(self, messages: Messages) -> None:
        assert Renderer(tiny_tokenizer(CHATML)).render(messages) == Renderer(tiny_tokenizer(CHATML_TAGGED)).render(messages)

    @pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED], ids=["prefixes", "tags"])
    def test_no_assistant(self, template: str) -> None:
        rendered = Renderer(tiny_tokenizer(template)).render(chat("hello"))
        assert set(rendered.spans) == {-1}

    def test_an_end_of_turn_token_that_is_not_eos(self) -> None:
        """As in Gemma and Phi-3: a special token without a name of its own."""
        tokenizer = tiny_tokenizer(eos="<|endoftext|>")
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokenizer.all_special_ids
        rendered = Renderer(tokenizer).render(chat("a", "b", "c", "d"))
        assert supervised(tokenizer, rendered.ids, rendered.spans) == ["b<|im_end|>", "d<|im_end|>"]

    def test_a_template_without_end_of_turn_token(self) -> None:
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        tokenizer = tiny_tokenizer(template)
        rendered = Renderer(tokenizer).render(chat("a", "b"))
        assert supervised(tokenizer, rendered.ids, rendered.spans) == [" b\n"]

    def test_a_template_that_rewrites_earlier_turns_is_refused(self) -> None:
        """Thinking blocks stripped from all turns but the last: the first conversation it happens to is shown."""
        strip = "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
        tokenizer = tiny_tokenizer(CHATML.replace("{{ m.content }}", strip))
        fine, broken = chat("a", "<think>x</think>b"), chat("a", "<think>x</think>b", "c", "<think>y</think>d")
        assert Renderer(tokenizer).render(fine).spans[-2] == 0
        with pytest.raises(ForedraftError) as raised:
            Renderer(tokenizer).render_all(Conversations([fine, broken, broken], "file.jsonl"))
        text = str(raised.value)
        assert text.startswith("file.jsonl, conversation 1: no consistent assistant mask")
        assert "assistant turn 0" in text
        assert "    user: 'a'\n    assistant: '<think>x</think>b'\n    user: 'c'" in text

    def test_text_that_is_closed_only_at_its_end(self) -> None:
        """Phi-3's template puts an end-of-text token behind the last turn, whoever spoke: not the model's, and no rewriting of turns."""
        marks = "<|user|>", "<|assistant|>", "<|end|>"
        template = (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
        )
        tokenizer = tiny_tokenizer(template, eos="<|endoftext|>")
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
        rendered = Renderer(tokenizer).render(chat("a question", "an answer", "another", "one more"))
        assert supervised(tokenizer, rendered.ids, rendered.spans) == ["an answer<|end|>", "one more<|end|>"]
        assert tokenizer.decode(rendered.ids).endswith("one more<|end|>\n<|endoftext|>")

    def test_tags_that_mark_nothing(self) -> None:
        tokenizer = tiny_tokenizer(CHATML + "{% generation %}{% endgeneration %}")
        with pytest.raises(ForedraftError, match=r"(?s)here: the template's generation tags marked nothing.*assistant: 'b'"):
            Renderer(tokenizer).render(chat("a", "b"), "here")

    def test_a_template_that_refuses(self) -> None:
        tokenizer = tiny_tokenizer("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(ForedraftError, match=r"(?s)here: the chat template refuses it: roles must alternate\n.*user: 'a'"):
            Renderer(tokenizer).render(chat("a"), "here")

    def test_no_template(self) -> None:
        with pytest.raises(ForedraftError, match="no chat template"):
            Renderer(tiny_tokenizer(None))

    def test_render_all_counts_what_has_nothing_to_supervise(self) -> None:
        kept, dropped = Renderer(tiny_tokenizer()).render_all(Conversations([*THREE, chat("only a question")]))
        assert (len(kept), dropped) == (3, 1)


class TestPack:
    def lengths(self, conversations: Sequence[Messages]) -> list[int]:
        return [len(Renderer(tiny_tokenizer()).render(m).ids) for m in conversations]

    def test_rows(self) -> None:
        """Two conversations fill a row, with room left over for padding; the long one goes to the next."""
        conversations = [chat("q", "a", "r", "b"), chat("s" * 25, "d"), chat("t", "c")]
        a, b, c = self.lengths(conversations)
        length = a + c + 3
        assert b <= length < a + b
        rows = pack(Conversations(conversations), tiny_tokenizer(), length)
        assert rows.column_names == ["input_ids", "documents", "spans", "row"]
        assert [r["row"] for r in rows] == [0, 1]
        assert all(len(r[key]) == length for r in rows for key in ("input_ids", "documents", "spans"))
        first, second = rows
        assert first["documents"] == [0] * a + [1] * c + [-1] * 3
        assert second["documents"] == [0] * b + [-1] * (length - b)
        assert first["input_ids"][-3:] == [0] * 3
        assert first["spans"][-3:] == [-1] * 3
        assert supervised(tiny_tokenizer(), first["input_ids"], first["spans"]) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
        alone = Renderer(tiny_tokenizer()).render(conversations[2])
        assert first["input_ids"][a : a + c] == alone.ids
        assert first["spans"][a : a + c] == [s + 2 if s >= 0 else -1 for s in alone.spans]  # numbers go on over documents
        assert (
            rows.info.description == f"3 conversations in 2 rows of {length} tokens; 0 without assistant tokens dropped, 0 cut at {length}"
        )

    def test_nothing_is_lost_or_torn(self) -> None:
        conversations = [chat("q" * (i % 7), "a" * (i % 5)) for i in range(40)]
        rows = pack(Conversations(conversations), tiny_tokenizer(), 64)
        texts = []
        for row in rows:
            for document in range(max(row["documents"]) + 1):
                texts.append([i for i, d in zip(row["input_ids"], row["documents"], strict=True) if d == document])
        expected = [Renderer(tiny_tokenizer()).render(m).ids for m in conversations]
        assert sorted(texts) == sorted(expected)

    def test_cut_and_dropped_are_counted(self) -> None:
        conversations = [chat("q", "a"), chat("only a question"), chat("q", "long " * 40), chat("long " * 40, "a")]
        rows = pack(Conversations(conversations), tiny_tokenizer(), 48)
        assert rows.info.description == "2 conversations in 2 rows of 48 tokens; 2 without assistant tokens dropped, 1 cut at 48"
        assert [row["spans"][-1] for row in rows] == [-1, 0]

    @pytest.mark.parametrize("messages", [chat("only a question"), chat("long " * 40, "a")])
    def test_nothing_left(self, messages: Messages) -> None:
        with pytest.raises(ForedraftError, match="none of the 2 conversations of 'here' has an assistant turn within its first 48"):
            pack(Conversations([messages] * 2, "here"), tiny_tokenizer(), 48)


class Drawing(AlgorithmBase):
    """Plans nothing but a random number per row."""

    name = "drawing"

    def plan(self, batch: Any, generators: Any) -> dict[str, Any]:
        return {"drawn": torch.cat([torch.rand(3, generator=g) for g in generators])}


class TestCollator:
    rows = pack(Conversations([chat("q" * n, "a") for n in range(6)]), tiny_tokenizer(), 64)

    def draw(self, *rows: int, seed: int = 0, epoch: int = 0) -> list[list[float]]:
        collator = DraftCollator(Drawing(), seed)
        collator.epoch = epoch
        return collator([self.rows[r] for r in rows])["drawn"].view(-1, 3).tolist()

    def test_tensors(self) -> None:
        batch = DraftCollator(Drawing())([self.rows[0], self.rows[1]])
        assert batch["row"].tolist() == [0, 1]
        for key in ("input_ids", "documents", "spans", "positions"):
            assert batch[key].shape == (2, 64)
            assert batch[key].dtype == torch.long
        assert batch["positions"].eq(positions_within(batch["documents"])).all()

    def test_what_is_drawn_depends_on_seed_epoch_and_row_alone(self) -> None:
        first, second = self.draw(0, 1)
        assert self.draw(1, 0) == [second, first]
        assert self.draw(0) == [first]
        assert first != second
        others = [self.draw(0, seed=1)[0], self.draw(0, epoch=1)[0], self.draw(0, seed=1, epoch=1)[0]]
        assert len({tuple(d) for d in [first, second, *others]}) == 5
        assert seed_of(3, 1, 7) == 6653822070384782430  # in every version of Python

    def test_positions_restart_with_each_document(self) -> None:
        documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 2, 2, 2, 2, 2]])
        assert positions_within(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4]]


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
        assert answer(target, tmp_path / "short.jsonl", Conversations([QUESTIONS[4]]), max_new_tokens=1)[0]["finish"] == ["length"]

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
            (JSONL, "line 1 was not written by `foredraft regenerate`"),
            ("notes\n", "line 1 was not written by `foredraft regenerate`"),
        ],
    )
    def test_a_file_of_other_data_is_refused(self, target: LlamaForCausalLM, tmp_path: Path, content: str, error: str) -> None:
        out = write(tmp_path / "out.jsonl", content)
        with pytest.raises(ForedraftError, match=error):
            answer(target, out)
        assert out.read_text() == content

    def test_sampling_follows_the_seed(self, target: LlamaForCausalLM, tmp_path: Path) -> None:
        settings = {"temperature": 1.0, "conversations": Conversations(QUESTIONS[:1])}
        first = answer(target, tmp_path / "1.jsonl", seed=1, **settings)
        assert first == answer(target, tmp_path / "2.jsonl", seed=1, **settings)
        assert first != answer(target, tmp_path / "3.jsonl", seed=2, **settings)
