"""Conversations from files and memory: every form that is read, what is skipped and said of it, and what is held out."""

import base64
import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from tiny import chat, tiny_tokenizer

from foredraft import Conversations, ForedraftError, pack
from foredraft.data import conversation_of, skipped
from foredraft.data.images import images_in, opened
from foredraft.training.run import load_split
from foredraft.training.settings import DataConfig

THREE = [chat(f"question {i}", f"answer {i}") for i in range(3)]
JSONL = "\n".join(json.dumps({"messages": messages}) for messages in THREE) + "\n"


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of."""
    said: list[str] = []
    monkeypatch.setattr(skipped.logger, "warning", said.append)
    return said


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def tool_call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


class TestSources:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", JSONL),
            ("a.jsonl", "\ufeff" + JSONL.replace("\n", "\r\n\r\n")),
            ("a.json", json.dumps([{"messages": m} for m in THREE], indent=1)),
            ("a.json", json.dumps([{"messages": m} for m in THREE])),
            ("a.json", JSONL),
            ("a.jsonl", json.dumps(THREE)),
            ("a.jsonl", "\n".join(map(json.dumps, THREE))),
            ("a.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)),
        ],
        ids=["lines", "BOM, CRLF, blank lines", "document", "document in a line", "lines in .json", "lists", "lists in lines", "gz"],
    )
    def test_json(self, tmp_path: Path, name: str, content: str | bytes) -> None:
        loaded = Conversations.load(write(tmp_path / name, content))
        assert loaded == THREE
        assert loaded.source == str(tmp_path / name)

    def test_parquet(self, tmp_path: Path) -> None:
        """Arrow fills the gaps of a table with nulls, inside tool calls too; they are not the source's."""
        calls = [{**chat("", "")[1], "tool_calls": [tool_call(arguments)]} for arguments in ({"a": 1}, {"b": "x"})]
        mixed = [*THREE, [*chat("q"), *calls]]
        datasets.Dataset.from_list([{"messages": m} for m in mixed]).to_parquet(tmp_path / "a.parquet")
        assert Conversations.load(tmp_path / "a.parquet") == mixed

    def test_folders_globs_and_splits(self, tmp_path: Path) -> None:
        write(tmp_path / "data" / "train.jsonl", JSONL)
        write(tmp_path / "data" / "test.jsonl", JSONL.replace("answer", "reply"))
        replies = [chat(f"question {i}", f"reply {i}") for i in range(3)]
        for source, split, expected in [
            ("data", "train", THREE),
            ("data", "test", replies),
            ("data", "train[1:]+test[:34%]", [*THREE[1:], replies[0]]),
            ("data/*.jsonl", "train", [*replies, *THREE]),
            ("data/train.jsonl", "train[:2]", THREE[:2]),
            ("data/train.jsonl", "train_sft[-1:]", THREE[2:]),
        ]:
            assert Conversations.load(tmp_path / source, split) == expected, (source, split)
        assert Conversations.load(tmp_path / "data", limit=2) == THREE[:2]
        with pytest.raises(ForedraftError, match="has no split 'dev'; it has: test, train"):
            Conversations.load(tmp_path / "data", split="dev")
        with pytest.raises(ForedraftError, match="no file matches"):
            Conversations.load(tmp_path / "data" / "*.parquet")

    @pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/no/such/folder"])
    def test_missing(self, source: str) -> None:
        with pytest.raises(ForedraftError, match=f"data '{source}': no such file"):
            Conversations.load(source)

    @pytest.mark.parametrize(
        ("name", "content", "error"),
        [
            ("a.txt", "hello", r"a.txt': unknown file type '.txt'; known: .jsonl, .json, .gz, .parquet\n.*no turns"),
            ("a.csv", "prompt,answer", r"unknown file type '.csv'.*\n  Plain text and tables hold no turns"),
            ("a.jsonl", "", r"a.jsonl' is empty"),
            ("a.jsonl", "\n\n", r"a.jsonl' is empty"),
            ("a.json", json.dumps([{"messages": m} for m in THREE])[:-20], r"a.json' is one JSON document, and broken: .*char \d+"),
            ("a.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)[:-15], r"a.jsonl.gz' could not be read: EOFError"),
            ("a.parquet", "PAR1", r"a.parquet' could not be read: .*Parquet"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, tmp_path: Path, name: str, content: str | bytes, error: str) -> None:
        with pytest.raises(ForedraftError, match=f"(?s){error}"):
            Conversations.load(write(tmp_path / name, content))

    def test_memory(self) -> None:
        """Lists of message lists or of records, and data sets."""
        records = [{"messages": THREE[0]}, {"conversations": THREE[1]}, THREE[2]]
        table = datasets.Dataset.from_list([{"messages": m} for m in THREE])
        rows = pack(Conversations(THREE), tiny_tokenizer(), 64)
        for data in (THREE, records, table):
            assert pack(data, tiny_tokenizer(), 64).to_list() == rows.to_list()
        preferences = datasets.Dataset.from_list([{"prompt": "question 0", "chosen": "answer 0", "rejected": "no"}])
        assert Conversations.of(preferences) == THREE[:1]
        for data, error in [
            ("a.jsonl", "found a text; files are read by Conversations.load"),
            (["one text", "another"], "2 skipped, the first is conversations, record 0: a bare text, which has no turns: 'one text'"),
            (datasets.DatasetDict(train=table, test=table), "found a mapping of train, test: choose one"),
        ]:
            with pytest.raises(ForedraftError, match=error):
                pack(data, tiny_tokenizer(), 64)


QUESTION, ANSWER = chat("q", "a")
CALLING = {"role": "assistant", "content": "", "tool_calls": [tool_call({"word": "x"})]}


class TestForms:
    @pytest.mark.parametrize(
        ("record", "expected"),
        [
            (chat("q", "a"), chat("q", "a")),
            ({"messages": chat("q", "a"), "prompt": "other"}, chat("q", "a")),
            (
                {"conversations": [{"from": r, "value": v} for r, v in (("system", "s"), ("human", "q"), ("gpt", "a"))]},
                [{"role": "system", "content": "s"}, *chat("q", "a")],
            ),
            ({"conversation": chat("q", "a")}, chat("q", "a")),
            ({"prompt": "q"}, chat("q")),
            ({"turns": ["q", "and then?"]}, [*chat("q"), *chat("and then?")]),
            ({"prompt": "q", "completion": "a"}, chat("q", "a")),
            ({"prompt": chat("q"), "completion": [ANSWER]}, chat("q", "a")),
            ({"prompt": "q", "chosen": "a", "rejected": "b"}, chat("q", "a")),
            ({"prompt": "q", "chosen": chat("q", "a"), "rejected": chat("q", "b")}, chat("q", "a")),
            ({"prompt": chat("q"), "chosen": [ANSWER]}, chat("q", "a")),
            ({"chosen": chat("q", "a"), "rejected": chat("q", "b")}, chat("q", "a")),
            ({"messages": [{"role": "User ", "content": "q"}, {"role": "model", "content": "a"}]}, chat("q", "a")),
            ({"messages": [{"role": "Human", "content": "q"}, {"role": "Assistant", "content": "a"}]}, chat("q", "a")),
            (
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "q, "}, {"type": "text", "text": "r"}]}, ANSWER]},
                chat("q, r", "a"),
            ),
            ({"messages": [{**QUESTION, "name": "ada", "weight": None}, ANSWER]}, [{**QUESTION, "name": "ada"}, ANSWER]),
            ({"messages": [QUESTION, {**CALLING, "content": None}]}, [QUESTION, CALLING]),
            ({"messages": [QUESTION, {**CALLING, "tool_calls": [tool_call('{"word": "x"}')]}]}, [QUESTION, CALLING]),
        ],
    )
    def test_accepted(self, tmp_path: Path, record: Any, expected: Any) -> None:
        assert conversation_of(record) == expected
        file = write(tmp_path / "a.jsonl", json.dumps(record) + "\n" + json.dumps({"messages": chat("2024-01-02", "2024-01-02T03:04:05Z")}))
        assert Conversations.load(file) == [expected, chat("2024-01-02", "2024-01-02T03:04:05Z")]  # other keys' neighbour; dates stay text

    @pytest.mark.parametrize(
        ("record", "expected"),
        [
            ({"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, "q"]}]}, "iq"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "DATA"}}, "q"]}]}, "iq"),
            ({"messages": [{"role": "user", "content": ["p", {"type": "image"}, "q"]}], "images": ["a.png"]}, "piq"),
            ({"prompt": "q", "images": ["a.png", {"path": "a.png"}]}, "iiq"),
            ({"conversations": [{"from": "human", "value": "p<image>q"}], "image": "a.png"}, "piq"),
            ({"messages": chat("q"), "images": []}, "q"),
        ],
    )
    def test_images_stand_where_they_are_meant(self, tmp_path: Path, record: Any, expected: str) -> None:
        Image.new("RGB", (2, 3), (255, 0, 0)).save(tmp_path / "a.png")
        url = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
        file = write(tmp_path / "a.jsonl", json.dumps(record).replace("DATA", url))
        [conversation] = Conversations.load(file)
        content = conversation[0]["content"]
        assert "".join("i" if p["type"] == "image" else p["text"] for p in content if p) == expected if "i" in expected else content == "q"
        assert [opened(image).size for image in images_in(conversation)] == [(2, 3)] * expected.count("i")

    def test_a_data_sets_images_are_decoded_where_they_are_read(self) -> None:
        rows = {"images": [[Image.new("RGB", (2, 3))]], "messages": [chat("q", "a")]}
        text = datasets.Value("string")
        kinds = datasets.Features(images=datasets.List(datasets.Image()), messages=[{"role": text, "content": text}])
        found = Conversations.of(datasets.Dataset.from_dict(rows, kinds))
        assert isinstance(images_in(found[0])[0], bytes)
        assert found.have_images

    def test_tools_and_cut_answers(self) -> None:
        tools = [{"type": "function", "function": {"name": "look_up"}}]
        for given in (tools, json.dumps(tools)):
            assert conversation_of({"messages": chat("q", "a"), "tools": given}).tools == tools
        assert conversation_of({"messages": chat("q", "a"), "tools": []}).tools is None
        assert conversation_of({"messages": chat("q", "a", "r", "b"), "index": 0, "finish": ["stop", "length"]}).cut == {1}

    def test_line_separators_inside_text(self, tmp_path: Path) -> None:
        messages = chat("one\u2028two", "three\x85four")
        file = write(tmp_path / "a.jsonl", json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        assert Conversations.load(file) == [messages]

    BAD: tuple[tuple[str | bytes, str], ...] = (
        ("null", "a record that is no object: None"),
        ("5", "a record that is no object: 5"),
        ('"hi"', "a bare text, which has no turns: 'hi'"),
        ("{}", "no turns: expected a list under 'messages'"),
        ('{"text": "hi"}', r"no turns: expected .*, found the fields \['text'\]"),
        ('{"messages": []}', r"no turns: expected .*, found the fields \['messages'\]"),
        ('{"messages": "hi"}', "no list of turns: found 'hi'"),
        ('{"messages": ["hi", "ho"]}', "a turn that is no object: turn 0 is 'hi'"),
        ('{"messages": [{"role": "user", "text": "hi"}]}', r"a turn without 'content' \(or 'value'\): turn 0 has \['role', 'text'\]"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "a turn without 'content'"),
        ('{"messages": [{"content": "hi"}]}', "a turn without 'role'"),
        ('{"messages": [{"role": "narrator", "content": "hi"}]}', "an unknown role: 'narrator' in turn 0; known: user, human, assistant"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content of type int, which is no text: 5 in turn 0"),
        ('{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}', "a content part of type 'audio'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "images that do not match their places: 0 images, 1 places"),
        ('{"prompt": "q", "images": ["none.png"]}', "an image that is not here: turn 0: no file 'none.png'"),
        ('{"prompt": "q", "image": "https://a.b/c.png"}', "an image that is not here: turn 0: 'https://a.b/c.png': images are not fetched"),
        ('{"messages": [{"role": "assistant", "content": [{"type": "image", "bytes": "x"}]}]}', "an image in an assistant turn"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "text that is no Unicode"),
        ('{"messages": [{"role": "assistant", "tool_calls": [5]}]}', "a tool call without 'function'"),
        ('{"prompt": "q", "completion": "a", "tools": "{"}', "'tools' that are no list of objects"),
        ('{"messages": [', "no JSON: Expecting value"),
        ("[" * 3000, "no JSON: nested too deeply"),
        ("9" * 5000, "no JSON: Exceeds the limit"),
        (b'{"prompt": "caf\xe9"}', "no UTF-8 text: .* 0xe9"),
    )

    @pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason[:30] for _, reason in BAD])
    def test_bad_records_are_skipped_counted_and_shown_once(
        self, tmp_path: Path, warnings: list[str], line: str | bytes, reason: str
    ) -> None:
        bad = line if isinstance(line, bytes) else line.encode()
        file = write(tmp_path / "a.jsonl", JSONL.encode() + bad + b"\n" + bad + b'\n{"other": 1}\n' + JSONL.encode())
        assert Conversations.load(file) == [*THREE, *THREE]
        [warning] = warnings
        same = reason.startswith("no turns")
        assert re.search(rf"{3 if same else 2} skipped, the first is .*a.jsonl, line 4: {reason}", warning)
        assert warning.count("a.jsonl") == (1 if same else 2)
        with pytest.raises(ForedraftError, match=f"a.jsonl, line 4: {reason}"):
            Conversations.load(file, strict=True)
        with pytest.raises(ForedraftError, match=f"(?s)a.jsonl' holds no conversation.*a.jsonl, line 1: {reason}"):
            Conversations.load(write(file, bad))


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
        with pytest.raises(ForedraftError, match="cannot hold out 1 of the 3 conversations of 'x', of which 1 differ"):
            Conversations([chat("q", "a")] * 3, "x").holding_out(1)

    def test_what_is_held_out_is_in_no_source(self, tmp_path: Path, warnings: list[str]) -> None:
        """Not in the first source again, not in a copy of it, not with other white space."""
        lines = [json.dumps({"messages": chat(f"question {i}", "an answer")}) for i in range(8)]
        once = write(tmp_path / "once.jsonl", "\n".join([*lines, *lines[:4], '{"messages": []}']))
        other = write(tmp_path / "other.jsonl", "\n".join(lines).replace("an answer", "an  answer\\n"))
        data = DataConfig(train=[str(once), str(once), str(other)], held_out=4)
        train, held_out = load_split(data)
        asked = {c[0]["content"] for c in held_out}
        assert len(asked) == len(held_out) == 4
        assert {c[0]["content"] for c in train} == {f"question {i}" for i in range(8)} - asked
        said = [w for w in warnings if "left out" in w]
        assert sum(int(w.split()[0]) for w in said) == 12 + 12 + 8 - 4 - len(train)
        assert f"4 conversations of '{other}' are also in '{once} (held out)': left out" in said
        mixed = [{"path": str(other), "weight": 2.5}, str(once)]
        twice, _ = load_split(DataConfig.model_validate({"train": mixed, "held_out": 4}))
        taken = Counter(c[0]["content"] for c in twice if c[1]["content"] != "an answer")
        assert sorted(taken.values()) == [2, 2, 3, 3]
        assert twice[10:] == [c for c in Conversations.load(once) if c[0]["content"] in taken]
        with pytest.raises(ForedraftError, match=r"once.jsonl, line 13: no turns"):
            load_split(data.model_copy(update={"strict": True}))
