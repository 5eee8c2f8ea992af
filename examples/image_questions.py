"""A draft for a target that sees: a tiny LLaVA learns to describe colored shapes from scratch, and then gets a draft."""

import json
import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from foredraft import auto_draft, evaluate
from foredraft.data import Renderer, conversation_of
from foredraft.decoding import load_prompts
from foredraft.decoding.report import demand_identical, table
from foredraft.training.run import train
from foredraft.training.settings import RunConfig

SIDE, PATCH = 32, 8
COLORS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (230, 210, 40)}
SHAPES = ("square", "circle", "triangle")
PLACES = {"upper left": (0, 0), "upper right": (16, 0), "lower left": (0, 16), "lower right": (16, 16)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def picture(color: str, shape: str, place: str) -> Image.Image:
    """A shape of 12 pixels in a quarter of the image."""
    image = Image.new("RGB", (SIDE, SIDE), (245, 245, 245))
    draw, (x, y) = ImageDraw.Draw(image), PLACES[place]
    box = (x + 2, y + 2, x + 13, y + 13)
    if shape == "triangle":
        draw.polygon([(x + 7, y + 2), (x + 2, y + 13), (x + 13, y + 13)], COLORS[color])
    else:
        (draw.rectangle if shape == "square" else draw.ellipse)(box, COLORS[color])
    return image


def file_of(color: str, shape: str, place: str) -> str:
    """Where its picture is, in the data's folder."""
    return f"images/{color}-{shape}-{place.replace(' ', '-')}.png"


def record(number: int) -> dict[str, Any]:
    """A question about an image, and its answer, as a line of JSON names them."""
    draw = random.Random(number)
    color, shape, place = draw.choice(sorted(COLORS)), draw.choice(SHAPES), draw.choice(sorted(PLACES))
    question, answer = draw.choice(
        [
            ("What do you see?", f"I see a {color} {shape} in the {place} corner of the picture."),
            ("Which color is it?", f"The {shape} in the picture is {color}, and the rest of it is white."),
            ("Where is it?", f"It is in the {place} corner: that is where the {color} {shape} stands."),
        ]
    )
    asked = {"role": "user", "content": [{"type": "image", "path": file_of(color, shape, place)}, {"type": "text", "text": question}]}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


def make_processor(texts: list[str]) -> LlavaProcessor:
    """A byte-level tokenizer of these texts, and CLIP's way to read images."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet))
    named = {"image_token": "<image>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", extra_special_tokens=named)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    told = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, fast, **told, chat_template=TEMPLATE)


def make_target(processor: Any, records: list[dict[str, Any]], directory: Path, steps: int) -> LlavaForConditionalGeneration:
    """A LLaVA of half a million parameters, trained on the answers alone."""
    torch.manual_seed(0)
    size = {"num_attention_heads": 4, "intermediate_size": 192}
    vision = CLIPVisionConfig(hidden_size=64, num_hidden_layers=2, image_size=SIDE, patch_size=PATCH, **size)
    vocabulary = {"vocab_size": len(processor.tokenizer), "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    text = LlamaConfig(hidden_size=64, num_hidden_layers=8, num_key_value_heads=2, max_position_embeddings=256, **size, **vocabulary)
    parts = {"vision_config": vision, "text_config": text, "vision_feature_layer": -1}
    model = LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_id=3, image_seq_length=(SIDE // PATCH) ** 2))
    model.generation_config.eos_token_id = 2
    rendered = [Renderer(processor).render(conversation_of(r, directory)) for r in records]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 2), pct_start=0.1)
    for step in range(steps):
        batch = random.Random(step).sample(rendered, min(16, len(rendered)))
        width = max(len(r.ids) for r in batch)
        ids = torch.tensor([r.ids + [0] * (width - len(r.ids)) for r in batch])
        labels = torch.full_like(ids, -100)
        for row, r in zip(labels, batch, strict=True):
            row[: len(r.ids)] = torch.tensor([token if span >= 0 else -100 for token, span in zip(r.ids, r.spans, strict=True)])
        logits = model(input_ids=ids, pixel_values=torch.cat([r.pixels["pixel_values"] for r in batch])).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"target, step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def main(directory: Path = Path("runs/shapes"), conversations: int = 400, steps: int = 200, draft_steps: int = 80, asked: int = 10) -> Any:
    """Make the data, the target and the draft; decode more questions of the kind, with it and without."""
    start = time.perf_counter()
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for shown in product(COLORS, SHAPES, PLACES):
        picture(*shown).save(directory / file_of(*shown))
    records = [record(number) for number in range(conversations + asked)]
    for name, part in (("train", records[asked:]), ("held_out", records[:asked])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    texts = [m["content"] if isinstance(m["content"], str) else m["content"][1]["text"] for r in records for m in r["messages"]]
    processor = make_processor(texts)
    target = make_target(processor, records[asked:], directory, steps)
    for part in (target, processor):
        part.save_pretrained(directory / "target")
    path = train(
        RunConfig.check(
            {
                "target": str(directory / "target"),
                "output_dir": str(directory / "draft"),
                "data": {"train": str(directory / "train.jsonl"), "max_length": 80},
                "options": {"ttt_steps": 4},
                "training": {
                    "max_steps": draft_steps,
                    "per_device_train_batch_size": 4,
                    "learning_rate": 2e-3,
                    "logging_steps": max(draft_steps // 5, 1),
                    "use_cpu": True,
                },
            }
        )
    )
    prompts = load_prompts(directory / "held_out.jsonl")
    results = {"held out": evaluate(target, auto_draft(path), processor, prompts, max_new_tokens=48)}
    print(f"{time.perf_counter() - start:.0f} s")
    Console().print(table(results))
    demand_identical(results)
    return results["held out"]


if __name__ == "__main__":
    main()
