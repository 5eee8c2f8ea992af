"""MTP: the multi-token head that a target ships with, fine-tuned to draft from its own output. FastMTP, arXiv:2509.18362.

One layer, shared by all steps. Engines run it as a part of the target: format `mtp` (`mtp_head.py`) writes it as they read it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import Field
from torch import Generator, Tensor

from foredraft import AlgorithmBase, DraftSpec, hookimpl
from foredraft.contracts import DraftModel, Finding, Plan, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.aux_layers import BEFORE_NORM
from foredraft.contracts.draft import Batch
from foredraft.contracts.engine import Files, architecture_of
from foredraft.contracts.finding import error
from foredraft.contracts.options import Frozen
from foredraft.decoding import AutoregressiveDrafter
from foredraft.draft import Summed, plan_unrolled, unrolled
from foredraft.loss import Loss, Minimising, Teacher, chunked, step_weights

OURS = ("fc.", "embedding_norm.", "state_norm.", "norm.", "layers.0.")
"""How the names of our tensors begin, in the order in which `Head` has theirs."""


@dataclass(frozen=True)
class Head:
    """How a family writes its head down and runs it, as vLLM 0.32 does."""

    beginning: str
    """Of its tensors' names; `{L}` is the number of the target's layers, behind which a head is counted."""
    names: tuple[str, ...]
    wiring: Summed
    before_norm: bool = False
    """Whether it reads the target's state before the final norm."""

    def theirs(self, name: str, layers: int) -> str:
        """Their name of a tensor of ours."""
        ours, theirs = next((o, t) for o, t in zip(OURS, self.names, strict=True) if name.startswith(o))
        return self.beginning.format(L=layers) + theirs + name.removeprefix(ours)

    def ours(self, name: str) -> str | None:
        """Our name of a tensor of theirs; None for what is no part of the head, or the target's own table."""
        match = re.match(self.beginning.replace(".", r"\.").format(L=r"\d+"), name)
        own = name[match.end() :] if match else ""
        if not own or own.startswith(TABLES):
            return None
        return next((o + own.removeprefix(t) for o, t in zip(OURS, self.names, strict=True) if own.startswith(t)), None)


