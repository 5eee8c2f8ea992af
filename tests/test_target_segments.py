"""The target's attention by documents: the states of a packed batch are those of its own attention, windows included."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_config, tiny_draft, tiny_rows, tiny_target
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Qwen3Config

from foredraft import ForedraftError, Target
from foredraft.contracts.loading import Loading
from foredraft.target import segments
from foredraft.target.loading import load_target

SIZES = {key: value for key, value in tiny_config().to_dict().items() if key not in ("model_type", "architectures", "rope_parameters")}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 4, "head_dim": 8, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, Any] = {
    "llama": lambda: tiny_config(),
    "qwen3": lambda: Qwen3Config(**SIZES | {"head_dim": 8}),
    "gemma3": lambda: Gemma3TextConfig(**SIZES | WINDOWS),
    "gemma2": lambda: Gemma2Config(**SIZES | WINDOWS),
}


def saved(family: str, directory: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_states_are_those_of_its_own_attention(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = saved(family, tmp_path)
    batch = tiny_batch(tiny_draft(tiny_target()).algorithm, tiny_rows([["uuaaaauaaa", "uaaaaaa"], ["uaaa", "uaaaaaa"]], 17))
    own = Target(load_target(name, "float32", Loading(attn_implementation="eager")), (1, 3, 6)).capture(batch)
    model = load_target(name, "float32", Loading(attn_implementation=segments.ASKED))
    target, calls, emulated = Target(model, (1, 3, 6)), [], segments._emulated
    monkeypatch.setattr(segments, "_emulated", lambda *given: (calls.append(given[4:]), emulated(*given))[1])
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda *_: pytest.fail("a mask was prepared"))
    for told in (batch, {key: batch[key] for key in ("input_ids", "positions")}):
        packed = target.capture(told)
        assert_close(packed.aux_BSA, own.aux_BSA, rtol=1e-4, atol=1e-4)
        assert_close(packed.hidden_BST, own.hidden_BST, rtol=1e-4, atol=1e-4)
    assert len(calls) == 16
    assert {(longest, window) for longest, _, window in calls} == {(10, None)} | ({(10, 4)} if family == "gemma3" else set())
    assert model.config._attn_implementation == segments.ASKED


def test_elsewhere_it_is_sdpa(tmp_path: Path) -> None:
    """Generation has caches and padded batches, whose masks it takes."""
    name, ids = saved("gemma3", tmp_path), torch.tensor([[0, 0, 5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 11, 12]])
    settings = {"attention_mask": (ids > 0).long(), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    models = [load_target(name, "float32", Loading(attn_implementation=attention)) for attention in (segments.ASKED, "sdpa")]
    assert_close(*(model.generate(ids, **settings) for model in models))
    assert not segments.wanted(models[1])


def test_capped_scores_keep_their_own_attention(tmp_path: Path) -> None:
    name = saved("gemma2", tmp_path)
    with pytest.raises(ForedraftError, match="Gemma2ForCausalLM does not work by 'foredraft_varlen'"):
        Target(load_target(name, "float32", Loading(attn_implementation=segments.ASKED)), (1, 3, 6))
    model = load_target(name, "float32")
    Target(model, (1, 3, 6))
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation = "sdpa"  # some versions of transformers do not load it so
    with pytest.warns(UserWarning, match="caps its scores at 50, and transformers' SDPA does not"), suppress(ValueError):  # it may refuse
        Target(model, (1, 3, 6))


def test_without_a_kernel_for_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as it would have, and says so; who has asked for it is refused; no memory is no reason to go on."""

    def refuse(*_: Any) -> Any:
        raise failure

    monkeypatch.setattr(segments, "_emulated", refuse)
    model, failure = tiny_target(), RuntimeError("no kernel image is available")
    monkeypatch.setattr("foredraft.target.target.wanted", lambda _: True)
    with pytest.warns(UserWarning, match="under masks.*no kernel image"):
        assert not Target(model, (2, 4, 5))._by_documents
    model.set_attn_implementation(segments.ASKED)
    with pytest.warns(UserWarning, match="no kernel"), pytest.raises(ForedraftError, match="leave it out"):
        Target(model, (2, 4, 5))
    failure = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        Target(model, (2, 4, 5))


def test_windows_that_only_masks_know() -> None:
    """Mistral's layers do not hold theirs: masks must stay."""
    model = tiny_target()
    model.config._attn_implementation = segments.ASKED
    assert segments.wanted(model)
    model.config.sliding_window = 4
    assert not segments.wanted(model)
