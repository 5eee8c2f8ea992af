"""How a target is loaded: the same settings as keys of a run file, as flags of commands, and in Python."""

from typing import Annotated, Any, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from ..errors import ForedraftError
from .options import Frozen


def _mapping(given: Any, info: ValidationInfo) -> Any:
    """A mapping, from YAML on the command line."""
    try:
        found = yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError:
        found = given
    if not isinstance(found, dict | None):
        raise ForedraftError(f"{info.field_name}: expected a mapping, such as '{{enable_thinking: false}}', found {given!r}")
    return found


def _named(given: Any) -> Any:
    """A word such as auto, or a mapping, from YAML on the command line."""
    return yaml.safe_load(given) if isinstance(given, str) and given.startswith("{") else given


class Repository(Frozen):
    """What everybody who reads a target's repository must know, beside its name."""

    revision: str | None = Field(default=None, description="branch, tag or commit of a target on the hub")
    trust_remote_code: bool = Field(default=False, description="run the Python code that the target's repository brings: read it first")

    @property
    def source(self) -> dict[str, Any]:
        """Arguments for whatever is read from the target's repository: config, tokenizer, weights."""
        return {"trust_remote_code": self.trust_remote_code, **({"revision": self.revision} if self.revision else {})}


class Loading(Repository):
    """What transformers' `from_pretrained` is told of a target, beside its name and dtype."""

    attn_implementation: str | None = Field(
        default=None, description="the target's attention: eager, sdpa, flash_attention_2, foredraft_varlen, ..."
    )
    device_map: Annotated[str | dict[str, int | str] | None, BeforeValidator(_named)] = Field(
        default=None, description="devices of the target's parts, such as auto (see accelerate); default: all on one"
    )
    tp_plan: Annotated[str | dict[str, str] | None, BeforeValidator(_named)] = Field(
        default=None, description="share each layer of the target among all ranks: auto, or a plan of transformers'; in place of device_map"
    )
    quantization: Annotated[dict[str, Any] | None, BeforeValidator(_mapping)] = Field(
        default=None, description="quantise the target as it is loaded: transformers' config, such as {quant_method: hqq, nbits: 4}"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.device_map is not None and self.tp_plan is not None:
            raise ForedraftError("device_map and tp_plan both say where the target's parts are: leave one of them out")
        return self

    @property
    def model(self) -> dict[str, Any]:
        """What the model is loaded with: `source`, and where and how it runs."""
        placed = {name: getattr(self, name) for name in ("attn_implementation", "device_map", "tp_plan", "quantization")}
        return {**self.source, **{name: value for name, value in placed.items() if value is not None}}


class Rendering(Loading):
    """The same where conversations are rendered: by which chat template."""

    chat_template: str | None = Field(default=None, description="file or text of a chat template, in place of the tokenizer's")
    template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_mapping)] = Field(
        default=None, description="variables of the chat template, such as {enable_thinking: false}"
    )


PLAIN = Loading()
"""transformers' defaults; no code of the repository runs."""
