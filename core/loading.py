"""How a target is loaded: the same settings as keys of a run file, as flags of commands, and in Python."""

from typing import Any

from pydantic import Field

from .frozen import Frozen


class Loading(Frozen):
    """What transformers' `from_pretrained` is told of a target, beside its name and dtype."""

    revision: str | None = Field(None, description="branch, tag or commit of a target on the hub")
    trust_remote_code: bool = Field(False, description="run the Python code that the target's repository brings: read it first")
    attn_implementation: str | None = Field(None, description="the target's attention: eager, sdpa, flash_attention_2, ...")
    device_map: str | dict[str, int | str] | None = Field(
        None, description="devices of the target's parts, such as auto (see accelerate); default: all on one"
    )

    @property
    def source(self) -> dict[str, Any]:
        """Arguments for whatever is read from the target's repository: config, tokenizer, weights."""
        return {"trust_remote_code": self.trust_remote_code, **({"revision": self.revision} if self.revision else {})}

    @property
    def model(self) -> dict[str, Any]:
        """Arguments for the model: `source`, and where and how it runs."""
        placed = {name: getattr(self, name) for name in ("attn_implementation", "device_map")}
        return {**self.source, **{name: value for name, value in placed.items() if value is not None}}


PLAIN = Loading()
"""transformers' defaults; no code of the repository runs."""
