"""Targets that see: loaded whole, trained and decoded on text alone and with images."""

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from foredraft.contracts.loading import Loading
from foredraft.decoding.compatibility import tiny_model, try_out
from foredraft.target.loading import load_target

SLOW = ("qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "mistral3", "llama4", "glm4v", "glm4v_moe", "internvl", "minimax_m3_vl", "kimi_k25")
SLOW += ("smolvlm", "llava_next", "aya_vision", "lighton_ocr", "paligemma", "exaone4_5")


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)])
def test_a_multimodal_checkpoint_is_loaded_whole_and_drafted_for_on_text_alone(family: str, tmp_path: Path) -> None:
    made = tiny_model(CONFIG_MAPPING[family])
    made.save_pretrained(tmp_path)
    model = load_target(str(tmp_path), "float32", Loading()).eval()
    assert type(model) is type(made)
    assert type(model.config) is not type(model.config.get_text_config())
    model.generation_config.eos_token_id = None
    try_out(model)  # a training step, and a decode that gives the target's own text
