"""Tiny random targets that see, and their processors, by family."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from tiny import tiny_tokenizer
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerFast

from foredraft.decoding.families import SENSES, SMALL
from foredraft.target.loading import untrained

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


def model_of(
    family: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    seed: int = 0,
    small: tuple[dict[str, Any], dict[str, Any]] = (SMALL, SENSES),
    **fields: Any,
) -> PreTrainedModel:
    """A random model of a family, of these sizes beside the `small` ones of what reads text, and of what sees."""
    whole = CONFIG_MAPPING[family]()
    parts = {}
    for name, own_class in type(whole).sub_configs.items():
        if (part := getattr(whole, name) or (own_class() if name == "vision_config" else None)) is None:
            continue
        sizes, own = (small[0], text) if part is whole.get_text_config() else (small[1], vision)
        known = {*dir(part), *part.attribute_map, *part.to_dict()} - {"sliding_window"}
        parts[name] = {"model_type": part.model_type, **{n: v for n, v in sizes.items() if n in known}, **own}
    config = CONFIG_MAPPING[family](**parts, **fields)
    torch.manual_seed(seed)
    return untrained(config, torch.float32).eval()


def reader_of(own: Any, images: Any, tokenizer: Any, **told: Any) -> Any:
    """A processor of transformers, by class or name, without the one of videos that most have, which needs torchvision."""
    import transformers

    own = getattr(transformers, own) if isinstance(own, str) else own
    kind = type(own.__name__, (own,), {"check_argument_for_proper_class": lambda *_: None})
    return kind(image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **told)


def without_torchvision(family: str) -> Any:
    """The module by which a family reads images with Pillow, in the place of the one that needs torchvision, whose helpers it has."""
    pil = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    if find_spec("torchvision") is None:
        sys.modules.setdefault(f"transformers.models.{family}.image_processing_{family}", pil)
    return pil


def qwen(family: str, reader: str = "Qwen2_5_VLProcessor", interleaved: bool = False, **vision: Any) -> tuple[Any, Any]:
    """M-RoPE in three sections; an image of 32 pixels is 4 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer_with(*QWEN, place="<|vision_start|><|image_pad|><|vision_end|>")
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, map(tokenizer.convert_tokens_to_ids, QWEN), strict=True))
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096})
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = {"vocab_size": len(tokenizer), "rope_parameters": {**rope, **({"mrope_interleaved": True} if interleaved else {})}}
    model = model_of(family, text, {"patch_size": 8, "out_hidden_size": 32, **vision}, **ids)
    return model, reader_of(reader, images, tokenizer, video_processor=None)


def glm(family: str) -> tuple[Any, Any]:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    tokens = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
    tokenizer = tokenizer_with(*tokens, place="<|begin_of_image|><|image|><|end_of_image|>")
    names = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
    ids = dict(zip(names, map(tokenizer.convert_tokens_to_ids, tokens), strict=True))
    images = Glm4vImageProcessorPil(patch_size=8, merge_size=2, size={"shortest_edge": 512, "longest_edge": 8192})
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    model = model_of(family, {"vocab_size": len(tokenizer), "rope_parameters": rope}, {"patch_size": 8, "out_hidden_size": 32}, **ids)
    return model, reader_of("Glm4vProcessor", images, tokenizer, video_processor=None)


def gemma() -> tuple[Any, Any]:
    """Tokens of an image see each other both ways."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_with(place="<start_of_image>", **named)
    images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_seq_length=4)
    ids = {f"{name}_token_index": tokenizer.convert_tokens_to_ids(named[f"{name}_token"]) for name in ("image", "boi", "eoi")}
    model = model_of("gemma3", {"vocab_size": len(tokenizer)}, {}, mm_tokens_per_image=4, **ids)
    return model, reader_of("Gemma3Processor", images, tokenizer, image_seq_length=4)


def idefics(family: str) -> tuple[Any, Any]:
    """SmolVLM's own processor is Idefics 3's, but for videos."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    named = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    tokenizer = tokenizer_with("<end_of_utterance>", place="<image>", **named)
    square = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=square, max_image_size=square, do_image_splitting=False)
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "scale_factor": 2}
    model = model_of(family, {"vocab_size": len(tokenizer)}, {}, **ids)
    return model, reader_of("Idefics3Processor", images, tokenizer, image_seq_len=4)


def internvl() -> tuple[Any, Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = tokenizer_with(place="<IMG_CONTEXT>", **named)
    images = GotOcr2ImageProcessorPil(size={"height": SIZE, "width": SIZE}, crop_to_patches=False)
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), "image_seq_length": 4, "downsample_ratio": 0.5}
    model = model_of("internvl", {"vocab_size": len(tokenizer)}, {"image_size": [SIZE, SIZE], "patch_size": [8, 8]}, **ids)
    return model, reader_of("InternVLProcessor", images, tokenizer, image_seq_length=4, video_processor=None)


