"""How a target is loaded: the same settings as keys of a run file, as flags of commands, and in Python."""

from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field

from ..errors import ForedraftError
from .options import Frozen


def _mapping(given: Any) -> Any:
    """A mapping, from YAML on the command line."""
    try:
        found = yaml.safe_load(given) if isinstance(given, str) else given
    except yaml.YAMLError:
        found = given
    if not isinstance(found, dict | None):
        raise ForedraftError(f"template_kwargs: expected a mapping, such as '{{enable_thinking: false}}', found {given!r}")
    return found


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

    attn_implementation: str | None = Field(default=None, description="the target's attention: eager, sdpa, flash_attention_2, ...")
    device_map: str | dict[str, int | str] | None = Field(
        default=None, description="devices of the target's parts, such as auto (see accelerate); default: all on one"
    )

    @property
    def model(self) -> dict[str, Any]:
        """Arguments for the model: `source`, and where and how it runs."""
        placed = {name: getattr(self, name) for name in ("attn_implementation", "device_map")}
        return {**self.source, **{name: value for name, value in placed.items() if value is not None}}


class Rendering(Loading):
    """The same where conversations are rendered: by which chat template."""

    chat_template: str | None = Field(default=None, description="file or text of a chat template, in place of the tokenizer's")
    template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_mapping)] = Field(
        default=None, description="variables of the chat template, such as {enable_thinking: false}"
    )


PLAIN = Loading()
"""transformers' defaults; no code of the repository runs."""
