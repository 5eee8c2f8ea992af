"""Whether a draft meets the target it was made for: what is refused, what is warned of, and what passes in silence."""

import copy
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_rows, tiny_target, tiny_tokenizer

from foredraft import DraftTrainer, DraftTrainingArguments, ForedraftError, auto_draft, default_registry, evaluate, generate, save_draft
from foredraft.formats.serving import serve_command
from foredraft.target.pairing import check_pair, sample_of

IDS = torch.tensor([[5, 6, 7]])
OTHER = r"made for another target: this one has another embedding and another head; if acceptance is low"


def start(model: Any, *options: Any, **fields: Any) -> Any:
    draft = auto_draft(model.config, *options, **fields)
    draft.start_from(model)
    return draft.eval()


def silent(run: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return run()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_weights_in_any_dtype(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = tiny_target(tie_word_embeddings=tied)
    path = save_draft(start(model), tmp_path / "draft")
    cast = copy.deepcopy(model).to(dtype)
    cast.save_pretrained(tmp_path / "target")
    silent(lambda: check_pair(cast, auto_draft(path)))
    silent(lambda: serve_command(default_registry().engine("vllm")(), path, str(tmp_path / "target")))


def test_other_weights_are_named_in_one_line(tmp_path: Path) -> None:
    """By whatever reads a draft with a target; without a record, and for what is quantised, nothing is said."""
    model, other = tiny_target(), tiny_target(seed=1)
    draft = start(model)
    path = save_draft(draft, tmp_path / "draft")
    other.save_pretrained(tmp_path / "other")
    ways = {
        "generate": lambda: generate(other, draft, IDS, max_new_tokens=4, do_sample=False),
        "train": lambda: DraftTrainer(auto_draft(path), other, arguments(tmp_path), train_dataset=tiny_rows([["uaaaa"]])),
        "serve": lambda: serve_command(default_registry().engine("sglang")(), path, str(tmp_path / "other")),
    }
    for name, way in ways.items():
        with pytest.warns(UserWarning, match=OTHER) as caught:
            way()
        assert len([w for w in caught if "made for" in str(w.message)]) == 1, name
        assert "\n" not in str(caught[0].message)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        check_pair(other, draft)
        ways["generate"]()
    assert len([w for w in caught if "made for" in str(w.message)]) == 1, "a command asks more than once, and tells once"
    half = copy.deepcopy(model)
    half.lm_head.weight.data += 0.1
    with pytest.warns(UserWarning, match="this one has another head; if"):
        check_pair(half, draft)
    tuned = copy.deepcopy(model)
    tuned.model.layers[-1].mlp.up_proj.weight.data *= 1.01
    with pytest.warns(UserWarning, match="this one has other layers, as one of the two is fine-tuned; if"):
        check_pair(tuned, draft)
    (tmp_path / "file.gguf").touch()
    tuned.config.name_or_path = str(tmp_path / "file.gguf")
    silent(lambda: check_pair(tuned, draft))
    quantised = copy.deepcopy(model)
    quantised.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(50, 32, dtype=torch.int8), requires_grad=False)
    assert sample_of(quantised).keys() == sample_of(model).keys() - {"embedding"}
    silent(lambda: check_pair(quantised, draft))
    del draft.config.foredraft["target"]["sample"]
    silent(lambda: check_pair(other, draft))


def arguments(tmp_path: Path) -> DraftTrainingArguments:
    return DraftTrainingArguments(output_dir=str(tmp_path / "run"), max_steps=1, disable_tqdm=True, per_device_train_batch_size=1)


def test_a_run_goes_on_with_the_target_it_began_with(tmp_path: Path) -> None:
    model, other = tiny_target(), tiny_target(seed=1)
    rows = tiny_rows([["uuaaaaaaaa"]])
    DraftTrainer(start(model, ttt_steps=1), model, arguments(tmp_path), train_dataset=rows).train()
    trainer = DraftTrainer(start(other, ttt_steps=1), other, arguments(tmp_path), train_dataset=rows)
    with pytest.warns(UserWarning, match=OTHER):
        trainer.train(resume_from_checkpoint=str(next((tmp_path / "run").glob("checkpoint-*"))))
    assert trainer.model.config.foredraft["target"]["sample"] == sample_of(other)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_a_command_is_for_a_target_that_fits(engine: str, tmp_path: Path) -> None:
    path, serve = save_draft(start(tiny_target()), tmp_path / "draft"), partial(serve_command, default_registry().engine(engine)())
    tiny_target(hidden=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(ForedraftError, match=r"(?s)another target.*hidden_size: the draft expects 32, the target has 64"):
        serve(path, str(tmp_path / "wide"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name, error in (("empty", "config.json' cannot be read"), ("broken", "is no JSON"), ("nowhere", "no such directory")):
        with pytest.raises(ForedraftError, match=error):
            serve(path, str(tmp_path / name))
    with pytest.warns(UserWarning, match="'someone/model' is no directory and not in the hub's cache"):
        assert "someone/model" in serve(path, "someone/model")
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "of-a-plugin"}))
    with pytest.warns(UserWarning, match="is not understood"):
        serve(path, str(tmp_path / "broken"))


class TestWhatADraftDecodes:
    @pytest.mark.parametrize(
        ("algorithm", "options", "most"),
        [
            ("eagle3", {}, None),
            ("dflash", {"block_size": 4, "num_layers": 1}, 3),
            ("peagle", {"num_depths": 3, "num_layers": 1}, 3),
            ("medusa", {"num_heads": 2}, 2),
        ],
    )
    def test_as_many_tokens_as_it_makes(self, algorithm: str, options: dict[str, Any], most: int | None, tmp_path: Path) -> None:
        """Engines, exports, `generate` and `evaluate` alike."""
        model = tiny_target()
        path = save_draft(start(model, algorithm, **options), tmp_path / "draft")
        draft, serve = auto_draft(path), partial(serve_command, default_registry().engine("hf")())
        model.save_pretrained(tmp_path / "target")
        assert draft.algorithm.max_tokens == most
        assert f"--num-draft-tokens {most or 4} " in serve(path, str(tmp_path / "target"))
        ways = (
            lambda k: serve(path, str(tmp_path / "target"), k),
            lambda k: generate(model, draft, IDS, num_draft_tokens=k, max_new_tokens=4, do_sample=False),
            lambda k: evaluate(model, draft, tiny_tokenizer(), [[{"role": "user", "content": "a"}]], num_draft_tokens=k, max_new_tokens=4),
        )
        for way in ways[:2]:
            way(None)
            way(most or 20)
        for way in ways if most else ():
            with pytest.raises(ForedraftError, match=f"20 tokens were asked for; this draft makes {most} at once"):
                way(20)

    @pytest.mark.parametrize(
        ("ids", "error"),
        [
            ("some text", r"input_ids is a str: pass token ids of shape \[1, L\]"),
            ([[1, 2]], "input_ids is a list: pass token ids"),
            (IDS[0], r"input_ids is \[3\] of torch.int64"),
            (IDS[:, :0], r"input_ids is \[1, 0\]"),
            (IDS.float(), "of torch.float32: pass"),
            (IDS.expand(2, -1), "found a batch of 2"),
            (IDS + 50, "holds 57, the target has embeddings for 0 to 49: is it this target's tokenizer"),
            (-IDS, "holds -7, the target has"),
        ],
    )
    def test_ids(self, ids: Any, error: str) -> None:
        model = tiny_target()
        with pytest.raises(ForedraftError, match=error):
            generate(model, tiny_draft(model), ids, max_new_tokens=4)
        with pytest.raises(ForedraftError, match="the target has embeddings for 0 to 49: is it this target's tokenizer"):
            evaluate(model, tiny_draft(model), tiny_tokenizer(), [[{"role": "user", "content": "a"}]])

    @pytest.mark.parametrize("setting", ["num_beams", "num_return_sequences", "penalty_alpha", "dola_layers"])
    @pytest.mark.parametrize("where", ["argument", "config", "target"])
    def test_no_other_way_of_decoding(self, setting: str, where: str) -> None:
        model = tiny_target()
        given: dict[str, Any] = {setting: "low" if setting == "dola_layers" else 4}
        if where == "config":
            given = {"generation_config": model.generation_config.__class__(**given, do_sample=True)}
        elif where == "target":
            setattr(model.generation_config, setting, given.pop(setting))
        with pytest.raises(ForedraftError, match=setting):
            generate(model, tiny_draft(model), IDS, max_new_tokens=4, **given)

    @pytest.mark.parametrize("prompts", ["text", ["text"], [[]], [["text"]], [{"role": "user", "content": "a"}]])
    def test_prompts(self, prompts: Any) -> None:
        model = tiny_target()
        with pytest.raises(ForedraftError, match=r"a prompt is a list of messages, found .*: pass \[\{'role': 'user'"):
            evaluate(model, tiny_draft(model), tiny_tokenizer(), prompts)
