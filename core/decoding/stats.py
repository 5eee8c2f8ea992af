"""What drafting achieved: accepted tokens per position, and τ."""

from dataclasses import dataclass, field


@dataclass
class DraftingStats:
    """Counts over one or many generations. The pass that reads the prompt is not counted.

    Where a text ends inside a draft, the tokens behind the end count as drafted and not as accepted.
    """

    emitted: int = 0
    """Tokens emitted by the target's passes after prefill, bonus tokens included."""
    passes: int = 0
    """The target's passes after prefill."""
    drafted: list[int] = field(default_factory=list)
    """How often position i (from 0) was drafted; of trees, how often one might have been that deep."""
    accepted: list[int] = field(default_factory=list)
    """How often it was accepted."""

    def add(self, drafted: int, accepted: int) -> None:
        """One verification: so many drafted (of a tree, the depth it might have), so many of them accepted."""
        self.emitted += accepted + 1
        self.passes += 1
        for counts, count in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(count):
                counts[i] += 1

    @property
    def tau(self) -> float:
        """Tokens emitted per target pass after prefill, bonus token included."""
        return self.emitted / self.passes if self.passes else 1.0

    @property
    def acceptance(self) -> list[float]:
        """Per position: the share of drafts whose token there was accepted (so all before it were too)."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]
