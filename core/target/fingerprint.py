"""What stored states are of: enough of a target to tell it from another one, from its modules or from its files alone."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ForedraftError, few
from .capture import depth_of
from .pairing import describe_target
from .weights import is_plain, own_tensors, parts_of

SAMPLED = 8
"""Numbers of each parameter."""
SAME = 0.01
"""Relative distance of two samples of the same weights, at most: bfloat16 rounds by 0.004."""

Fingerprint = dict[str, Any]


def fingerprint_of(
    config: PretrainedConfig,
    weights: Mapping[str, Sequence[float]],
    aux_layers: Sequence[int],
    needs: Sequence[str],
    dtype: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Fingerprint:
    """As plain values; of tokenizer and chat template where one is given.

    Final states are not needed beside aux states that are the final ones.
    """
    twice = "aux" in needs and tuple(aux_layers) == (depth_of(config),)
    found = {
        "target": describe_target(config)["fingerprint"],
        "aux_layers": list(aux_layers),
        "needs": [need for need in ("aux", "final") if need in needs and not (twice and need == "final")],
        "dtype": str(dtype).removeprefix("torch."),
        "weights": {name: [float(f"{x:.4g}") for x in values] for name, values in sorted(weights.items())},
    }
    if tokenizer is not None:
        spelt = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
        found["tokenizer"] = _digest(spelt)
        found["template"] = _digest(str(tokenizer.chat_template))
    return found


def weights_of(model: PreTrainedModel) -> dict[str, list[float]]:
    """A few numbers of every parameter, by its name; a packed one is told by its parts."""
    found = {}
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module).items() if module._parameters else ():
            parts = [tensor] if is_plain(tensor) else parts_of(tensor)
            for number, part in enumerate(parts):
                label = f"{prefix}.{name}".lstrip(".") + (f", part {number}" if len(parts) > 1 or not is_plain(tensor) else "")
                found[label] = _some(part.flatten())
    return found


def weights_of_files(directory: str | Path) -> dict[str, list[float]]:
    """The same of the safetensors files in a directory, as they name them. Raises `ForedraftError` if there are none."""
    found = {}
    try:
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                found.update({name: _some(opened.get_tensor(name).flatten()) for name in opened.keys()})  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ForedraftError(f"the weights of target '{directory}' cannot be read: {error}") from error
    if not found:
        raise ForedraftError(f"the target '{directory}' has no safetensors files: its weights cannot be told from others'")
    return found


def differences(noted: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What tells two fingerprints apart, with both values; only what both of them say is compared. Needing less is no difference."""
    differing = (key for key in now if key != "weights" and noted.get(key, now[key]) != now[key])
    told = [f"{key}: {noted[key]} there, {now[key]} here" for key in differing if key != "needs" or set(now[key]) - set(noted[key])]
    theirs, ours = noted.get("weights", {}), now.get("weights", {})
    common = [name for name in ours if name in theirs]
    if theirs and ours and not common:
        told.append(f"weights: {few(sorted(theirs), 3)} there, {few(sorted(ours), 3)} here")
    other = [name for name in common if _apart(theirs[name], ours[name]) > SAME]
    if other:
        told.append(f"{len(other)} of {len(common)} weights, such as {other[0]}: {theirs[other[0]]} there, {ours[other[0]]} here")
    return told


def _some(values_n: Tensor) -> list[float]:
    step = max(1, len(values_n) // SAMPLED)
    return [float(x) for x in values_n[::step][:SAMPLED].float().tolist()]


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other):
        return float("inf")
    largest = max(max(map(abs, [*one, *other]), default=0.0), 1e-12)
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0) / largest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
