"""`foredraft export`: a draft of ours in a format that engines do not need, but other tools ask for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..auto import auto_draft
from ..contracts.algorithm import tokens_to_draft
from ..contracts.format import FormatBase
from ..errors import ForedraftError, nearest
from ..files.hub import find_draft
from ..files.ours import write_files
from ..files.reading import read_config
from ..files.spellings import TARGET_HEAD
from ..files.writing import check_new, replacing, replacing_file
from ..registry import Registry, default_registry
from .content import algorithm_of


def export_draft(
    source: str | Path,
    out: str | Path,
    form: str,
    num_draft_tokens: int | None = None,
    registry: Registry | None = None,
    **options: Any,
) -> Path:
    """Write the draft of ours in `source` (directory or hub id) to `out` in the format `form`, one that is registered and can be written.

    `num_draft_tokens` is what servers draft unless told otherwise; default: all that the draft makes at once, else 4. `options` are the
    format's.

    Raises `ForedraftError` for an unknown format or option, and for a draft that the format cannot express, with all reasons.
    """
    registry = registry or default_registry()
    written = [name for name, cls in registry.formats().items() if cls.written()]
    if form not in written:
        raise ForedraftError(f"no format '{form}' can be written{nearest(form, written)} (known: {', '.join(written) or 'none'})")
    writer: FormatBase = registry.make_format(form, options)
    check_new(out)
    if writer.suffix and not str(out).endswith(writer.suffix):
        raise ForedraftError(f"'{out}': {form} is one file, whose name ends in {writer.suffix}")
    source = find_draft(source)
    fields = read_config(source)
    if "foredraft" not in fields:
        raise ForedraftError(f"'{source}' is no draft of foredraft's: its config.json has no 'foredraft' entry")
    if reasons := writer.refuses(fields):
        raise ForedraftError(f"{form} cannot express the draft '{source}':\n  " + "\n  ".join(reasons))
    draft = auto_draft(source, registry=registry)
    state, left_out = draft.state_dict(), TARGET_HEAD if draft.config.spec.target_head else ()
    tokens = tokens_to_draft(num_draft_tokens, draft.algorithm.max_tokens)
    own = {name: tensor.contiguous() for name, tensor in state.items() if name not in left_out}
    config, tensors = writer.write(draft, own, algorithm_of(state, registry, draft.algorithm.name), tokens)
    write_as(writer, Path(out), config, tensors)
    return Path(out)


def write_as(form: FormatBase, out: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """What the `write` of a format gave, as its directory or file at `out`, all or nothing."""
    if form.suffix:
        with replacing_file(out) as temporary:
            form.save(temporary, config, tensors)
    else:
        with replacing(out) as temporary:
            write_files(temporary, config, tensors)
