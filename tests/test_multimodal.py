"""Targets that see: loaded whole, trained and decoded on text alone and with images."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import chat, tiny_draft, tiny_target
from torch import Tensor
from torch.testing import assert_close
from transformers import CONFIG_MAPPING
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from vision import FAMILIES, WITH_TORCHVISION, picture

from foredraft import Target, auto_draft, evaluate, generate, pack, save_draft
from foredraft.adapters.generic import GenericDraft
from foredraft.contracts.loading import Loading
from foredraft.data import Conversations, DraftCollator
from foredraft.decoding.compatibility import try_out
from foredraft.decoding.evaluate import encode
from foredraft.decoding.families import tiny_model
from foredraft.doctor import examine
from foredraft.target import CachedTarget
from foredraft.target.loading import load_target

SLOW = ("qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "mistral3", "llama4", "glm4v", "glm4v_moe", "internvl", "minimax_m3_vl", "kimi_k25")
SLOW += ("smolvlm", "llava_next", "lighton_ocr", "exaone4_5")


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)])
def test_a_multimodal_checkpoint_is_loaded_whole_and_drafted_for_on_text_alone(family: str, tmp_path: Path) -> None:
    made = tiny_model(CONFIG_MAPPING[family])
    made.save_pretrained(tmp_path)
    model = load_target(str(tmp_path), "float32", Loading()).eval()
    assert type(model) is type(made)
    assert type(model.config) is not type(model.config.get_text_config())
    model.generation_config.eos_token_id = None
    try_out(model)  # a training step, and a decode that gives the target's own text


QUICK = ("llava", "qwen2_5_vl")


@pytest.fixture
def seeing(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A target that sees, its processor, and two conversations with images beside one without."""
    if request.param in WITH_TORCHVISION:
        pytest.importorskip("torchvision")
    model, reader = {**FAMILIES, **WITH_TORCHVISION}[request.param]()
    model.generation_config.eos_token_id = None
    red, blue = picture((255, 0, 0), 48, 32), picture((0, 0, 255))
    one = [{"role": "user", "content": [{"type": "image", "image": red}, "which?"]}, {"role": "assistant", "content": "it is red"}]
    two = [
        *one,
        {"role": "user", "content": ["and ", {"type": "image", "image": blue}, " or ", {"type": "image", "image": red}]},
        {"role": "assistant", "content": "blue, then red"},
    ]
    return model, reader, Conversations([one, chat("why?", "the answer"), two])


