"""A draft's directory as it lies on disk, ours or a peer's, read without trust: what is malformed becomes a finding."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.finding import Finding
from ..errors import ForedraftError
from ..registry import Registry, default_registry
from .reading import read_json
from .writing import finish

if TYPE_CHECKING:
    from torch import Tensor


INDEXES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}

SIDE_FILE = "mask_embedding.pt"
"""Beside some DFlash drafts: the embedding of the mask token, which engines read."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name: float32, bfloat16, int64, bool, ..."""
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """A draft's directory, or its one file: its config, and its tensors by name, none of them loaded.

    The format of a file reads it. Weights in a directory are safetensors, single or sharded with an index, or else a PyTorch pickle,
    which is read with `weights_only=True`: no code of its author runs.
    """

    path: Path
    config: Mapping[str, Any]
    """`config.json` as it stands; empty if it is no JSON object. Of a file, what its format makes of it."""
    tensors: Mapping[str, TensorInfo]
    """By the names in the files."""
    findings: tuple[Finding, ...] = ()
    """What could not be read, and why."""
    doubles: Mapping[str, Path] = field(default_factory=dict)
    """Another file, for each tensor that two files hold without an index that says which counts."""
    _loaded: Mapping[str, "Tensor"] = field(default_factory=dict, repr=False)
    _load: "Callable[[str], Tensor] | None" = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | Path, registry: Registry | None = None) -> "Checkpoint":
        """Read a directory, or a file by the format in `registry` whose files end so.

        Raises `ForedraftError` if it is neither; all else that is wrong with it is in `findings`.
        """
        path = Path(path)
        if path.is_file() and (form := form_of_file(path, registry)):
            return cls._of_file(path, form)
        if not path.is_dir():
            raise ForedraftError(f"'{path}' is no directory: name the one that holds the draft's config.json and weights")
        finish(path)
        reader = _Reader(path)
        config = reader.json(path / "config.json", "config-json")
        return cls(path, config, reader.tensors(), tuple(reader.findings), reader.doubles, reader.pickled)

    @classmethod
    def _of_file(cls, path: Path, form: Any) -> "Checkpoint":
        try:
            held = form().open(path)
        except ForedraftError:
            raise
        except Exception as error:  # whatever its library raises
            text = f"{path.name} could not be read as {form.name}: {type(error).__name__}: {error}"[:300]
            damage = Finding(
                "weights-damaged", "error", text, "nothing can be loaded", "copy the file anew; it was cut off, or is no such file"
            )
            return cls(path, {}, {}, (damage,))
        infos = {name: TensorInfo(shape, dtype, path) for name, (shape, dtype) in held.tensors.items()}
        return cls(path, held.config, infos, _load=held.load)

    def changed(self, config: Mapping[str, Any], tensors: "Mapping[str, Tensor | None]") -> "Checkpoint":
        """What the directory would be with this config, and with some tensors replaced, added, or left out (None)."""
        kept = {name: info for name, info in self.tensors.items() if name not in tensors}
        new = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        made = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch."), self.path) for name, t in new.items()}
        return replace(self, config=config, tensors={**kept, **made}, _loaded={**self._loaded, **new})

    def tensor(self, name: str) -> "Tensor":
        """Load one tensor. Raises `KeyError` for a name that is not in `tensors`, `ForedraftError` if its file is damaged."""
        info = self.tensors[name]
        if name in self._loaded:
            return self._loaded[name]
        return self._load(name) if self._load else read_tensor(info.file, name)


def form_of_file(path: Path, registry: Registry | None = None) -> Any:
    """The format whose files end as this one; None if there is none, as for a directory."""
    forms = (registry or default_registry()).formats().values()
    return next((form for form in forms if form.suffix and path.name.endswith(form.suffix)), None)


def read_tensor(file: Path, name: str) -> "Tensor":
    """A tensor of a safetensors file. Raises `ForedraftError` if it cannot be read."""
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)
    except Exception as error:  # besides damage, whatever the library raises for dtypes that it cannot make
        raise ForedraftError(f"'{file}': tensor '{name}' could not be read: {error}") from error


