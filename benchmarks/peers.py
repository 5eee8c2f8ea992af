"""Columns of other trainers for `train_step.py`: a step of the same draft, by SpecForge, NeMo AutoModel or speculators.

They want an environment of their own, whose Python is then called, here for SpecForge:

    pip install torch==2.13.0 transformers==5.19.0 datasets pydantic-settings openai loguru aiohttp psutil httpx protobuf pillow triton
    pip install --no-deps specforge==0.2.0 nemo_automodel==0.7.0 speculators==0.9.0 hs-connectors==0.9.0
    python benchmarks/train_step.py --column "SpecForge=/other/bin/python benchmarks/peers.py specforge"

The work is the same as far as it can be: sizes, trained parameters (all but embeddings; of DFlash, not the head), float32, the teacher's
product included, no optimizer. What runs on CUDA alone is replaced by what its authors put beside it, or by SDPA under the same mask.
speculators, and SpecForge's P-EAGLE, take rows as one row of documents, and speculators teaches EAGLE-3 of the draft's vocabulary alone.
"""

import importlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from footprint import SMALL, footprint
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config

WIDTH, AUX, DRAFT_VOCABULARY = SMALL["hidden_size"], 3, 8000
STEPS, DEPTHS, BLOCK, ANCHORS, MASK, DECAY = {"EAGLE-3": 7, "EAGLE-3, 4 steps": 4}, 8, 16, 64, SMALL["vocab_size"] - 1, 7.0
Trained = tuple[nn.Module, Callable[[], Tensor]]
"""A draft, and its loss."""


class Given:
    """A batch as they all want it, shifted: place t has the target's states at t, token t + 1, and the target's last state there."""

    def __init__(self, rows: int, length: int, share: float):
        """`share` of each row is supervised, its end."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.rows, self.length = rows, length
        self.ids = torch.randint(1, SMALL["vocab_size"], (rows, length), generator=generator)
        self.aux, self.last, self.head = random(rows, length, AUX * WIDTH), random(rows, length, WIDTH), random(SMALL["vocab_size"], WIDTH)
        self.head *= WIDTH**-0.5
        self.mask = torch.zeros(rows, length, dtype=torch.long)
        self.mask[:, round(length * (1 - share)) :] = 1
        self.chosen = torch.randperm(SMALL["vocab_size"], generator=generator)[:DRAFT_VOCABULARY].sort().values
        self.known = torch.zeros(SMALL["vocab_size"], dtype=torch.bool).index_fill_(0, self.chosen, True)
        self.offsets = self.chosen - torch.arange(DRAFT_VOCABULARY)

    @property
    def together(self) -> SimpleNamespace:
        """As one row of documents."""
        flat = {name: x.flatten(0, 1)[None] for name, x in vars(self).items() if name in ("ids", "aux", "last", "mask")}
        documents, places = torch.arange(self.rows).repeat_interleave(self.length), torch.arange(self.length).repeat(self.rows)
        return SimpleNamespace(**flat, documents=documents[None], places=places[None], lengths=torch.full((self.rows,), self.length))

    def logits(self, last: Tensor) -> Tensor:
        """The target's."""
        with torch.no_grad():
            return F.linear(last, self.head)