TABLES = ("embed_tokens.", "shared_head.head.", "model.embed_tokens.", "lm_head.", "model.language_model.embed_tokens.")
"""The target's own embedding and head, of which some files have copies."""
_LAYER = Summed(first_norm=True, final_norm=True, input_norms=True)
HEADS = {
    "qwen": Head("mtp.", ("fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "norm.", "layers.0."), _LAYER),
    "deepseek": Head("model.layers.{L}.", ("eh_proj.", "enorm.", "hnorm.", "shared_head.norm.", ""), replace(_LAYER, skips_start=True)),
    "mimo": Head(
        "model.mtp_layers.0.",
        ("input_proj.", "token_layernorm.", "hidden_layernorm.", "final_layernorm.", ""),
        replace(_LAYER, skips_start=True, state_first=True),
        before_norm=True,
    ),
}
FAMILIES = {
    "mimo": "mimo",
    "qwen3_next": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe_text": "qwen",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
}
"""Whose targets ship with a head, and its form."""
LAYERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Whose layers they have, where transformers knows them by another name."""


class MTPOptions(Frozen):
    """Options of MTP."""

    ttt_steps: int = Field(3, ge=1, le=512, description="drafting steps in training, each but the first on the head's own output")
    step_decay: float = Field(0.6, gt=0, le=1, description="weight of each step relative to the one before (FastMTP's β)")
    detach: bool = Field(False, description="no gradient flows from a step to those before it (HASS)")
    loss: Loss = Field("ce", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")
    head: str | None = Field(None, pattern="qwen|deepseek|mimo", description="its form; default: that of the target's family, or qwen")
    layers_of: str | None = Field(None, description="its layer is that of this model_type; default: the target's, if it ships a head")


class MTP(AlgorithmBase[MTPOptions], Minimising):
    """Slot t holds the target's final state after x_t and the embedding of x_{t+1}, and predicts x_{t+2}; its own state goes on from there.

    Each step sees the keys of the first one at the slots before its own, as when it is served. (FastMTP's trainers have every step look
    at its own keys only.)
    """

    name = "mtp"
    summary = "the target's own multi-token head, fine-tuned on its own output (MTP, FastMTP)"
    told_by = frozenset({"fc.weight", "embedding_norm.weight", "state_norm.weight"})

    Options = MTPOptions
    heads, families, tables = HEADS, FAMILIES, TABLES

    @property
    def head(self) -> Head:
        """The form."""
        return HEADS[self.options.head or "qwen"]

    @property
    def spec(self) -> DraftSpec:
        """One layer on the target's final state, between its embedding and head."""
        shape: dict[str, Any] = {"before_norm": self.head.before_norm, "layers_of": self.options.layers_of}
        return DraftSpec(num_layers=1, num_aux=1, final=True, target_head=True, architecture="MTPDraftModel", **shape)

    @property
    def wiring(self) -> Summed:
        """As the form has it."""
        return self.head.wiring

    def fitted(self, target: Any) -> Self:
        """With the form, and the kind of layer, of the target's family."""
        kind = family_of(target)
        asked = self.options.model_dump(exclude_none=True)
        settled = {"head": FAMILIES[kind], "layers_of": LAYERS.get(kind, kind)} if kind in FAMILIES else {}
        return type(self)(**{**settled, **asked})

    def shipped(self, draft: DraftModel, names: Collection[str]) -> Mapping[str, str]:
        """The first head of the target's checkpoint."""
        head, layers = self.head, draft.config.foredraft["target"]["num_hidden_layers"]
        own = [name for name in names if name.startswith(head.beginning.format(L=layers))]
        return {ours: name for name in own if (ours := head.ours(name)) and "_scale" not in name}

    @classmethod
    def findings(cls, draft: Files) -> list[Finding]:
        """The traps of this kind of draft: the state before the target's final norm in place of that after it, or another family's form."""
        made = draft.config.get("foredraft")
        if not isinstance(made, Mapping) or made.get("algorithm") != cls.name:
            return []
        try:
            form, layers = made["options"].get("head") or "qwen", made["target"]["num_hidden_layers"]
            read, wanted = draft.config["eagle_aux_hidden_state_layer_ids"], [BEFORE_NORM if HEADS[form].before_norm else layers]
            theirs = FAMILIES.get(family_in(draft.config.get("target_config") or {}), form)
        except (KeyError, TypeError, AttributeError):
            return []  # told elsewhere
        found, breaks = [], "engines run it otherwise than it is trained: few drafts are accepted"
        if theirs != form:
            text = f"the draft has the form '{form}', its target's family the form '{theirs}'"
            found.append(error("mtp-head", text, breaks, f"write head: {theirs}, and train it so"))
        if read != wanted:
            text = f"the draft reads the state {read}, heads of the form '{form}' {wanted} ({BEFORE_NORM}: before the final norm)"
            found.append(error("mtp-state", text, breaks, f"write {wanted}, and train it so"))
        return found

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """The slots that serving reaches, see `plan_unrolled`."""
        return plan_unrolled(batch, self.options.ttt_steps)

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """Σ β^k L_k / Σ β^k, L_k the mean objective of step k."""
        made = unrolled(draft, batch, signal.aux_BSA, self.options.ttt_steps, not self.options.detach)
        states = [state_BQD.flatten(0, 1).index_select(0, query) for state_BQD, query in zip(made, batch["queries"], strict=True)]
        return self.supervised(draft, states, batch, signal)

    def supervised(self, draft: DraftModel, states: Sequence[Tensor], batch: Batch, signal: Signal) -> Step:
        """The loss of the states [N_k, D] of each step."""
        shares = step_weights(len(states), self.options.step_decay)
        weights = [share / count.clamp(min=1) for share, count in zip(shares, batch["counts"], strict=True)]
        teacher = Teacher.of(signal, batch["teacher_rows"], batch["input_ids"])
        return chunked(draft, states, teacher, batch["teachers"], weights, self.objective, batch["pairs"])

    def drafter(self, draft: Any) -> AutoregressiveDrafter:
        """Drafts chains and trees, a depth per forward."""
        return AutoregressiveDrafter(draft)


def family_of(target: Any) -> str:
    """The kind of a target's config, as `FAMILIES` has it."""
    return family_in({"architectures": getattr(target, "architectures", None), "model_type": target.get_text_config().model_type})


def family_in(fields: Mapping[str, Any]) -> str:
    """The same of a `config.json`; MiMo is told by its class, whatever its layers are called."""
    inner = fields.get("text_config")
    kind = (inner if isinstance(inner, Mapping) else fields).get("model_type")
    return "mimo" if architecture_of(fields) == "MiMoForCausalLM" else str(kind)


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithm of this file."""
    return [MTP]
