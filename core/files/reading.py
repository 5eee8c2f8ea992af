"""`config.json` of unknown origin: read within bounds, and checked before anything is built from it."""

import dataclasses
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..contracts.aux_layers import check_aux_layers
from ..contracts.engine import Config
from ..contracts.options import MOST
from ..contracts.spec import DraftSpec
from ..errors import ForedraftError, describe_validation, nearest
from ..registry import Registry
from .writing import finish


def most_tokens(config: Config) -> int | None:
    """How many tokens a draft makes at once, None if one after another: as its algorithm noted, else as its block has slots to draft."""
    made, block = config.get("foredraft"), config.get("block_size")
    if isinstance(made, dict) and "max_tokens" in made:
        return made["max_tokens"]
    first = 0 if config.get("sample_from_anchor") is True else 1
    return block - first if isinstance(block, int) and block > first else None


MAX_JSON = 64 * 2**20
"""Bytes; an index of a hundred thousand tensors has a tenth of that."""

Size = Annotated[int, Field(ge=1, le=2**24)]
"""Larger than any model's; small enough that a product of two fits 64 bits."""

WIDEST = 2**16
"""More than any head's width."""

Token = Annotated[int, Field(ge=0, le=2**31)]

# Keys by which transformers would fetch or choose code, or build what a draft has no use for. Names that begin with _ are its own.
NOT_READ = re.compile(
    r"_.*|attn_implementation|experts_implementation|auto_map|fusion_config|distributed_config|transformers_weights|per_layer_config"
    r"|num_labels|id2label|label2id|problem_type|name_or_path|output_\w+"
)


class Strict(BaseModel):
    """Types as they stand (no "64" for 64); fields that no draft of ours depends on are skipped."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class TargetRecord(Strict):
    """`foredraft.target`."""

    name: str | None = None
    model_type: str
    num_hidden_layers: Size
    hidden_size: Size
    vocab_size: Size
    fingerprint: str
    sample: dict[str, Annotated[str, Field(pattern=r"^[-+.e\d ]{1,1000}$")]] | None = None


class Measured(Strict):
    """An entry of `foredraft.measured`."""

    tau: float
    acceptance: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=MOST)] = []
    """Share of drafts accepted up to position 1, 2, ..."""


class Made(Strict):
    """The entry `foredraft`: what made the draft."""

    algorithm: str
    options: dict[str, Any]
    adapter: str
    architecture: str
    spec: DraftSpec
    target: TargetRecord
    max_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    measured: dict[str, Measured] = {}


class Fields(Strict):
    """What every draft's config has; the rest is for its family's own class to check."""

    foredraft: Made
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(ge=0, le=MOST)]
    num_attention_heads: Size = 1
    num_key_value_heads: Size | None = None
    head_dim: Annotated[int, Field(ge=1, le=WIDEST)] | None = None
    intermediate_size: Size = 1
    draft_vocab_size: Size
    target_hidden_size: Size
    num_aux_hidden_states: Annotated[int, Field(ge=1, le=MOST)]
    eagle_aux_hidden_state_layer_ids: Annotated[list[int], Field(max_length=MOST)]
    mask_token_id: Token | None = None
    dtype: Literal["float32", "bfloat16", "float16", None] = None
    torch_dtype: Literal["float32", "bfloat16", "float16", None] = None
    quantization_config: None = None

    def objections(self) -> list[str]:
        """Where its parts do not fit each other, a line each."""
        made, found = self.foredraft, []
        same = {
            "vocab_size": (self.vocab_size, made.target.vocab_size),
            "target_hidden_size": (self.target_hidden_size, made.target.hidden_size),
            "num_hidden_layers": (self.num_hidden_layers, made.spec.num_layers),
            "num_aux_hidden_states": (self.num_aux_hidden_states, made.spec.num_aux),
            "eagle_aux_hidden_state_layer_ids": (len(self.eagle_aux_hidden_state_layer_ids), made.spec.num_aux),
        }
        found += [f"{name}: {a}, but it was made with {b}" for name, (a, b) in same.items() if a != b]
        if self.draft_vocab_size > self.vocab_size:
            found.append(f"draft_vocab_size={self.draft_vocab_size} is more than the vocabulary of {self.vocab_size}")
        if made.spec.mask_token and not 0 <= (self.mask_token_id if self.mask_token_id is not None else -1) < self.vocab_size:
            found.append(f"mask_token_id={self.mask_token_id} is no token of the vocabulary of {self.vocab_size}")
        try:
            check_aux_layers(tuple(self.eagle_aux_hidden_state_layer_ids), made.target.num_hidden_layers, made.spec.final)
        except ForedraftError as error:
            found.append(str(error).split("\n")[0])
        return found


def read_json(file: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ForedraftError` if there is none, if it is no regular file, or larger than any such file."""
    file = Path(file)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ForedraftError(f"'{file}' is no regular file")  # opening a pipe would wait for ever
        if status.st_size > MAX_JSON:
            raise ForedraftError(f"'{file}' has {status.st_size} bytes: no such file has more than {MAX_JSON}")
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ForedraftError(f"'{file}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ForedraftError(f"'{file}' is no JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise ForedraftError(f"'{file}' holds {type(fields).__name__}, expected an object")
    return fields


def read_config(path: str | Path) -> dict[str, Any]:
    """The `config.json` of a directory as a dict. Raises `ForedraftError` if it is missing or no JSON object."""
    if Path(path).is_file():
        raise ForedraftError(f"'{path}' is a file, a directory with a config.json is expected: `foredraft import` makes one of a draft")
    finish(path)
    file = Path(path) / "config.json"
    if not file.exists():
        why = "it is no draft (and no target) directory"
        if not Path(path).is_dir():
            why = "there is no such directory" + nearest(Path(path).name, (d.name for d in Path(path).parent.glob("*") if d.is_dir()))
        raise ForedraftError(f"'{path}' holds no config.json: {why}")
    return read_json(file)


def check_fields(fields: Mapping[str, Any], where: str | Path) -> Fields:
    """What the `config.json` of a draft of ours holds, checked. Raises `ForedraftError` that lists all that no draft of ours has."""
    try:
        read = Fields.model_validate(fields)
    except ValidationError as error:
        raise ForedraftError(f"the config.json of '{where}' is not what foredraft writes:\n  {describe_validation(error, {})}") from error
    # A family may have several: one of a sane number alone makes no model of gigabytes.
    wide = {name: size for name, size in fields.items() if name.endswith("head_dim") and isinstance(size, int) and size > WIDEST}
    if problems := [*read.objections(), *(f"{name}={size}: no head is so wide" for name, size in wide.items())]:
        raise ForedraftError(f"the config.json of '{where}' contradicts itself:\n  " + "\n  ".join(problems))
    return read


def draft_config(fields: Mapping[str, Any], registry: Registry, where: str | Path = "the draft") -> Any:
    """The config of a draft of ours, an instance of its adapter's class, from what its `config.json` holds.

    Nothing in it chooses code: keys that would are not read. Raises as `check_fields`.
    """
    cls = registry.adapter(check_fields(fields, where).foredraft.adapter).config_class
    own = {field.name for field in dataclasses.fields(cls)}
    try:
        # What is no field of the class, but named like something of it, would take its place.
        return cls(**{n: v for n, v in fields.items() if not NOT_READ.fullmatch(n) and (n in own or not hasattr(cls, n))})
    except Exception as error:  # whatever the family's class raises
        raise ForedraftError(f"no draft can be built from the config.json of '{where}': {str(error)[:500]}") from error