class _Reader:
    """Collects what could be read of a directory, and findings for the rest."""

    def __init__(self, path: Path):
        self.path = path
        self.findings: list[Finding] = []
        self.pickled: dict[str, Any] = {}
        self.doubles: dict[str, Path] = {}

    def json(self, file: Path, kind: str) -> dict[str, Any]:
        """The object in a JSON file; {} with a finding where there is none."""
        try:
            return read_json(file)
        except ForedraftError as error:
            problem = str(error)
        self._error(kind, problem, "no engine loads the draft", "get the file anew from where the draft comes from")
        return {}

    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors of all weight files."""
        files, promised = self._files()
        found: dict[str, TensorInfo] = {}
        for file in files:
            try:
                if file.exists() and not file.is_file():  # opening a pipe would wait for ever
                    raise OSError("it is no regular file")
                held = dict(self._pickle(file) if file.suffix == ".bin" else _headers(file))
                self.doubles.update({name: found[name].file for name in held.keys() & found.keys()})
                found.update(held)
            except pickle.UnpicklingError:  # its message advises to run the code
                self._error(
                    "weights-damaged",
                    f"{file.name} holds more than tensors: to load it would run code of its author",
                    "it is not read",
                    "load it nowhere; ask its author for safetensors",
                )
            except Exception as error:  # whatever a damaged file raises
                text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                self._error(
                    "weights-damaged",
                    f"{file.name} could not be read: {text}",
                    "its tensors are missing: engines refuse the draft",
                    "copy the file anew; it was cut off, or is no such file",
                )
        if lost := sorted(promised - set(found)):
            self._error(
                "index-lost",
                f"the index promises {len(lost)} tensor(s) that no file holds: {', '.join(lost[:5])}",
                "they are left at whatever the engine starts with",
                "copy all files of the draft",
            )
        return found

    def _files(self) -> tuple[list[Path], set[str]]:
        """The weight files, and the tensors that an index says they hold."""
        for index, suffix in INDEXES.items():
            if not (self.path / index).exists():
                continue
            weight_map = self.json(self.path / index, "index-json").get("weight_map")
            entries = weight_map.items() if isinstance(weight_map, dict) else ()
            sound = {name: file for name, file in entries if isinstance(file, str) and Path(file).name == file and file.endswith(suffix)}
            wrong = [f"{name} -> {file!r}"[:120] for name, file in entries if name not in sound]
            if wrong or not sound:
                self._error(
                    "index-files",
                    f"{index} names files that are no {suffix} files of this directory: {', '.join(wrong[:3]) or 'no weight_map'}",
                    "they are not read: an index must not lead out of its directory",
                    "write the index anew from the files that are there",
                )
            if sound:
                return sorted({self.path / file for file in sound.values()}), set(sound)
        files = sorted(self.path.glob("*.safetensors")) or sorted(self.path.glob("pytorch_model*.bin"))
        if not files:
            self._error(
                "weights-none", "there are no weights: no *.safetensors, no pytorch_model*.bin", "nothing can be loaded", "copy them"
            )
        return files, set()

    def _pickle(self, file: Path) -> Iterator[tuple[str, TensorInfo]]:
        """The tensors of a PyTorch file, mapped into memory, not loaded."""
        import torch

        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        for name, tensor in content.items() if isinstance(content, dict) else ():
            if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)) or tensor.layout != torch.strided or tensor.is_meta:
                continue
            # An expanded view of one number may claim any size.
            if tensor.nbytes <= file.stat().st_size:
                self.pickled[name] = tensor
                yield name, TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file)

    def _error(self, kind: str, found: str, breaks: str, mend: str) -> None:
        self.findings.append(Finding(kind, "error", found, breaks, mend))


DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""safetensors' names of dtypes, and torch's."""


def _headers(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors of a safetensors file, from its header, which the library checks against the file's size."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        for name in sorted(opened.keys()):
            part = opened.get_slice(name)
            yield name, TensorInfo(tuple(part.get_shape()), DTYPES.get(part.get_dtype(), part.get_dtype()), file)
