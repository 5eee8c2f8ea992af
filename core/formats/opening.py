"""A draft in any format, opened to be worked on."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..auto import auto_draft
from ..contracts.loading import PLAIN, Loading
from ..draft.model import BaseDraft
from ..files.hub import find_draft
from ..files.reading import read_config
from ..registry import Registry
from .importing import import_draft


def open_draft(
    name: str | Path,
    target: str,
    algorithm: str | None = None,
    *,
    loading: Loading = PLAIN,
    registry: Registry | None = None,
    **options: Any,
) -> BaseDraft:
    """The draft at `name` (directory or hub id): ours, or any that `import_draft` reads for `target`; `options` change the algorithm's.

    Raises `ForedraftError` as `auto_draft` and `import_draft` do, and if the draft is by another algorithm than the one asked for.
    """
    path = find_draft(name)
    if not path.is_file() and "foredraft" in read_config(path):
        return auto_draft(path, algorithm, registry=registry, **options)
    with TemporaryDirectory() as folder:
        ours = import_draft(path, Path(folder) / "draft", target, registry, loading).path
        return auto_draft(ours, algorithm, registry=registry, **options)
