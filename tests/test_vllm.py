"""Real vLLM on the CPU serves what training wrote: same text with and without the draft, and every drafted token is ours.

Needs `FOREDRAFT_VLLM_PYTHON`, the interpreter of an environment with vLLM (docs/engines.md says how to make one); half a minute per pair.
vLLM's kernels for the CPU want heads of 32 at least, and latent attention in DeepSeek's own sizes.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, HALF, LAYERS, NOT_ALIKE, SCALED, SEEING, TRANSPOSED, tiny_family
from in_vllm import IN_VLLM, RunningVLLM, running_vllm
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import PreTrainedModel

from foredraft import BaseDraft, Target, auto_draft, default_registry, generate, save_draft
from foredraft.formats import export_draft

HERE = Path(__file__).parent
pytestmark = IN_VLLM

SPEC = importlib.util.spec_from_file_location("matrix_for_vllm", HERE.parent / "benchmarks/matrix.py")
assert SPEC is not None
assert SPEC.loader is not None
matrix: Any = importlib.util.module_from_spec(SPEC)
sys.modules["matrix_for_vllm"] = matrix  # dataclasses look their module up
SPEC.loader.exec_module(matrix)

DRAFTED, NEW, TRAINING_STEPS = matrix.DRAFTED, 40, 25  # few steps: drafts that err
FEW, SHORT = 2, 10  # prompts and tokens where there are many families
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LATENT = {
    **matrix.SHAPE,
    **matrix.MOE,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 8,
}
GROUPED = {**matrix.SHAPE, "head_dim": 32}
OWN_HEAD = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
matrix.TARGETS.update(
    {
        "Llama": {"model_type": "llama", **GROUPED, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e4, **LLAMA3}},
        "Qwen3": {"model_type": "qwen3", **GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "MiMo": {"model_type": "qwen2", **matrix.SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1, **OWN_HEAD},
        "DeepSeek": {"model_type": "deepseek_v3", **LATENT},
        "DeepSeek, yarn": {"model_type": "deepseek_v3", **LATENT, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
    }
)
ALGORITHMS = {
    "EAGLE-3": ("eagle3", {"ttt_steps": DRAFTED, "draft_vocab_size": 40}),
    "EAGLE-3.1": ("eagle31", {"ttt_steps": DRAFTED}),
    "EAGLE-3, two layers": ("eagle3", {"ttt_steps": DRAFTED, "num_layers": 2, "num_aux": 4}),
    "EAGLE-3, normed residual": ("eagle3", {"ttt_steps": DRAFTED, "norm_before_residual": True}),
    "P-EAGLE": ("peagle", {"num_depths": DRAFTED, "num_layers": 2, "draft_vocab_size": 40}),
    "HASS": ("eagle", {"ttt_steps": 2, "loss": {"ce": 0.1, "top10": 1.0}}),
    "DFlash": ("dflash", {"block_size": DRAFTED + 1, "num_layers": 2, "num_aux": 3, "anchors": 16}),
}
matrix.ALGORITHMS.update(ALGORITHMS)
NORMED = {f"{name}, Qwen3-shaped": (a, {**o, "qk_norm": True}) for name, (a, o) in ALGORITHMS.items() if a not in ("dflash", "eagle")}
matrix.ALGORITHMS.update(NORMED)

PAIRS = [
    ("Llama", "EAGLE-3"),
    ("Llama", "EAGLE-3.1"),
    ("Llama", "EAGLE-3, two layers"),
    ("Llama", "EAGLE-3, normed residual"),
    ("Llama", "P-EAGLE"),
    ("Llama", "DFlash"),
    ("Qwen3", "HASS"),
    ("MiMo", "MTP"),
    ("Llama", "Medusa, served"),
    ("Qwen3", "EAGLE-3, Qwen3-shaped"),
    ("Qwen3", "EAGLE-3.1, Qwen3-shaped"),
    ("Qwen3", "P-EAGLE, Qwen3-shaped"),
    ("DeepSeek", "EAGLE-3"),
    ("DeepSeek, yarn", "EAGLE-3.1"),
]
Drafts = dict[int, list[int]]
"""What was drafted, by the number of tokens known before."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@cache
def served_target(family: str, folder: Path) -> tuple[PreTrainedModel, str]:
    model = matrix.trained_target(family)
    model.save_pretrained(folder / family)
    said = json.loads((folder / family / "config.json").read_text())
    named = {"architectures": matrix.TARGETS[family].get("architectures", said["architectures"])}  # of a class that transformers lacks
    (folder / family / "config.json").write_text(json.dumps({**said, **named}))
    return model, str(folder / family)