def gemma4() -> tuple[Any, Any]:
    """An image is made as large as 70 tokens allow; they see each other both ways."""
    pil = without_torchvision("gemma4")
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    named = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    tokenizer = tokenizer_with(place="<|image|>", **named)
    images = pil.Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=3, max_soft_tokens=70)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(named[f"{name}_token"]) for name in ("image", "boi", "eoi")}
    text = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer), "num_experts": None}
    vision = {"position_embedding_size": 64, "pooling_kernel_size": 3}
    model = model_of("gemma4", text, vision, **ids)
    return model, reader_of(Gemma4Processor, images, tokenizer, feature_extractor=None, video_processor=None)


def mistral() -> tuple[Any, Any]:
    """Rows of an image end in tokens of their own."""
    pil = without_torchvision("pixtral")
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    tokenizer = tokenizer_with("[IMG_BREAK]", "[IMG_END]", place="[IMG]", image_token="[IMG]")
    images = pil.PixtralImageProcessorPil(patch_size={"height": 16, "width": 16}, size={"longest_edge": SIZE})
    ids = {"image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"), "spatial_merge_size": 2}
    model = model_of("mistral3", {"vocab_size": len(tokenizer)}, {}, **ids)
    return model, reader_of(PixtralProcessor, images, tokenizer, patch_size=8, spatial_merge_size=2)


def llama4() -> tuple[Any, Any]:
    """Needs torchvision. An image that is no square is two tiles and a whole."""
    from transformers import Llama4ImageProcessor

    tokens = ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    tokenizer = tokenizer_with(*tokens, place="<|image|>")
    images = Llama4ImageProcessor(size={"height": SIZE, "width": SIZE}, max_patches=2)
    vision = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128}
    ids = {"image_token_index": tokenizer.convert_tokens_to_ids("<|patch|>")}
    model = model_of("llama4", {"vocab_size": len(tokenizer), "num_experts_per_tok": 1}, vision, **ids)
    return model, reader_of("Llama4Processor", images, tokenizer, patch_size=8)


def minimax() -> tuple[Any, Any]:
    """Needs torchvision."""
    from transformers import MiniMaxM3VLImageProcessor

    tokens = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
    tokenizer = tokenizer_with(*tokens, place="]<]image[>[")
    images = MiniMaxM3VLImageProcessor(patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096})
    ids = {"image_token_index": tokenizer.convert_tokens_to_ids(tokens[0]), "projector_hidden_size": 32}
    text = {"vocab_size": len(tokenizer), "dense_intermediate_size": 64}
    return model_of("minimax_m3_vl", text, {"num_attention_heads": 2}, **ids), reader_of(
        "MiniMaxM3VLProcessor", images, tokenizer, video_processor=None
    )


def kimi() -> tuple[Any, Any]:
    """Needs torchvision."""
    from transformers import Kimi_K25ImageProcessor

    tokens = ("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>")
    tokenizer = tokenizer_with(*tokens, place="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>")
    images = Kimi_K25ImageProcessor(patch_size=8, size={"max_height": 8, "max_width": 8}, max_patches=64)
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(tokens[0]), "projection_hidden_size": 32}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 4}
    vision = {"pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2}
    return model_of("kimi_k25", text, vision, **ids), reader_of("Kimi_K25Processor", images, tokenizer, video_processor=None)


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
    "qwen2_vl": lambda: qwen("qwen2_vl", "Qwen2VLProcessor", hidden_size=32),
    "qwen3_vl": lambda: qwen("qwen3_vl", "Qwen3VLProcessor", True, deepstack_visual_indexes=[0, 1], num_position_embeddings=64),
    "qwen3_vl_moe": lambda: qwen("qwen3_vl_moe", "Qwen3VLProcessor", True, deepstack_visual_indexes=[0, 1], num_position_embeddings=64),
    "glm4v": lambda: glm("glm4v"),
    "glm4v_moe": lambda: glm("glm4v_moe"),
    "gemma3": gemma,
    "smolvlm": lambda: idefics("smolvlm"),
    "idefics3": lambda: idefics("idefics3"),
    "internvl": internvl,
    "gemma4": gemma4,
    "mistral3": mistral,
}
"""Those whose processors read images without torchvision."""
WITH_TORCHVISION: dict[str, Callable[[], tuple[Any, Any]]] = {"llama4": llama4, "minimax_m3_vl": minimax, "kimi_k25": kimi}
