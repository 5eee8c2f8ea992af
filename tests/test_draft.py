"""The draft model: how it starts from its target, what it keeps frozen, what a cast may touch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_config, tiny_draft, tiny_rows, tiny_signal, tiny_target, tiny_tokenizer
from torch.testing import assert_close
from transformers import AutoConfig, DynamicCache

from foredraft import ForedraftError, Target, auto_draft, generate
from foredraft.contracts.draft import Layout
from foredraft.data import Renderer
from foredraft.draft.attention import Causal
from foredraft.draft.vocabulary import choose_mask_token
from foredraft.files.ours import save_draft


def test_two_layers_start_as_the_last_two() -> None:
    """Upper layers are plain copies."""
    model = tiny_target()
    draft = tiny_draft(model, num_layers=2)
    for name, mine in draft.layers[1].named_parameters():
        assert torch.equal(mine, dict(model.model.layers[-1].named_parameters())[name])
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, model.model.layers[-2].mlp.up_proj.weight)
    assert torch.equal(draft.layers[0].hidden_norm.weight, model.model.layers[-2].input_layernorm.weight)


def test_the_embedding_is_frozen(tmp_path: Path) -> None:
    """In a fresh draft, in one that started from a target, and in one loaded from disk."""
    draft = tiny_draft(tiny_target())
    save_draft(draft, tmp_path / "draft")
    for d in (auto_draft(tiny_config()), draft, auto_draft(tmp_path / "draft")):
        assert [n for n, p in d.named_parameters() if not p.requires_grad] == ["embed_tokens.weight"]


def test_a_cast_keeps_the_rotary_frequencies() -> None:
    """`to(bfloat16)` casts the weights, and back again changes no frequency."""
    draft = tiny_draft(tiny_target())
    before = draft.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.lm_head.weight.dtype == torch.bfloat16
    assert draft.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(draft.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("asked", [{"draft_vocab_size": 5}, {"aux_layers": (1, 2, 3)}, {"adapter": "llama"}])
def test_a_drafts_shape_is_settled(tmp_path: Path, asked: dict[str, object]) -> None:
    """What cannot be obeyed is refused, not ignored."""
    save_draft(tiny_draft(tiny_target()), tmp_path / "draft")
    with pytest.raises(ForedraftError, match=f"{next(iter(asked))}: this draft's shape is settled"):
        auto_draft(tmp_path / "draft", **asked)


def test_the_vocabulary_follows_the_rows() -> None:
    """`start_from(target, rows)` chooses the vocabulary before it copies the head's rows."""
    model = tiny_target()
    draft = auto_draft(model.config, draft_vocab_size=10)
    told = draft.start_from(model, tiny_rows([["uuaaaa", "uubbbb"]]))
    assert told.endswith("the draft vocabulary of 10 tokens covers 100.0% of the supervised ones")
    assert draft.config.foredraft["vocabulary_coverage"] == 1
    assert not torch.equal(draft.draft_ids, torch.arange(10))
    assert torch.equal(draft.lm_head.weight, model.lm_head.weight[draft.draft_ids])


@pytest.mark.parametrize(
    ("algorithm", "options", "told"),
    [
        ("eagle3", {}, "embedding, head, final norm, 9 of 10 layer tensors"),
        ("dflash", {"num_layers": 2, "block_size": 4}, "embedding, head, final norm, 18 of 22 layer tensors"),
        ("medusa", {}, "embedding, head, final norm"),
        ("eagle", {}, "embedding, head"),
    ],
)
def test_starting_says_what_was_taken_over_and_twice_is_once(algorithm: str, options: dict[str, Any], told: str) -> None:
    model = tiny_target()
    draft = auto_draft(model.config, algorithm, **options)
    assert draft.start_from(model) == f"from the target: {told}"
    before = {name: t.clone() for name, t in draft.state_dict().items()}
    assert draft.start_from(model) == f"from the target: {told}"
    assert not [name for name, t in draft.state_dict().items() if not torch.equal(t, before[name])]


def test_states_that_no_norm_follows_start_at_the_scale_of_the_targets() -> None:
    """Targets write at that before their norm: SmolLM2-135M at twenty times it."""
    model = tiny_target()
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[-1].get_submodule(name).weight.mul_(200)
    draft = tiny_draft(model, "eagle", noise=0)
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaa", "uubbbb"]]))
    signal = Target(model, draft.config.aux_layers).capture(batch)
    (state_ND,) = draft.algorithm.states(draft, batch, signal.aux_BSA)
    assert float(state_ND.std() / signal.hidden_BST.std()) < 10  # tiny targets draw large weights; by the target's own it would be hundreds


