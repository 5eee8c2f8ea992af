"""The draft model: how it starts from its target, what it keeps frozen, what a cast may touch."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_config, tiny_draft, tiny_target, tiny_tokenizer
from torch.testing import assert_close

from foredraft import Conversations, ForedraftError, auto_draft
from foredraft.attention import Causal
from foredraft.checkpoint import save_draft
from foredraft.data import Renderer, messages_of
from foredraft.protocols import Layout


@torch.no_grad()
def test_a_fresh_draft_is_the_targets_last_layer() -> None:
    """Without the parts that stay random, a draft that reads layer L-1 gives the target's own logits."""
    model = tiny_target()
    draft = auto_draft(model.config, aux_layers=(2, 4, 7))
    draft.start_from(model)
    width = model.config.hidden_size
    draft.fc.weight.copy_(torch.eye(width).repeat(1, 3) * torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(width))
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(draft.layers[0].self_attn, name).weight[:, :width] = 0
    ids = torch.randint(0, 50, (1, 9))
    out = model(ids, output_hidden_states=True)
    aux = torch.cat([out.hidden_states[i] for i in (2, 4, 7)], dim=-1)
    hidden = draft.backbone(draft.embed_input_ids(ids), draft.project_hidden_states(aux), Layout(torch.arange(9)[None], Causal()))
    assert_close(draft.compute_logits(hidden), out.logits)


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


def test_a_greeting_is_not_supervised() -> None:
    """An assistant turn that nobody asked for (common in ShareGPT data) is context; the answers after it are supervised."""
    conversation = [{"role": r, "content": c} for r, c in (("assistant", "hello"), ("user", "a question"), ("assistant", "an answer"))]
    tokenizer = tiny_tokenizer()
    rendered = Renderer(tokenizer).render(conversation)
    supervised = tokenizer.decode([i for i, span in zip(rendered.ids, rendered.spans, strict=True) if span >= 0])
    assert supervised == "an answer<|im_end|>"


def test_lone_prompts_are_conversations(tmp_path: Path) -> None:
    """`{"prompt": ...}` is a user turn, so that prompt files can be answered."""
    assert messages_of({"prompt": "why?"}, "here") == [{"role": "user", "content": "why?"}]
    (tmp_path / "p.jsonl").write_text('{"prompt": "why?"}\n')
    assert Conversations.load(tmp_path / "p.jsonl") == [[{"role": "user", "content": "why?"}]]
