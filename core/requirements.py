"""What a class must have before the registry takes it: named at once, not by the first error in a training run."""

from typing import Any


def lacking(kind: str, cls: Any) -> list[str]:
    """What the adapter, algorithm or engine `cls` still needs, a text each."""
    # These import torch; whoever offers an adapter or an algorithm has done so already.
    from .config import DraftConfigMixin
    from .draft import BaseDraft
    from .engines import EngineBase
    from .protocols import AlgorithmBase, Frozen

    base: Any = {"adapter": BaseDraft, "algorithm": AlgorithmBase, "engine": EngineBase}[kind]
    if not isinstance(cls, type) or not issubclass(cls, base):
        return [f"to be a subclass of foredraft.{base.__name__}"]

    def inherits(method: str) -> bool:
        mine, theirs = (getattr(getattr(c, method), "__func__", getattr(c, method)) for c in (cls, base))
        return mine is theirs

    def names(value: Any) -> bool:
        return isinstance(value, tuple) and all(isinstance(name, str) for name in value)

    def derived(attribute: str, parent: type) -> bool:
        value = getattr(cls, attribute, None)
        return isinstance(value, type) and issubclass(value, parent)

    checks: dict[str, bool] = {"name: the name it is asked for by": isinstance(getattr(cls, "name", None), str)}
    if kind == "adapter":
        generic = getattr(cls, "generic", False)
        checks |= {
            "model_types: a tuple of the targets' model_type names": names(getattr(cls, "model_types", None)),
            "architecture: the name engines know the draft by": isinstance(getattr(cls, "architecture", None), str),
            "config_class: a class XConfig(DraftConfigMixin, family's config)": derived("config_class", DraftConfigMixin),
            "norm_class: the family's norm": hasattr(cls, "norm_class") or not inherits("make_norm"),
            "mlp_class: the family's feed-forward": hasattr(cls, "mlp_class") or not inherits("make_mlp"),
            "rotary_class: the family's rotary embedding": hasattr(cls, "rotary_class"),
            "def shape(cls, target) -> dict": not inherits("shape"),
            "def refuses(cls, target) -> str | None, as it is generic": not (generic and inherits("refuses")),
        }
    elif kind == "engine":
        checks["def refuses(self, config) -> str | None"] = not inherits("refuses")
        checks["def arguments(self, config, draft, target, num_tokens) -> list"] = not inherits("arguments")
    else:
        checks["Options: a subclass of foredraft.protocols.Frozen"] = derived("Options", Frozen)
        signatures = {
            "spec": "@property def spec(self) -> DraftSpec",
            "plan": "def plan(self, batch, generators) -> dict",
            "loss": "def loss(self, draft, batch, signal, counts) -> Step",
            "drafter": "def drafter(self, draft) -> Drafter",
        }
        checks |= {signature: not inherits(method) for method, signature in signatures.items()}
    return [text for text, fine in checks.items() if not fine]
