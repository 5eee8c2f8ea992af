"""What the algorithms of blocks have beside DFlash's: confidence that ends a round, a loss that fades, objectives of the user's choice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rigged import predictable_target, trainer_of, written_rows
from tiny import tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch.testing import assert_close

from foredraft import ForedraftError, default_registry, generate
from foredraft.decoding import DraftingStats
from foredraft.draft import DraftLayer

MODEL = tiny_target()
ROWS = tiny_rows([["uuuaaaaaauaaa", "uaaaaa"], ["aaaaauub", "uuaaaaabbbb"]], 20, high=49)
SMALL: dict[str, Any] = {"num_layers": 1, "num_aux": 2, "block_size": 4}


def loss_of(draft: Any, **more: Any) -> torch.Tensor:
    batch = tiny_batch(draft.algorithm, ROWS)
    return draft({**batch, **more}, tiny_signal(MODEL, draft, batch))["loss"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("bias", "drafted"), [(5.0, 4), (-5.0, 0)])
def test_confidence_ends_a_round(bias: float, drafted: int) -> None:
    """Before the first token held for too unlikely; what is generated stays."""
    draft = tiny_draft(MODEL, "dspark", confidence_threshold=0.5, markov_rank=4, **SMALL).eval()
    with torch.no_grad():
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(bias)
    stats, prompt = DraftingStats(), torch.tensor([[3, 7, 9, 4]])
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    out = generate(MODEL, draft, prompt, num_draft_tokens=4, stats=stats, **settings)
    assert torch.equal(out, MODEL.generate(prompt, **settings))
    assert len(stats.drafted) == drafted
    assert stats.passes > 0


def test_the_base_loss_fades() -> None:
    """From the uncorrected logits' loss alone to the corrected ones' alone, over the first half of the training."""
    draft = tiny_draft(MODEL, "domino", emb_dim=4, gru_hidden_dim=5, base_ratio=0.5, **SMALL)
    first, middle, last, unsaid = (loss_of(draft, **({} if p is None else {"progress": p})).detach() for p in (0.0, 0.25, 0.5, None))
    assert_close(middle, (first + last) / 2)
    assert_close(unsaid, last)
    assert not torch.isclose(first, last)
    with torch.no_grad():
        draft.embed_proj[2].weight.zero_()
    assert_close(loss_of(draft, progress=0.8), first)


def test_the_trainer_says_how_far_it_is(tmp_path: Path) -> None:
    target = predictable_target()
    draft, seen = tiny_draft(target, "dflash", **SMALL), []
    loss = draft.algorithm.loss
    draft.algorithm.loss = lambda draft, batch, signal: (seen.append(batch["progress"]), loss(draft, batch, signal))[1]
    trainer_of(draft, target, tmp_path, written_rows(target), max_steps=4, per_device_train_batch_size=2).train()
    assert seen == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("loss", ["lk", {"text": 0.1, "tv": 1.8}], ids=str)
def test_the_target_teaches_where_the_objective_asks(loss: Any) -> None:
    text, taught = tiny_draft(MODEL, "dflash", **SMALL), tiny_draft(MODEL, "dflash", loss=loss, **SMALL)
    assert text.algorithm.needs == ("aux",)
    assert taught.algorithm.needs == ("aux", "final")
    found = loss_of(taught)
    assert not torch.isclose(found, loss_of(text))
    found.backward()
    assert bool(taught.fc.weight.grad.any())


def test_llama_cpp_does_not_take_domino_for_dflash() -> None:
    reasons = (
        default_registry().format("gguf")().refuses(tiny_draft(MODEL, "domino", emb_dim=4, gru_hidden_dim=5, **SMALL).config.to_dict())
    )
    assert len(reasons) == 1
    assert reasons[0].startswith("projector_type")


def test_groups_that_do_not_divide_the_width() -> None:
    with pytest.raises(ForedraftError, match="conv_group_size=5 does not divide the draft's width of 32"):
        tiny_draft(MODEL, "dflash2", conv_group_size=5, **SMALL)


def test_a_layer_around_whose_sublayers_nothing_can_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family's own arrangement: without this, what the algorithm trains there would be left out, or a call fail in the first step."""

    class Arranged(DraftLayer):
        def attend(self, hidden_BQD: Any, x_BSX: Any, rotary: Any, pattern: Any, cache: Any, rows: Any) -> Any:  # type: ignore[override]
            return super().attend(hidden_BQD, x_BSX, rotary, pattern, cache, rows)

    monkeypatch.setattr(type(tiny_draft(MODEL, "dflash", **SMALL)), "layer_class", Arranged)
    assert isinstance(tiny_draft(MODEL, "dflash", **SMALL).layers[0], Arranged)
    with pytest.raises(ForedraftError, match=r"Arranged\.attend takes no `leave`.*'dflash2' needs: let it"):
        tiny_draft(MODEL, "dflash2", **SMALL)


def test_a_fresh_dflash2_drafts_as_dflash() -> None:
    """Convolutions and selector start as nothing."""
    new, old = (tiny_draft(MODEL, name, **SMALL) for name in ("dflash2", "dflash"))
    old.load_state_dict({n: t for n, t in new.state_dict().items() if n in old.state_dict()})
    batch = tiny_batch(old.algorithm, ROWS)
    aux_BSA = tiny_signal(MODEL, old, batch).aux_BSA
    assert_close(new.algorithm.states(new, batch, aux_BSA), old.algorithm.states(old, batch, aux_BSA))
