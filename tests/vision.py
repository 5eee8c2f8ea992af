"""Tiny random targets that see, and their processors, by family; all read images without torchvision unless `NEEDS` says so."""

from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny_tokenizer
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerFast

from foredraft.decoding.compatibility import SENSES, SMALL
from foredraft.target.loading import auto_class

SIZE = 32
"""Pixels of an image's side that a processor takes or makes; patches have 8."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def picture(color: tuple[int, int, int], width: int = SIZE, height: int = SIZE) -> Any:
    """An image of one color."""
    from PIL import Image

    return Image.new("RGB", (width, height), color)


def tokenizer_with(*tokens: str, place: str, **named: str) -> Any:
    """The tiny tokenizer with more special tokens, some known by name, and a template that has `place` for an image."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens, *named.values()]})
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", extra_special_tokens=named
    )
    made.chat_template = TEMPLATE.replace("PLACE", place)
    return made


def model_of(family: str, text: dict[str, Any], vision: dict[str, Any], seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A random model of a family, of these sizes beside those of `compatibility`."""
    whole = CONFIG_MAPPING[family]()
    parts = {}
    for name in type(whole).sub_configs:
        part = getattr(whole, name)
        sizes, own = (SMALL, text) if part is whole.get_text_config() else (SENSES, vision)
        known = {*dir(part), *part.attribute_map, *part.to_dict()} - {"sliding_window"}
        parts[name] = {"model_type": part.model_type, **{n: v for n, v in sizes.items() if n in known}, **own}
    config = CONFIG_MAPPING[family](**parts, **fields)
    torch.manual_seed(seed)
    return auto_class(config).from_config(config, dtype=torch.float32).eval()


def qwen(family: str, processor: str = "Qwen2_5_VLProcessor", **vision: Any) -> tuple[Any, Any]:
    """M-RoPE in three sections; an image of 32 pixels is 4 tokens."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer_with(*QWEN, place="<|vision_start|><|image_pad|><|vision_end|>")
    ids = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            map(tokenizer.convert_tokens_to_ids, QWEN),
            strict=True,
        )
    )
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096})
    own = getattr(transformers, processor)
    kind = type(processor, (own,), {"check_argument_for_proper_class": lambda *_: None})  # a processor of videos needs torchvision
    reader = kind(images, tokenizer, None, chat_template=tokenizer.chat_template)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    model = model_of(
        family, {"vocab_size": len(tokenizer), "rope_parameters": rope}, {"patch_size": 8, "out_hidden_size": 32, **vision}, **ids
    )
    return model, reader


def llava(family: str = "llava") -> tuple[Any, Any]:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_with(place="<image>", image_token="<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    reader = LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "image_seq_length": 16}
    return model_of(family, {"vocab_size": len(tokenizer)}, {}, **ids, vision_feature_layer=-1), reader


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": llava,
    "qwen2_5_vl": lambda: qwen("qwen2_5_vl", fullatt_block_indexes=[1], window_size=32),
}