def config(family: Any, **more: Any) -> Any:
    """Of a draft of one layer."""
    size = {
        **SMALL,
        "num_hidden_layers": 1,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "attention_bias": False,
    }
    made = family(**size, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    extra = {"draft_vocab_size": DRAFT_VOCABULARY, "target_hidden_size": WIDTH, "pretraining_tp": 1}
    if family is Qwen3Config:
        extra["_attn_implementation"] = "sdpa"
    for name, value in {**extra, **more}.items():
        setattr(made, name, value)
    return made


def prepared(model: nn.Module, *frozen: str) -> nn.Module:
    """In float32, of small random weights, without those whose names hold one of these."""
    model.float().train()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def under_mask(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float | None = None, enable_gqa: bool = False, **_: Any) -> Tensor:
    """FlexAttention has no way back on the CPU."""
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def dflash_parts() -> tuple[Any, nn.Linear, nn.Embedding]:
    """A config, and the target's head and embedding, frozen."""
    named = {"target_layer_ids": [1, 3, 5], "mask_token_id": MASK, "block_size": BLOCK}
    made = config(Qwen3Config, layer_types=["full_attention"], num_target_layers=8, block_size=BLOCK, dflash_config=named)
    head, embedding = nn.Linear(WIDTH, SMALL["vocab_size"], bias=False), nn.Embedding(SMALL["vocab_size"], WIDTH)
    return made, head.requires_grad_(False), embedding.requires_grad_(False)


def specforge(case: str, given: Given) -> Trained:
    """SpecForge, with the loss that stands beside its Triton kernel."""
    from specforge.core.loss import _compute_loss

    if case == "DFlash":
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        made, head, embedding = dflash_parts()
        draft = prepared(DFlashDraftModel(made))
        online = OnlineDFlashModel(
            draft, head, embedding, MASK, block_size=BLOCK, attention_backend="sdpa", num_anchors=ANCHORS,
            loss_decay_gamma=DECAY,
        )  # fmt: skip
        return draft, lambda: online(input_ids=given.ids, hidden_states=given.aux, loss_mask=given.mask.float())[0]
    name = "peagle" if case == "P-EAGLE" else "eagle3"
    importlib.import_module(f"specforge.algorithms.{name}.model").LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    if case == "P-EAGLE":
        import specforge.modeling.draft.peagle as peagle
        from specforge.algorithms.peagle.model import OnlinePEagleModel

        peagle.compile_friendly_flex_attention = lambda query, key, value, **how: under_mask(query, key, value, **how)
        draft = prepared(peagle.PEagleDraftModel(config(LlamaConfig)), "embed_tokens")
        online, one = OnlinePEagleModel(draft, MASK, num_depths=DEPTHS), given.together
        known(draft, given)
        return draft, lambda: online(
            input_ids=one.ids, attention_mask=torch.ones_like(one.ids), target=given.logits(one.last), loss_mask=one.mask,
            hidden_states=one.aux, lengths=one.lengths,
        )[0]  # fmt: skip
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    draft = prepared(LlamaForCausalLMEagle3(config(LlamaConfig, fc_norm=False), attention_backend="sdpa"), "embed_tokens")
    known(draft, given)
    online = OnlineEagle3Model(draft, length=STEPS[case], attention_backend="sdpa")

    def loss() -> Tensor:
        everything = torch.ones_like(given.ids)
        said = online(
            input_ids=given.ids, attention_mask=everything, target=given.logits(given.last), loss_mask=given.mask[..., None],
            hidden_states=given.aux,
        )[0]  # fmt: skip
        return sum(0.8**k * part for k, part in enumerate(said))  # type: ignore[return-value]

    return draft, loss


def known(draft: Any, given: Given) -> None:
    """Its draft vocabulary."""
    draft.t2d.copy_(given.known)
    draft.d2t.copy_(given.offsets)


def nemo(case: str, given: Given) -> Trained:
    """NeMo AutoModel."""
    if case == "DFlash":
        from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
        from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

        made, head, embedding = dflash_parts()
        draft = prepared(Qwen3DFlashDraftModel(made))
        trainer = DFlashTrainerModule(
            draft, head, embedding, MASK, block_size=BLOCK, attention_backend="sdpa", num_anchors=ANCHORS,
            loss_decay_gamma=DECAY,
        )  # fmt: skip
        return draft, lambda: trainer(given.ids, given.aux, given.mask.float()).loss
    import nemo_automodel.components.speculative.eagle.peagle_draft as peagle
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from nemo_automodel.components.speculative.eagle.peagle_trainer import PEagleTrainerModule

    kind = {"parallel_drafting": case == "P-EAGLE", "mask_token_id": MASK, "num_aux_hidden_states": AUX}
    draft = LlamaEagle3DraftModel(config(LlamaConfig, fc_norm=False, norm_output=False, attention_bias=False, mlp_bias=False, **kind))
    draft.set_vocab_mapping(given.chosen)
    prepared(draft, "embed_tokens")
    chosen = {"selected_token_ids": given.chosen, "selected_token_mask": given.known}
    if case == "P-EAGLE":
        peagle._peagle_flex_attention = under_mask
        how = {"num_depths": DEPTHS, "mask_token_id": MASK, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
        trainer = PEagleTrainerModule(draft, **chosen, **how)
    else:
        trainer = Eagle3TrainerModule(draft, **chosen, ttt_steps=STEPS[case])
    return draft, lambda: trainer(given.ids, torch.ones_like(given.ids), given.mask, given.aux, given.logits(given.last)).loss


def speculators(case: str, given: Given) -> Trained:
    """speculators."""
    from speculators.losses import resolve_loss_config

    one = given.together
    if case == "DFlash":
        from speculators.models.dflash.config import DFlashSpeculatorConfig
        from speculators.models.dflash.core import DFlashDraftModel

        made = DFlashSpeculatorConfig(
            transformer_layer_config=config(Qwen3Config, layer_types=["full_attention"]), draft_vocab_size=SMALL["vocab_size"],
            block_size=BLOCK, aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=MASK,
        )  # fmt: skip
        draft = prepared(DFlashDraftModel(made), "embed_tokens", "lm_head", "verifier")
        how = {"loss_config": resolve_loss_config("ce", "eager"), "gamma": DECAY, "max_anchors": ANCHORS * given.rows}
        return draft, lambda: draft(one.aux, one.ids, one.mask, one.last, one.documents, position_ids=one.places, **how)[1]
    kind = "PEagle" if case == "P-EAGLE" else "Eagle3"
    package = f"speculators.models.{kind.lower()}"
    made = getattr(importlib.import_module(f"{package}.config"), f"{kind}SpeculatorConfig")
    model = getattr(importlib.import_module(f"{package}.core"), f"{kind}DraftModel")
    more = {"mask_token_id": MASK} if case == "P-EAGLE" else {}
    draft = model(
        made(
            transformer_layer_config=config(LlamaConfig, _attn_implementation="sdpa"),
            draft_vocab_size=DRAFT_VOCABULARY,
            norm_before_residual=False,
            **more,
        )
    )
    draft.load_vocab_mappings(given.known, given.offsets)
    prepared(draft, "embed_tokens", "verifier")
    how = {"loss_config": resolve_loss_config("kl_div", "eager")}
    if case == "P-EAGLE":
        how |= {"num_depths": DEPTHS, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
    else:
        how |= {"ttt_steps": STEPS[case], "ttt_step_loss_decay": 0.8}
    return draft, lambda: draft(
        one.aux, one.ids, one.documents, loss_mask=one.mask, position_ids=one.places, verifier_last_hidden_states=one.last, **how
    )[1]


def main() -> None:
    """Print what a cell takes."""
    cell = json.loads(sys.argv[2])
    loss = {"specforge": specforge, "nemo": nemo, "speculators": speculators}[sys.argv[1]]
    torch.manual_seed(0)
    draft, step = loss(cell["case"], Given(cell["rows"], cell["length"], cell["share"]))

    def run() -> None:
        draft.zero_grad()
        step().backward()

    print(json.dumps(footprint(run)))


if __name__ == "__main__":
    main()
