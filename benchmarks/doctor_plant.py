"""What a planted defect is, and how the draft that has it is written."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from doctor_bases import BASES, draft_path, target_path
from safetensors.torch import load_file, save_file
from torch import Tensor

Where = tuple[str, ...]
AUX = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
NESTED = (("eagle_config", "eagle_aux_hidden_state_layer_ids"), ("dflash_config", "target_layer_ids"))


class NotHere(Exception):
    """This defect cannot be planted in that draft."""


@dataclass
class Plant:
    """A draft's files in the making, and the target it is given."""

    base: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Path
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """More files of tensors."""
    after: Callable[[Path], object] | None = None
    """What to do to the written directory."""

    @classmethod
    def of(cls, base: str) -> "Plant":
        """A sound one."""
        path = draft_path(base)
        config = json.loads((path / "config.json").read_text())
        return cls(base, config, load_file(path / "model.safetensors"), target_path(BASES[base].family))

    @property
    def layer_config(self) -> dict[str, Any]:
        """Where the decoder's fields stand."""
        inner: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        return inner

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary parameters."""
        rope: dict[str, Any] = self.layer_config["rope_parameters"]
        return rope

    def need(self, *names: str) -> list[Tensor]:
        """Tensors by name. Raises `NotHere` without them."""
        if missing := [name for name in names if name not in self.tensors]:
            raise NotHere(missing)
        return [self.tensors[name] for name in names]

    def drop(self, *names: str) -> None:
        """Take tensors out."""
        self.need(*names)
        for name in names:
            del self.tensors[name]

    def swap(self, one: str, other: str) -> None:
        """Exchange two tensors."""
        a, b = self.need(one, other)
        if a.shape != b.shape:
            raise NotHere(one)
        self.tensors[one], self.tensors[other] = b.clone(), a.clone()

    def fresh(self, name: str, std: float = 0.05) -> None:
        """Initialise a tensor again."""
        (tensor,) = self.need(name)
        self.tensors[name] = std * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))

    def rope_everywhere(self, **fields: Any) -> None:
        """Change rotary parameters in both spellings; None takes one out."""
        for key, value in fields.items():
            for place in (self.rope, self.layer_config.get("rope_scaling")):
                if isinstance(place, dict) and key != "rope_theta":
                    place.pop(key, None) if value is None else place.update({key: value})
            if key == "rope_theta":
                self.rope[key] = value
                if "rope_theta" in self.layer_config:
                    self.layer_config[key] = value

    def aux(self, change: Callable[[list[int]], list[int]], top: bool = True, nested: bool = True) -> None:
        """Change the stated aux layers, at the top level and in the nested fields."""
        for name in AUX if top else ():
            if self.config.get(name):
                self.config[name] = change(self.config[name])
        for outer, name in NESTED if nested else ():
            if (self.config.get(outer) or {}).get(name):
                self.config[outer][name] = change(self.config[outer][name])

    def write(self, path: Path) -> Path:
        """The directory."""
        path.mkdir(parents=True)
        save_file({k: v.contiguous().clone() for k, v in self.tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
        for name, tensors in self.files.items():
            save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path / name, metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(self.config, indent=2))
        if self.after:
            self.after(path)
        return path


@dataclass(frozen=True)
class Defect:
    """One way in which a draft goes wrong."""

    name: str
    says: str
    """What an error or warning must match (id and finding, any case) to have named it."""
    plant: Callable[[Plant], None]
    bases: Where
    engine: str | None = None
    """The server that is known to refuse such a draft, or to read it otherwise, where foredraft does not."""


DEFECTS: list[Defect] = []
"""All of them. They are listed by what people do (convert between formats and versions, train with another project's defaults, copy a
config, merge, quantise, cut), not by what doctor looks at."""


def defect(says: str, *bases: str, engine: str | None = None) -> Callable[[Callable[[Plant], None]], Callable[[Plant], None]]:
    """Adds a function to `DEFECTS`."""

    def add(plant: Callable[[Plant], None]) -> Callable[[Plant], None]:
        DEFECTS.append(Defect(plant.__name__.replace("_", "-"), says, plant, bases, engine))
        return plant

    return add


def readings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A config of ours as different servers read it, where that is not as foredraft does: aux layers, rotary parameters, mask token."""
    told: list[dict[str, Any]] = []
    eagle, dflash = config.get("eagle_config") or {}, config.get("dflash_config") or {}
    for ids in (eagle.get("eagle_aux_hidden_state_layer_ids"), dflash.get("target_layer_ids")):
        if isinstance(ids, list) and (up := [i + 1 for i in ids]) != config.get("eagle_aux_hidden_state_layer_ids"):
            told.append({"eagle_aux_hidden_state_layer_ids": up})
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        old = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 10000.0)}
        if old != rope and "rope_theta" in config:
            told.append({"rope_parameters": old})
    for token in (config.get("ptd_token_id"), config.get("pard_token"), dflash.get("mask_token_id")):
        if token is not None and token != config.get("mask_token_id"):
            told.append({"mask_token_id": token})
    return [{**config, **fields} for fields in told]
