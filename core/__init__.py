"""foredraft: build, train, check and serve draft models for speculative decoding."""

if __name__ != "foredraft":
    raise ImportError(f"this package is 'foredraft', not '{__name__}': install it with `pip install -e .` and `import foredraft`")

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public names and where they live; resolved on first use, so that `import foredraft` loads neither torch nor transformers.
_EXPORTS = {
    "AlgorithmBase": ".contracts",
    "BaseDraft": ".draft",
    "Conversations": ".data",
    "DraftCollator": ".data",
    "DraftSpec": ".contracts",
    "DraftTrainer": ".training",
    "DraftTrainingArguments": ".training",
    "DrafterBase": ".contracts",
    "EngineBase": ".contracts",
    "ForedraftError": ".errors",
    "FormatBase": ".contracts",
    "GroupedQueryDraft": ".draft",
    "Registry": ".registry",
    "Signal": ".contracts",
    "Target": ".target",
    "TreeShape": ".decoding",
    "auto_draft": ".auto",
    "default_registry": ".registry",
    "evaluate": ".decoding",
    "generate": ".decoding",
    "hookimpl": ".contracts",
    "pack": ".data",
    "save_draft": ".files",
    "serve_command": ".formats",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'foredraft' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(import_module(_EXPORTS[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
