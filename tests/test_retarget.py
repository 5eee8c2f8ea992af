"""A trained draft made ready for other data, a fine-tuned target, another vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rigged import trainer_of, written_rows
from tiny import Document, tiny_draft, tiny_rows, tiny_target

from foredraft import ForedraftError, auto_draft, save_draft
from foredraft.target.pairing import sample_of

MODEL = tiny_target()
TUNED = tiny_target(seed=7)
LARGER = tiny_target(vocab=60, seed=8)
ROWS = tiny_rows([[Document(list(range(30, 46)), "uu" + 14 * "a")]] * 2)


def trained(directory: Path, algorithm: str = "eagle3", draft_vocab_size: int | None = None, own: bool = False, **options: Any) -> Any:
    """A loaded draft whose trained weights are all its own, for `MODEL`."""
    draft = tiny_draft(MODEL, algorithm, draft_vocab_size=draft_vocab_size, **options)
    draft.embed_tokens.requires_grad_(own)
    torch.manual_seed(1)
    for p in draft.parameters():
        if p.requires_grad:
            p.data.add_(0.1 * torch.randn_like(p))
    draft.config.foredraft["measured"] = {"mt_bench": {"tau": 3.0}}
    return auto_draft(save_draft(draft.to(torch.bfloat16), directory / "draft"))


@pytest.mark.parametrize("own", [False, True], ids=["the target's embedding", "its own"])
@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        (None, None, TUNED),
        (20, None, TUNED),
        (20, 14, MODEL),
        (20, 20, TUNED),
        (20, 50, MODEL),
        (None, 20, MODEL),
        (None, None, LARGER),
        (20, None, LARGER),
    ],
)
def test_layers_stay_and_the_vocabulary_is_remapped(tmp_path: Path, before: int | None, after: int | None, model: Any, own: bool) -> None:
    draft = trained(tmp_path, draft_vocab_size=before, own=own)
    old = {name: t.clone() for name, t in draft.float().state_dict().items()}
    old_ids = draft.draft_ids.tolist()
    told = draft.retarget(model, ROWS, after)
    vocab, ids = model.config.vocab_size, draft.draft_ids.tolist()
    assert ids == (old_ids if before and not after else ids)
    assert len(ids) == (after or before or vocab)
    assert draft.config.vocab_size == vocab
    assert {30 + i for i in range(2, 16)} <= {*ids} or not after
    if after == 20 == before:  # what the rows do not use is what it knew before
        assert {*ids} - {*range(32, 46)} <= {*old_ids}
    for j, token in enumerate(ids):
        known = token in old_ids
        expected = old["lm_head.weight"][old_ids.index(token)] if known else model.lm_head.weight[token]
        assert torch.equal(draft.lm_head.weight[j], expected), token
    kept = min(50, vocab) if own else 0
    assert torch.equal(draft.embed_tokens.weight[:kept], old["embed_tokens.weight"][:kept])
    assert torch.equal(draft.embed_tokens.weight[kept:], model.model.embed_tokens.weight[kept:])
    rest = {name for name, t in draft.state_dict().items() if name in old and t.shape == old[name].shape and torch.equal(t, old[name])}
    assert old.keys() - rest <= {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    assert f"its rows of {len({*ids} & {*old_ids})} of {len(ids)} tokens" in told
    assert "measured" not in draft.config.foredraft
    assert draft.config.foredraft["target"]["sample"] == sample_of(model)
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    again = auto_draft(save_draft(draft, tmp_path / "again"))
    assert again.draft_ids.tolist() == ids


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_it_trains_on(tmp_path: Path, algorithm: str) -> None:
    """Also a draft whose embedding and head are its target's: it gets the new ones."""
    draft = trained(tmp_path, algorithm, **({"num_layers": 1, "block_size": 4} if algorithm == "dflash" else {}))
    draft.retarget(LARGER, rows := written_rows(LARGER))
    trainer_of(draft, LARGER, tmp_path / "run", rows, max_steps=1).train()
    assert torch.equal(draft.embed_tokens.weight, LARGER.model.embed_tokens.weight)
    assert draft.config.foredraft["target"]["vocab_size"] == 60


def test_a_mask_token_that_the_rows_use_is_another(tmp_path: Path) -> None:
    draft = trained(tmp_path, "dflash", num_layers=1, block_size=4, mask_token_id=40)
    assert "mask token 49, as the rows use the old one" in draft.retarget(MODEL, ROWS)
    assert draft.config.mask_token_id == draft.config.dflash_config["mask_token_id"] == 49


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        (tiny_target(hidden=16), None, "hidden_size: the draft expects 32, the target has 16"),
        (tiny_target(layers=9), None, "num_hidden_layers: the draft expects 8, the target has 9"),
        (MODEL, 10, "a draft vocabulary of 10 tokens is chosen by what the training data uses"),
        (MODEL, 51, "draft_vocab_size=51 does not fit the target's vocabulary of 50"),
    ],
)
def test_refused(tmp_path: Path, model: Any, size: int | None, why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        trained(tmp_path).retarget(model, ROWS if size == 51 else None, size)