@pytest.mark.parametrize(
    "seeing",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in (*FAMILIES, *WITH_TORCHVISION)],
    indirect=True,
)
def test_images_are_read_trained_on_and_decoded_with(seeing: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model, reader, conversations = seeing
    rows = pack(conversations, reader, 256)
    draft = auto_draft(model.config)
    target, stored = (
        Target(model, draft.config.aux_layers),
        CachedTarget(deepcopy(model), draft.config.aux_layers, tmp_path, tokenizer=reader),
    )
    draft.start_from(target, rows)
    batch = DraftCollator(draft.algorithm)([rows[i] for i in range(len(rows))])
    assert [found is not None for found in batch["pixels"]] == [True, False, True]
    image = reader.tokenizer.convert_tokens_to_ids(reader.image_token)
    assert not (batch["spans"] >= 0)[batch["input_ids"] == image].any()
    assert [reader.tokenizer.decode(batch["input_ids"][2][batch["spans"][2] == n]) for n in (0, 1)] == [
        "it is red<|im_end|>",
        "blue, then red<|im_end|>",
    ]

    signal = target.capture(batch)
    count = int((batch["documents"][2] >= 0).sum())
    with torch.no_grad():
        read = {name: t.float() if t.is_floating_point() else t for name, t in batch["pixels"][2].items()}
        whole = model(input_ids=batch["input_ids"][2:, :count], **read, output_hidden_states=True)
    states = torch.cat([whole.hidden_states[i] for i in draft.config.aux_layers], dim=-1)
    assert_close(signal.aux_BSA[2:, :count], states)
    assert_close(target.head(signal.hidden_BST[2, :count]), whole.logits[0])
    if signal.places_CBS is not None:
        seen = {name: t for name, t in batch["pixels"][2].items() if name != "pixel_values"}
        known, _ = model.model.get_rope_index(batch["input_ids"][2:, :count], **seen)
        assert torch.equal(signal.places_CBS[:, 2:, :count], known)
        assert torch.equal(signal.places_CBS[:, 1], torch.arange(256).expand(3, -1))
    stored.fill(rows, show_progress=False)
    stored.release()  # what is read needs no layers
    again = stored.capture(batch)
    assert (signal.places_CBS is None) == (again.places_CBS is None)
    assert again.places_CBS is None or torch.equal(again.places_CBS[:, 2, :count], signal.places_CBS[:, 2, :count])
    with torch.no_grad():
        assert_close(draft(batch, again)["loss"], draft(batch, signal)["loss"])

    trained = positions_of(draft, lambda: draft(batch, signal)["loss"].backward())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in draft.parameters() if p.requires_grad)
    prompt = encode(reader, conversations[2][:3], model)
    told = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    texts: list[Any] = []
    decoded = positions_of(draft, lambda: texts.append(generate(model, draft.eval(), **prompt, **told)))
    assert torch.equal(texts[0], model.generate(**prompt, **told))
    length = prompt["input_ids"].shape[1]
    assert torch.equal(decoded[0][0], trained[0][2, : len(decoded[0][0])])  # of the prompt but its last token, by the first forward
    assert decoded[1].min() >= trained[0][2, length - 2]
    assert draft.places_CBL is None
    result = evaluate(model, draft, reader, [conversations[2][:3], conversations[1][:1]], max_new_tokens=8)
    assert result.identical == 2


@pytest.mark.parametrize(("family", "interleaved"), [(Qwen2_5_VLRotaryEmbedding, False), (Qwen3VLTextRotaryEmbedding, True)])
def test_a_draft_with_sections_turns_by_all_components(family: Any, interleaved: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], **({"mrope_interleaved": True} if interleaved else {})}
    plain = tiny_draft(tiny_target(hidden=64, rope_parameters=rope))
    assert "mrope_section" not in plain.config.rope_parameters  # a fresh one has none
    plain.config.rope_parameters = rope
    draft = type(plain)(plain.config)
    places_CBL = torch.randint(0, 30, (3, 2, 7))
    draft.places_CBL = places_CBL
    found = draft.rotary(torch.zeros(1), torch.arange(9).expand(2, -1))
    counted_on = torch.cat([places_CBL, places_CBL[..., -1:] + 1, places_CBL[..., -1:] + 2], dim=-1)
    for ours, theirs in zip(found, family(draft.config)(torch.zeros(1), counted_on), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("layers", "expected"), [(8, (4, 5, 6)), (36, (4, 18, 33))])
def test_aux_layers_lie_behind_deepstack_and_doctor_says_where_not(layers: int, expected: Any, tmp_path: Path) -> None:
    config = CONFIG_MAPPING["qwen3_vl"](
        text_config={"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 90}
    )
    assert GenericDraft.aux_layers(config, 3) == expected
    config.save_pretrained(tmp_path / "target")
    for aux, said in ((expected, False), ((2, *expected[1:]), True)):
        draft = save_draft(auto_draft(config, adapter="generic", aux_layers=aux), tmp_path / f"draft{said}")
        assert ("aux-before-deepstack" in {finding.id for finding in examine(draft, tmp_path / "target")}) is said


def positions_of(draft: Any, run: Callable[[], Any]) -> list[Tensor]:
    """What the draft's rotary embedding is asked for while it runs."""
    asked: list[Tensor] = []
    hook = draft.rotary_emb.register_forward_pre_hook(lambda module, given: asked.append(given[1]))
    run()
    hook.remove()
    return asked
