"""foredraft: build, train, check and serve draft models for speculative decoding."""

if __name__ != "foredraft":
    raise ImportError(f"this package is 'foredraft', not '{__name__}': install it with `pip install -e .` and `import foredraft`")

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names, for type checkers as for `import`: resolved on first use, so that `import foredraft` loads neither torch nor
# transformers. tests/test_third_party.py has a checker read them.
if TYPE_CHECKING:
    from .auto import auto_draft as auto_draft
    from .contracts import AlgorithmBase as AlgorithmBase
    from .contracts import DrafterBase as DrafterBase
    from .contracts import DraftSpec as DraftSpec
    from .contracts import EngineBase as EngineBase
    from .contracts import FormatBase as FormatBase
    from .contracts import Signal as Signal
    from .contracts import hookimpl as hookimpl
    from .data import Conversations as Conversations
    from .data import DraftCollator as DraftCollator
    from .data import pack as pack
    from .decoding import TreeShape as TreeShape
    from .decoding import evaluate as evaluate
    from .decoding import generate as generate
    from .draft import BaseDraft as BaseDraft
    from .draft import GroupedQueryDraft as GroupedQueryDraft
    from .errors import ForedraftError as ForedraftError
    from .files import save_draft as save_draft
    from .formats import serve_command as serve_command
    from .registry import Registry as Registry
    from .registry import default_registry as default_registry
    from .target import Target as Target
    from .training import DraftTrainer as DraftTrainer
    from .training import DraftTrainingArguments as DraftTrainingArguments


def _exports() -> dict[str, str]:
    """Where each public name lives, from the imports above, so that there is one list of them."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)
    return {alias.name: f".{node.module}" for node in found for alias in node.names}


_EXPORTS = _exports()
__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _EXPORTS:
            raise AttributeError(f"module 'foredraft' has no attribute '{name}'; public names: {', '.join(__all__)}")
        return getattr(import_module(_EXPORTS[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
