"""A target's multi-token head as the target's own files have it, for engines that run it as a part of the target."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from foredraft import ForedraftError, FormatBase, auto_draft, default_registry, hookimpl
from foredraft.contracts import Config, DraftModel, Finding
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import error
from foredraft.draft.family import apart

NAME = "mtp"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The fields by which configs say how many heads there are."""


class TargetsOwn(FormatBase):
    """A directory of the target's config and its head alone, under the names of the target's checkpoint."""

    name = "mtp"
    summary = "a target's multi-token head under its own names, as vLLM's method mtp reads it"
    sign = "nothing but mtp.*, model.mtp_layers.0.*, or one model.layers.N.* with eh_proj"
    priority = 2

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """Where all tensors are those of one head, or copies of the target's table."""
        own = [name for name in names if not name.startswith(_mtp().tables)]
        ours = [{head.ours(name) for name in own} for head in _mtp().heads.values()]
        layers = {name.split(".")[2] for name in own if name.startswith("model.layers.")}
        return len(layers) < 2 and any("fc.weight" in found and None not in found for found in ours)

    def rename(self, name: str) -> str | None:
        """Of any of the forms."""
        return next((ours for head in _mtp().heads.values() if (ours := head.ours(name))), None)

    def flatten(self, config: Config) -> dict[str, Any]:
        """What a draft of ours for this target would say. Raises `ForedraftError` for a config of which no target can be made."""
        import torch

        named = "qwen2" if config.get("model_type") == "mimo" else config.get("model_type")
        try:
            with torch.device("meta"):
                draft: Any = auto_draft({**config, "model_type": named}, NAME)
        except Exception as problem:  # whatever the family's classes raise
            raise ForedraftError(f"a directory of a multi-token head has its target's config: {str(problem)[:300]}") from problem
        options = draft.algorithm.options
        own = {name: value for name, value in draft.config.to_dict().items() if name != "foredraft"}
        return {**own, "head": options.head, "layers_of": options.layers_of}

    def findings(self, draft: Files) -> list[Finding]:
        """What vLLM looks for, in the config and beside its layer."""
        inner, found = draft.config.get("text_config"), []
        if not any(text.get(name) for text in (inner, draft.config) if isinstance(text, Mapping) for name in COUNTS):
            breaks = "vLLM makes no head, and refuses the method mtp"
            found.append(error("mtp-count", f"neither {' nor '.join(COUNTS)} is above 0", breaks, "write 1"))
        if lacking := sorted((_mtp().told_by | {"norm.weight"}) - {self.rename(name) for name in draft.tensors}):
            text = f"there is no tensor that ours call {', '.join(lacking)}"
            found.append(
                error("mtp-tensors", text, "the head cannot be read, nor run by engines", "copy it from the training's checkpoint")
            )
        return found

    def refuses(self, config: Config) -> list[str]:
        """Drafts by other algorithms, and heads of targets whose family ships none."""
        made = config.get("foredraft")
        if not isinstance(made, Mapping) or made.get("algorithm") != NAME:
            return ["it is no multi-token head that foredraft trained"]
        options = made.get("options")
        if isinstance(options, Mapping) and options.get("layers_of"):
            return []
        known = ", ".join(sorted(_mtp().families))
        return [f"models of its target's family ship no such head, and engines look for none; those of {known} do"]

    def write(
        self, draft: DraftModel, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The target's config, with one head."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        fields, layers = dict(draft.config.target_config), draft.config.foredraft["target"]["num_hidden_layers"]
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields["model_type"])
        fields["architectures"] = fields.get("architectures") or [name]
        for part in (fields, fields.get("text_config") or {}):
            part.update(dict.fromkeys(COUNTS, 1))
        head = draft.algorithm.head
        return fields, {head.theirs(name, layers): tensor for name, tensor in apart(tensors).items()}


def _mtp() -> Any:
    """The algorithm, which knows each family's names."""
    return default_registry().algorithm(NAME)


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [TargetsOwn]
