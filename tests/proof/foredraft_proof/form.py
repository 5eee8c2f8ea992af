"""A format: our tensors under a prefix, our config's fields in an object of their own."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from foredraft import FormatBase, hookimpl


class Boxed(FormatBase):
    name = "proof_boxed"
    summary = "tensors under `boxed.`, fields in an object"
    sign = "names that begin with 'boxed.'"

    def recognises(self, names: Collection[str], config: Any) -> bool:
        return isinstance(config.get("boxed"), dict) and any(name.startswith("boxed.") for name in names)

    def rename(self, name: str) -> str | None:
        return name.removeprefix("boxed.")

    def flatten(self, config: Any) -> dict[str, Any]:
        return dict(config["boxed"])

    def algorithm(self, config: Any) -> str | None:
        return by if isinstance(by := config.get("by"), str) else None

    def write(self, draft: Any, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int) -> Any:
        fields = {name: value for name, value in draft.config.to_dict().items() if name != "foredraft"}
        return {"boxed": fields, "by": draft.algorithm.name}, {f"boxed.{name}": tensor for name, tensor in tensors.items()}


@hookimpl
def foredraft_formats() -> list[type]:
    return [Boxed]
