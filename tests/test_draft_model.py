"""An ordinary small language model as the draft: started as itself under the target's ids, trained, drafted with, written as a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import TOKENS, tiny_config, tiny_target, tiny_tokenizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Qwen3Config

from foredraft import ForedraftError, auto_draft, default_registry, generate, save_draft
from foredraft.decoding import TreeShape
from foredraft.formats import export_draft
from foredraft.plugins.draft_model import OrdinaryModel
from foredraft.testing import AlgorithmTests
from foredraft.testing.tiny import tiny_model

SMALL = {"vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
SMALL |= {"num_key_value_heads": 1, "initializer_range": 0.3, "tie_word_embeddings": True, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a small model of another family, whose tokens have other ids."""
    folder = tmp_path_factory.mktemp("models")
    target, small = folder / "target", folder / "small"
    tiny_target(vocab=TOKENS).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    tiny_model(Qwen3Config(**SMALL)).save_pretrained(small)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(small)
    return target, small


def test_it_starts_as_itself_and_drafts(places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_at, small_at = places
    target, small = (AutoModelForCausalLM.from_pretrained(at) for at in places)
    moved = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    texts: dict[str, int] = tiny_tokenizer().get_vocab()
    tables = {str(target_at): texts, str(small_at): {text: int(moved[at]) for text, at in texts.items() if at != 299}}
    monkeypatch.setattr("foredraft.plugins.draft_model.load_tokenizer", lambda name: SimpleNamespace(get_vocab=lambda: tables[name]))
    draft: Any = auto_draft(target.config, "draft_model", model=str(small_at))
    assert "knows 299 of the target's 300 ids" in draft.start_from(target)
    ids = torch.tensor([[5, 6, 7, 8]])
    theirs = small(moved[ids]).logits[0, -1]

    def first(logits_W: torch.Tensor, drafted: list[int]) -> None:
        assert_close(logits_W[:299], theirs[moved[:299]], rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        draft.algorithm.drafter(draft).propose(ids[0], torch.zeros(1, 3, 32), 3, first)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    loaded = auto_draft(save_draft(draft.eval(), tmp_path / "draft"))
    assert torch.equal(generate(target, loaded, ids, max_new_tokens=16), plain)
    assert torch.equal(generate(target, loaded, ids, max_new_tokens=16, tree=TreeShape(depth=3, top_k=2, num_nodes=6)), plain)
    engine = default_registry().engine("vllm")()
    assert engine.refuses(loaded.config.to_dict()) is None
    served = engine.speculative_config(loaded.config.to_dict(), "draft", 3)
    assert served == {"model": "draft-head", "method": "draft_model", "num_speculative_tokens": 3}
    assert engine.prepare(loaded.config.to_dict(), "draft", "target")[-2:] == ["--format", "causal_lm"]
    again = AutoModelForCausalLM.from_pretrained(export_draft(tmp_path / "draft", tmp_path / "model", "causal_lm"))
    assert_close(again(ids).logits[0, -1, :299], theirs[moved[:299]], rtol=1e-4, atol=1e-4)

    tables[str(small_at)] = {text: at for text, at in texts.items() if at < 200}
    with pytest.raises(ForedraftError, match=r"knows 67% of the target's tokens.*its tokenizer has 200 tokens, the target's 300"):
        auto_draft(target.config, "draft_model", model=str(small_at)).start_from(target)


class TestOrdinaryModel(AlgorithmTests):
    @pytest.fixture(autouse=True)
    def one_tokenizer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the kit's targets, which are in no directory."""
        tokens = SimpleNamespace(get_vocab=lambda: {str(token): token for token in range(50)})
        monkeypatch.setattr("foredraft.plugins.draft_model.load_tokenizer", lambda name: tokens)

    @pytest.fixture
    def algorithm(self) -> Any:
        return OrdinaryModel

    @pytest.fixture
    def options(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        at = tmp_path_factory.mktemp("small")
        tiny_model(tiny_config(layers=2)).save_pretrained(at)
        return {"model": str(at)}