def test_a_target_of_another_width() -> None:
    """Nothing could be taken over."""
    with pytest.raises(ForedraftError, match=r"the target's embedding is \(50, 16\), the draft's \(50, 32\)"):
        auto_draft(tiny_config()).start_from(tiny_target(hidden=16))


def test_not_finite_weights_are_not_written(tmp_path: Path) -> None:
    """A draft that cannot work does not take the place of one that does."""
    draft = tiny_draft(tiny_target())
    draft.norm.weight.data[3] = torch.nan
    with pytest.raises(ForedraftError, match=r"norm.weight hold values that are not finite"):
        save_draft(draft, tmp_path / "draft")
    assert not list(tmp_path.iterdir())


def test_autoconfig_sees_a_draft(tmp_path: Path) -> None:
    """Its config, read by transformers as a plain Llama's, still makes the draft."""
    draft = tiny_draft(tiny_target(), draft_vocab_size=20, norm_output=True)
    save_draft(draft, tmp_path / "draft")
    again = auto_draft(AutoConfig.from_pretrained(tmp_path / "draft"))
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in draft.named_parameters()}
    assert again.config.norm_output


def test_the_target_keeps_its_own_precision_under_autocast() -> None:
    model = tiny_target()
    draft = tiny_draft(model)
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaa", "uubbbb"]]))
    with torch.autocast("cpu", torch.bfloat16):
        inside = Target(model, draft.config.aux_layers).capture(batch)
    assert torch.equal(inside.aux_BSA, tiny_signal(model, draft, batch).aux_BSA)


def test_a_greeting_is_not_supervised() -> None:
    """An assistant turn that nobody asked for (common in ShareGPT data) is context; the answers after it are supervised."""
    conversation = [{"role": r, "content": c} for r, c in (("assistant", "hello"), ("user", "a question"), ("assistant", "an answer"))]
    tokenizer = tiny_tokenizer()
    rendered = Renderer(tokenizer).render(conversation)
    supervised = tokenizer.decode([i for i, span in zip(rendered.ids, rendered.spans, strict=True) if span >= 0])
    assert supervised == "an answer<|im_end|>"


def test_what_generate_refuses() -> None:
    """A filled cache, whose hidden states the draft never saw; and drafting nothing."""
    model = tiny_target()
    draft = tiny_draft(model)
    cache = DynamicCache()
    model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ForedraftError, match="past_key_values already holds tokens"):
        generate(model, draft, torch.ones(1, 5, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ForedraftError, match="num_draft_tokens=0"):
        generate(model, draft, torch.ones(1, 5, dtype=torch.long), num_draft_tokens=0)


def test_another_config_is_told() -> None:
    """A target of the same shape that differs in its rotary base: drafting works, and a warning says why it may be poor."""
    draft = tiny_draft(tiny_target())
    other = tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    with pytest.warns(UserWarning, match="another config"):
        out = generate(other, draft, torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, pad_token_id=0)
    assert out.shape == (1, 5)


def test_the_mask_token_is_unused_and_has_an_embedding() -> None:
    """The highest id that the text leaves out, unless its embedding is the padding's zero; one that was asked for must be unused."""
    embedding, rows = torch.ones(8, 4), [{"input_ids": [1, 2, 6, 0], "documents": [0, 0, 0, -1]}]
    embedding[7] = 0
    assert choose_mask_token(rows, embedding) == 5
    assert choose_mask_token(rows, embedding, asked=7) == 7
    with pytest.raises(ForedraftError, match="mask_token_id=2 occurs 1 times in the training data"):
        choose_mask_token(rows, embedding, asked=2)
    with pytest.raises(ForedraftError, match="uses all 8 tokens of the target"):
        choose_mask_token([{"input_ids": list(range(8)), "documents": [0] * 8}], embedding)


def test_the_residual_may_be_normed() -> None:
    """With `norm_before_residual` the first layer adds to its normed context: what it adds is the same, what it adds to is not."""
    outputs, inputs = {}, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    for normed in (False, True):
        draft = tiny_draft(tiny_target(), norm_before_residual=normed)
        layer = draft.layers[0]
        layer.mlp.down_proj.weight.data.zero_()  # the residual and attention alone
        torch.nn.init.normal_(layer.hidden_norm.weight, generator=torch.Generator().manual_seed(1))
        outputs[normed] = draft.backbone(2 * inputs, 3 * inputs, Layout(torch.arange(5)[None], Causal()))
    assert_close(outputs[True] - layer.hidden_norm(3 * inputs), outputs[False] - 3 * inputs)
