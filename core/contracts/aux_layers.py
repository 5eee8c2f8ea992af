"""Which of the target's layers a draft reads, as indices into HF `hidden_states`."""

from ..errors import ForedraftError

BEFORE_NORM = -1
"""What the last layer hands to the final norm, of which HF's `hidden_states` hold the norm's output alone."""


def reads_end(layers: tuple[int, ...], num_layers: int) -> bool:
    """Whether these are the state behind the last layer, before or after the final norm, and no other."""
    return tuple(layers) in ((num_layers,), (BEFORE_NORM,))


def default_aux_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """An early, a middle and a late layer, `(2, L//2, L-3)` for three; evenly spaced between 2 and L-3 otherwise.

    Raises `ForedraftError` where the target is too shallow for distinct layers, naming a choice that works.
    """
    if count == 3:
        layers: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    else:
        layers = tuple(round(2 + i * (num_layers - 5) / max(count - 1, 1)) for i in range(count))
    return check_aux_layers(layers, num_layers)


def check_aux_layers(layers: tuple[int, ...], num_layers: int, final: bool = False) -> tuple[int, ...]:
    """`layers` if they are distinct, ascending and within 1..L-1, where HF and all engines mean the same tensor; else `ForedraftError`.

    With `final` (`DraftSpec.final`) they must be L alone, in HF's `hidden_states` what comes after the final norm, or `BEFORE_NORM`.
    """
    if final:
        if reads_end(layers, num_layers):
            return layers
        raise ForedraftError(
            f"aux layers {list(layers)}: this draft reads what a target of {num_layers} layers says after its final norm, and no other"
            f" state: aux_layers=[{num_layers}], or leave them out"
        )
    problems = []
    if list(layers) != sorted(set(layers)):
        problems.append("they must be distinct and ascending")
    if outside := [i for i in layers if not 1 <= i <= num_layers - 1]:
        problems.append(f"{outside} lie outside 1..{num_layers - 1}")
    if not problems:
        return layers
    count = min(len(layers), num_layers - 1)
    if count < 1:
        raise ForedraftError(f"a target of {num_layers} layer(s) has no hidden state that a draft could read: at least 2 layers are needed")
    choice = [round(1 + i * (num_layers - 2) / max(count - 1, 1)) for i in range(count)]
    fewer = f", with num_aux={count}" if count < len(layers) else ""
    raise ForedraftError(
        f"aux layers {list(layers)} do not fit a target of {num_layers} layers: {' and '.join(problems)}.\n"
        f"  A choice that works: aux_layers={choice}{fewer}"
    )
