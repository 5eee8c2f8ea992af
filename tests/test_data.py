"""What of a conversation is supervised, how conversations are packed, and the batches made of rows."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from killed import kill_at_random
from tiny import CHATML, CHATML_TAGGED, chat, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from foredraft import Conversations, DraftCollator, ForedraftError, pack
from foredraft.contracts import Frozen, Plan
from foredraft.data import Conversation, Rendered, Renderer, Unusable, packing, render, skipped, tables, with_template
from foredraft.data.collate import positions_within, seed_of
from foredraft.data.pieces import MARK
from foredraft.testing.passes import Probe
from foredraft.training.resume import digest

Messages = list[dict[str, Any]]
THREE = [chat(f"question {i}", f"answer {i}") for i in range(3)]

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
"""Like Llama 3's: trims, with headers of special tokens."""
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""Like Phi-3's: closed at its end by the end-of-text token, whoever spoke last."""
TOOLS = (
    "{% for t in tools or [] %}<|im_start|>tool\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like Qwen's: tools ahead, calls behind a turn's text."""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
"""Without special tokens."""
TEMPLATES = {"chatml": CHATML, "tagged": CHATML_TAGGED, "llama3": LLAMA3, "phi3": PHI3, "tools": TOOLS, "plain": PLAIN}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(TEMPLATES[name], eos="<|endoftext|>" if name == "phi3" else "<|im_end|>")
    marks = ["<|start|>", "<|stop|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|call|>"]
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>", "additional_special_tokens": marks})
    return tokenizer


def supervised(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], spans: Sequence[int]) -> list[str]:
    """The text of each span."""
    return [tokenizer.decode([i for i, s in zip(ids, spans, strict=True) if s == span]) for span in range(max(spans) + 1)]