def prompts() -> list[list[int]]:
    return [ids[: 6 + 2 * i].tolist() for i, ids in enumerate(matrix.chain(20_000, 8, 24, noise=0.3))]


@pytest.fixture(scope="session")
def vllm(folder: Path) -> Iterator[Any]:
    """`served` by a process that has imported vLLM once."""
    with running_vllm(folder) as process:
        yield cache(partial(served, process))


def served(
    process: RunningVLLM, target: str, draft: str | None = None, states: str | None = None, few: bool = False, dtype: str = "float32"
) -> dict[str, Any]:
    """What it says of our prompts, or of a few and a shorter text."""
    llm: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 4}
    if Path(target).name in SEEING:
        llm["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    speculative = None
    if draft is not None:
        config = json.loads((Path(draft) / "config.json").read_text())
        engine = default_registry().engine("vllm")()
        assert engine.refuses(config) is None
        if command := engine.prepare(config, draft, target):
            _, _, source, out, _, form = command
            export_draft(source, out, form)
        speculative = engine.speculative_config(config, draft, DRAFTED)
    return process(target, speculative, prompts()[: FEW if few else None], SHORT if few else NEW, states, **llm)


def in_foredraft(model: PreTrainedModel, draft: BaseDraft, prompt: list[int], new: int) -> tuple[list[int], Drafts]:
    """The text, and what was drafted on the way."""
    drafts: Drafts = {}
    make = draft.algorithm.drafter

    class Noting:
        def __init__(self, draft: BaseDraft):
            self.drafter = make(draft)

        def propose(self, ids: torch.Tensor, *rest: Any) -> Any:
            tokens, logits = self.drafter.propose(ids, *rest)
            drafts[len(ids)] = tokens
            return tokens, logits

    draft.algorithm.drafter = Noting  # type: ignore[method-assign,assignment]
    try:
        out = generate(model, draft, torch.tensor([prompt]), num_draft_tokens=DRAFTED, max_new_tokens=new, do_sample=False)
    finally:
        del draft.algorithm.drafter
    return out[0, len(prompt) :].tolist(), drafts


def accepted(drafts: Drafts, text: list[int]) -> list[int]:
    """How often the draft was right up to position 1, 2, ..."""
    counts = [0] * DRAFTED
    for known, tokens in drafts.items():
        for i in range(len(tokens)):
            counts[i] += tokens[: i + 1] == text[known : known + i + 1]
    return counts


@pytest.mark.parametrize(("family", "algorithm"), PAIRS)
def test_vllm_writes_the_same_text_and_drafts_what_we_draft(family: str, algorithm: str, folder: Path, vllm: Any) -> None:
    draft, _ = matrix.run(family, algorithm, steps=60 if "Medusa" in algorithm else TRAINING_STEPS)  # whose heads are learned late
    model, target = served_target(family, folder)
    path = str(save_draft(draft, folder / f"{family} {algorithm}"))
    plain, drafted = vllm(target), vllm(target, path)
    assert drafted["ids"] == plain["ids"], "vLLM's greedy text with the draft is not the one without"
    assert drafted["absent"] == [], "parameters that vLLM allocates and our file does not fill"
    if not draft.complete:
        draft.take_head(model)
    counts = [0] * DRAFTED
    for prompt, text, theirs in zip(prompts(), drafted["ids"], drafted["drafts"], strict=True):
        # Longer than vLLM's: it drafts beyond the end, we do not.
        continued, ours = in_foredraft(model, draft, prompt, NEW + 2 * DRAFTED)
        assert text == continued[:NEW], "vLLM's greedy text is not transformers'"
        noted = dict(theirs)
        assert len(noted) > 1
        for known, tokens in noted.items():
            if known in ours and len(ours[known]) == DRAFTED:
                assert tokens == ours[known], f"after {known} tokens of {prompt + continued}"
        missed = {known for known in ours if known < len(prompt) + NEW} ^ set(noted)
        assert not missed, f"only one of the two drafted after {sorted(missed)} tokens"
        counts = [a + b for a, b in zip(counts, accepted(noted, prompt + continued), strict=True)]
    assert drafted["accepted"] == counts
    acceptance = [round(count / drafted["drafted"], 2) for count in counts]
    print(f"\n{family}, {algorithm}: τ {1 + sum(counts) / drafted['drafted']:.2f}, accepted per position {acceptance}")
    assert acceptance[0] > 0 and acceptance[-1] < 1, "a draft that is always or never right shows little"  # noqa: PT018


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.xfail(f in NOT_ALIKE, reason=NOT_ALIKE.get(f, ""), strict=False)) for f in (*FAMILIES, *SEEING)],
)
def test_a_family_is_captured_and_served_alike(family: str, folder: Path, vllm: Any) -> None:
    """Layer by layer, what vLLM's drafter reads of a target is what ours reads; then (in float32) text and drafts are the same, too."""
    model, layers, dtype = tiny_family(family), tuple(range(1, LAYERS)), "bfloat16" if family in HALF else "float32"
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder / family)
    if family in TRANSPOSED:
        file = folder / family / "model.safetensors"
        turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in load_file(file).items()}
        save_file(turned, file, {"format": "pt"})
    torch.manual_seed(0)
    draft = auto_draft(model.config, aux_layers=layers, num_aux=len(layers), ttt_steps=DRAFTED)
    draft.start_from(model)
    path, states = str(save_draft(draft.eval(), folder / f"{family} draft")), str(folder / f"{family}.safetensors")
    drafted, right = vllm(str(folder / family), path, states, few=True, dtype=dtype), 0
    theirs, target = load_file(states), Target(model, layers)
    for i, ids in enumerate(prompts()[:FEW]):
        signal = target.capture({"input_ids": torch.tensor([ids]), "positions": torch.arange(len(ids))[None]})
        final = signal.hidden_BST[0] * (target._multiplier if family in SCALED else 1)
        ours = {"final": final, **dict(zip(layers, signal.aux_BSA[0].chunk(len(layers), dim=-1), strict=True))}
        pairs = [*zip(ours.items(), theirs[str(i)].chunk(len(ours), dim=-1), strict=True)]
        for (name, state), their in (*pairs[1:], pairs[0]):  # the first that differs is named
            if family in HALF:
                apart = float((their - state.float()).norm() / state.float().norm())
                print(f"{family}, state {name}: {apart:.3f} apart")
                assert apart < 0.1
                continue
            assert_close(their, state, rtol=2e-3, atol=2e-3 * float(state.abs().max()), msg=lambda m, n=name: f"state {n}: {m}")
    if family in HALF:
        return
    for prompt, text, noted in zip(prompts()[:FEW], drafted["ids"], drafted["drafts"], strict=True):
        continued, ours = in_foredraft(model, draft, prompt, SHORT + 2 * DRAFTED)
        assert text == continued[:SHORT], "vLLM's greedy text is not transformers'"
        both = {known: (tokens, ours[known]) for known, tokens in noted if len(ours.get(known, [])) == DRAFTED}
        assert both, "no draft at the same place"
        assert not (differ := {known: pair for known, pair in both.items() if pair[0] != pair[1]}), f"{len(differ)} of {len(both)}"
        right += sum(accepted(dict(noted), prompt + continued))
    print(f"\n{family}: {right} of {drafted['drafted'] * DRAFTED} drafted tokens accepted")


def test_a_wrong_layer_shows(folder: Path, vllm: Any) -> None:
    """The comparison sees what hurts in the field: aux layers off by one leave the text as it is, and the drafts are others."""
    model, target = served_target("Llama", folder)
    draft, _ = matrix.run("Llama", "EAGLE-3", steps=TRAINING_STEPS)
    path = save_draft(draft, folder / "off by one")
    config = json.loads((path / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    (path / "config.json").write_text(json.dumps(config))
    drafted = vllm(target, str(path))
    assert drafted["ids"] == vllm(target)["ids"]
    different = total = 0
    for prompt, theirs in zip(prompts(), drafted["drafts"], strict=True):
        _, ours = in_foredraft(model, draft, prompt, NEW + 2 * DRAFTED)
        common = [(tokens, ours[known]) for known, tokens in theirs if known in ours]
        different, total = different + sum(a != b for a, b in common), total + len(common)
    assert different > total / 10, f"{different} of {total} drafts differ"