def readable(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids and spans by rendering every prefix, over tokens of the whole text."""

    def text(count: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    encoded = tokenizer(text(len(messages)), add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = encoded["input_ids"], [-1] * len(encoded["input_ids"])
    specials = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for turn, i in enumerate(i for i, m in enumerate(messages) if m["role"] == "assistant"):
        start, end = len(text(i, prompt=True)), len(text(i + 1).removesuffix("<|endoftext|>"))
        inside = [n for n, (a, b) in enumerate(encoded["offset_mapping"]) if a >= start and b <= end and b > a]
        last = max((n for n in inside if ids[n] in specials), default=len(ids))
        for n in inside:
            spans[n] = turn if n <= last else -1
    return ids, spans


class TestRenderer:
    @pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED], ids=["prefixes", "tags"])
    def test_what_is_supervised(self, template: str) -> None:
        """Each turn is a span of its own, with its end-of-turn token and without the newline after it."""
        tokenizer = tiny_tokenizer(template)
        messages = [{"role": "system", "content": "be brief"}, *chat("hello", "hi — 😀", "more\nplease", "no\n", "why?")]
        rendered = Renderer(tokenizer).render(messages)
        assert rendered.ids == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
        assert supervised(tokenizer, rendered.ids, rendered.spans) == ["hi — 😀<|im_end|>", "no\n<|im_end|>"]

    def test_an_end_of_turn_token_that_is_not_eos(self) -> None:
        """As in Gemma and Phi-3: a special token without a name of its own."""
        tokenizer = tiny_tokenizer(eos="<|endoftext|>")
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokenizer.all_special_ids
        rendered = Renderer(tokenizer).render(chat("a", "b", "c", "d"))
        assert supervised(tokenizer, rendered.ids, rendered.spans) == ["b<|im_end|>", "d<|im_end|>"]

    def test_a_template_that_rewrites_earlier_turns_is_refused(self) -> None:
        """Thinking blocks stripped from all turns but the last: the first conversation it happens to is shown."""
        strip = "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
        tokenizer = tiny_tokenizer(CHATML.replace("{{ m.content }}", strip))
        fine, broken = chat("a", "<think>x</think>b"), chat("a", "<think>x</think>b", "c", "<think>y</think>d")
        assert Renderer(tokenizer).render(fine).spans[-2] == 0
        kept, _ = Renderer(tokenizer).render_all(Conversations([fine, broken, broken], "file.jsonl"))
        assert len(kept) == 1
        with pytest.raises(ForedraftError) as raised:
            Renderer(tokenizer).render_all(Conversations([fine, broken, broken], "file.jsonl"), strict=True)
        text = str(raised.value)
        assert text.startswith("file.jsonl, conversation 1: no consistent assistant mask")
        assert "assistant turn 0" in text
        assert "    user: 'a'\n    assistant: '<think>x</think>b'\n    user: 'c'" in text
        with pytest.raises(ForedraftError, match=r"no conversation of 'file.jsonl' can be rendered:\n  2 skipped, the first is"):
            pack(Conversations([broken, broken], "file.jsonl"), tokenizer, 64)

    def test_text_that_is_closed_only_at_its_end(self) -> None:
        """Phi-3's end-of-text token behind the last turn, whoever spoke: not the model's, and no rewriting of turns."""
        tokenizer = tokenizer_of("phi3")
        rendered = Renderer(tokenizer).render(chat("a question", "an answer", "another", "one more"))
        assert supervised(tokenizer, rendered.ids, rendered.spans) == ["an answer<|end|>", "one more<|end|>"]
        assert tokenizer.decode(rendered.ids).endswith("one more<|end|>\n<|endoftext|>")

    @pytest.mark.parametrize(
        ("template", "error"),
        [
            (CHATML + "{% generation %}{% endgeneration %}", "(?s)the template's generation tags marked nothing.*assistant: 'b'"),
            ("{{ raise_exception('no such roles') }}", "(?s)the chat template refuses it: no such roles\n.*assistant: 'b'"),
        ],
    )
    def test_templates_that_do_not_do(self, template: str, error: str) -> None:
        with pytest.raises(Unusable, match=error):
            Renderer(tiny_tokenizer(template)).render(chat("a", "b"))

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_spans_are_those_of_the_readable_way(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the whole text tokenised, and of its beginning: as one slow loop over prefixes finds them."""
        monkeypatch.setattr(render, "MARGIN", 16)
        renderer = Renderer(tokenizer_of(name))
        for conversation in (
            [{"role": "system", "content": "be brief"}, *chat("hello", "hi — 😀", " more\nplease ", "no\n\n", "why?")],
            chat("q", "<|im_end|> said, " * 9 + "then " * 60, "r", "b", "s", "c"),
            chat(*(f"{i} 😀 " * (i % 4) + "x" for i in range(21))),
            chat("q" * 300, "a", "r" * 200, "b" * 300),
            chat("a question that nobody answers"),
        ):
            ids, spans = readable(renderer.tokenizer, conversation)
            assert renderer.render(conversation) == Rendered(ids, spans)
            for length in [*range(40), *range(40, len(ids) + 2, 7)]:
                assert renderer.render(conversation, length) == Rendered(ids[:length], spans[:length]), length

    def test_a_cut_text_is_tokenised_as_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And no more of it than is needed."""
        tokenizer = tiny_tokenizer()
        read = []
        renderer = Renderer(tokenizer)
        whole = renderer.encoding
        monkeypatch.setattr(renderer, "encoding", lambda text: read.append(len(text)) or whole(text))
        for unit in ("the answer is in a sentence. ", "x", " ", "é😀", "question\n\n  another"):
            conversation = chat("q", unit * 20_000)
            ids = tokenizer(tokenizer.apply_chat_template(conversation, tokenize=False))["input_ids"]
            read.clear()
            assert renderer.render(conversation, 300).ids == ids[:300], unit
            assert sum(read) < 20_000 or len(unit) == 1

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_only_turns_that_are_wanted_are_rendered(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a thousand turns no more than fit a row."""
        renderer = Renderer(tokenizer_of(name))
        assert renderer.render(chat("q", "a")).ids  # what is asked once of a template
        asked = []
        text = renderer.template.text
        monkeypatch.setattr(renderer.template, "text", lambda *args, **kwargs: asked.append(args) or text(*args, **kwargs))
        renderer.render(chat(*("a word" for _ in range(1000))), 100)
        assert len(asked) < 30

    @pytest.mark.parametrize("name", TEMPLATES)
    def test_turns_without_content_and_ends_that_are_not_the_models(self, name: str) -> None:
        tokenizer = tokenizer_of(name)
        renderer = Renderer(tokenizer)
        assert set(renderer.render(chat("a", "", "b", " \n")).spans) == {-1}
        some = renderer.render(chat("a", "", "b", "an answer"))
        [nothing, said] = supervised(tokenizer, some.ids, some.spans)
        assert (nothing, said.strip()[:9]) == ("", "an answer")
        conversation = Conversation(chat("a", "cut short", "b", "whole"), cut=[0])
        whole, cut = (renderer.render(c) for c in (list(conversation), conversation))
        assert whole.ids == cut.ids
        [short, full], [_, same] = (supervised(tokenizer, r.ids, r.spans) for r in (cut, whole))
        assert (short.strip(), full) == ("cut short", same)

    @pytest.mark.parametrize("arguments", ["c.function.arguments | tojson", "'' + c.function.arguments"])
    def test_tool_calls(self, arguments: str) -> None:
        """Rendered with the arguments as an object, or as the text that some templates want; refused where a template drops them."""
        tokenizer = tiny_tokenizer(TOOLS.replace("c.function.arguments | tojson", arguments))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
        call = {"type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
        record = {"messages": [*chat("q"), {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [{"name": "look_up"}]}
        rows = pack([record], tokenizer, 256)
        assert supervised(tokenizer, rows[0]["input_ids"], rows[0]["spans"]) == ['<|call|>look_up {"word": "x"}<|im_end|>']
        assert '<|im_start|>tool\n{"name": "look_up"}' in tokenizer.decode(rows[0]["input_ids"])
        with pytest.raises(ForedraftError, match=r"1 skipped, .*conversation 0: tool calls that the chat template does not render"):
            pack([record], tiny_tokenizer(CHATML), 256)

    def test_another_template_and_variables_of_it(self, tmp_path: Path) -> None:
        template = "\n{% if thinking is defined and not thinking %}<no>{% endif %}{{ words }}" + CHATML
        (tmp_path / "template.jinja").write_text(template)
        messages = chat("a", "b")
        variables = {"thinking": False, "words": ["it's", '"é\n', 1.5, None, {"k": True}]}
        for given in (template, str(tmp_path / "template.jinja")):
            expected = tiny_tokenizer(template).apply_chat_template(messages, tokenize=False, **variables)
            tokenizer = with_template(tiny_tokenizer(None), given, variables)
            assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
            assert expected.startswith("\n<no>")
            assert tokenizer.decode(Renderer(tokenizer).render(messages).ids) == expected
        with pytest.raises(
            ForedraftError, match=r"chat_template 'missing.jinja' is no template, and no file that can be read: .*No such file"
        ):
            with_template(tiny_tokenizer(), "missing.jinja")
        with pytest.raises(ForedraftError, match=r"template_kwargs \['a b', 'x'\]: expected names"):
            with_template(tiny_tokenizer(), None, {"a b": 1, "x": object(), "fine": 1})

    def test_no_template(self) -> None:
        with pytest.raises(ForedraftError, match="no chat template"):
            Renderer(tiny_tokenizer(None))

    def test_render_all_counts_what_has_nothing_to_supervise(self) -> None:
        kept, dropped = Renderer(tiny_tokenizer()).render_all(Conversations([*THREE, chat("only a question")]))
        assert (len(kept), dropped) == (3, 1)


STRIPPED = CHATML.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}")
"""Like Qwen3's: what is rendered of a turn depends on whether others follow."""
UNPROVEN = {
    "stripped": STRIPPED,
    "counts": CHATML.replace("{{ m.content }}", "{{ loop.index }}/{{ messages | length }} {{ m.content }}"),
    "looks ahead": CHATML.replace("{{ m.content }}", "{{ m.content }}{{ (messages[loop.index] or m).role }}"),
    "a part": CHATML.replace("in messages", "in messages[0:]"),
    "ends otherwise": CHATML.replace("{% if add", "{{ messages[0].role }}{% if add"),
    "asks before": "{% if add_generation_prompt %}!{% endif %}" + CHATML,
    "skips": CHATML.replace("<|im_start|>{{", "{% if m.role == 'tool' %}{% continue %}{% endif %}<|im_start|>{{", 1),
}


class TestPieces:
    """One rendering for all prefixes, where a template is proven to write message after message."""

    @pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "tagged"])
    def test_the_same_as_by_prefixes(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        fast, exact = (Renderer(tokenizer_of(name)) for _ in range(2))
        monkeypatch.setattr(exact.pieces, "marked", None)
        assert fast.pieces.opening
        call = {"function": {"name": "look_up", "arguments": {"a": 1}}}
        conversations = [
            [{"role": "system", "content": "be brief"}, *chat("hello", "hi — 😀", " more ", " ", "q", "b\n")],
            chat(*(f"{i} {'x' * (i % 3)}" for i in range(9))),
            [{"role": "assistant", "content": "welcome"}, *chat("q", "a")],
            [*chat("q", f"a {MARK} b", "c", "d")],
            Conversation([*chat("q"), {"role": "assistant", "content": "", "tool_calls": [call]}, *chat("r", "s")], tools=[{"name": "t"}]),
        ]
        for conversation in conversations[: 5 if name == "tools" else 4]:
            for length in (None, 7, 30):
                assert fast.render(conversation, length) == exact.render(conversation, length)
        asked = []
        text = fast.template.text
        monkeypatch.setattr(fast.template, "text", lambda *a, **k: asked.append(a) or text(*a, **k))
        fast.render(conversations[1])
        assert len(asked) == 1

    @pytest.mark.parametrize("name", UNPROVEN)
    def test_without_a_proof_prefixes_are_rendered(self, name: str) -> None:
        renderer = Renderer(tiny_tokenizer(UNPROVEN[name]))
        messages = [*chat("q", "a"), {"role": "tool", "content": "t"}, *chat("r", "b")]
        assert renderer.pieces.of(messages, None) is None
        if name in ("a part", "skips"):
            assert renderer.render(messages) == Renderer(tiny_tokenizer(UNPROVEN[name].replace("[0:]", ""))).render(messages)


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
        conversations = [chat("q" * (i % 7), "a" * (1 + i % 5)) for i in range(40)]
        rows = pack(Conversations(conversations), tiny_tokenizer(), 64)
        texts = []
        for row in rows:
            for document in range(max(row["documents"]) + 1):
                texts.append([i for i, d in zip(row["input_ids"], row["documents"], strict=True) if d == document])
        expected = [Renderer(tiny_tokenizer()).render(m).ids for m in conversations]
        assert sorted(texts) == sorted(expected)

    @pytest.mark.parametrize("processes", [1, 2])
    def test_from_files_by_several_processes_and_from_the_cache(
        self, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same rows, in the same order, and the same said of what is skipped, as in memory; the second time nothing is rendered."""
        said: list[str] = []
        monkeypatch.setattr(skipped.logger, "warning", said.append)
        broken = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
        some = [chat("q" * (i % 7), "a" * (1 + 9 * i % 70)) if i % 9 else (broken, chat("q"))[i % 2] for i in range(150)]
        tokenizer = tiny_tokenizer(STRIPPED)
        whole = pack(Conversations(some, "here"), tokenizer, 64)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        monkeypatch.setattr(tables, "IN_MEMORY", 0)
        monkeypatch.setattr(packing, "MANY", 20)
        for _ in range(2):
            conversations = Conversations(some, "here")
            assert conversations.rows.cache_files
            rows = pack(conversations, tokenizer, 64, processes=processes)
            assert rows.cache_files
            assert rows.to_list() == whole.to_list()
            assert rows.info.description == whole.info.description
            assert digest(rows) == digest(whole)
            monkeypatch.setattr(Renderer, "render", None)
        assert len(said) == 3
        assert len(set(said)) == 1
        assert "here, conversation 0: no consistent assistant mask" in said[0]
        assert not list(tmp_path.rglob("*.part"))

    @pytest.mark.slow
    @pytest.mark.parametrize("kills", [5, 50])
    def test_killed_at_any_point(self, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """kill -9; the next call packs what nobody killed would have packed, and nothing half is taken for whole."""
        some = [chat("q" * (i % 7), "a" * (1 + 9 * i % 70)) for i in range(3000)]
        whole = pack(Conversations(some), tiny_tokenizer(), 64)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        monkeypatch.setattr(tables, "IN_MEMORY", 0)
        monkeypatch.setattr(packing, "MANY", 1000)

        def work() -> Any:
            return pack(Conversations(some), tiny_tokenizer(), 64, processes=1)

        for _ in kill_at_random(work, kills, 6.0):
            if any(tmp_path.rglob("rows-*.arrow")):  # done: begin anew
                assert digest(work()) == digest(whole)
                shutil.rmtree(tmp_path / "foredraft")
        assert digest(work()) == digest(whole)

    def test_strict_in_another_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "MANY", 2)
        some = Conversations([*THREE, chat("a", "<think>x</think>b", "c", "d")], "here")
        with pytest.raises(ForedraftError, match=r"^here, conversation 3: no consistent assistant mask"):
            pack(some, tiny_tokenizer(STRIPPED), 64, strict=True, processes=2)

    def test_cut_and_dropped_are_counted(self) -> None:
        conversations = [chat("q", "a"), chat("only a question"), chat("q", "long " * 40), chat("long " * 40, "a")]
        rows = pack(Conversations(conversations), tiny_tokenizer(), 48)
        assert rows.info.description == "2 conversations in 2 rows of 48 tokens; 2 without assistant tokens dropped, 1 cut at 48"
        assert [row["spans"][-1] for row in rows] == [-1, 0]

    @pytest.mark.parametrize("messages", [chat("only a question"), chat("long " * 40, "a")])
    def test_nothing_left(self, messages: Messages) -> None:
        with pytest.raises(ForedraftError, match="none of the 2 conversations of 'here' has an assistant turn within its first 48"):
            pack(Conversations([messages] * 2, "here"), tiny_tokenizer(), 48)


class Drawing(Probe):
    """Plans nothing but a random number per row."""

    name = "drawing"
    Options = Frozen

    def plan(self, batch: Any, generators: Any) -> Plan:
        nothing = torch.empty(0, dtype=torch.long)
        return Plan(nothing, nothing, {"drawn": torch.cat([torch.rand(3, generator=g) for g in generators])})


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
