"""What ranks are given: batches as they were made, and equally many of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from ..errors import ForedraftError


def keep_batches_whole(args: TrainingArguments) -> None:
    """Every rank makes its own; by default Accelerate has one make those of streams of rows for all.

    Raises `ForedraftError` where that is asked for.
    """
    config: Any = args.accelerator_config
    if config.dispatch_batches:
        raise ForedraftError("dispatch_batches cuts batches by rows, which what is planned for a batch does not follow: leave it out")
    config.dispatch_batches = False


class Blankable:
    """Rows; at ~i row i without its supervision: read like any other, and no slot of it is trained or counted."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        return self.rows[i] if i >= 0 else {**self.rows[~i], "spans": [-1] * len(self.rows[~i]["spans"])}


class Evened:
    """The batches of a sampler: the last one as large as the others, and in all as many for each of `ranks`."""

    def __init__(self, batches: Any, ranks: int):
        self.batches, self.ranks = batches, ranks
        # Accelerate looks for these.
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return -(-len(self.batches) // self.ranks) * self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        last = 0
        for batch in self.batches:
            last = batch[-1]
            yield batch + [~last] * (self.batch_size - len(batch))
        for _ in range(-len(self.batches) % self.ranks):
            yield [~last] * self.batch_size


def even_out(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """A loader of `Blankable` rows, which Accelerate has shared out among `ranks`: what is missing at the end are rows that train nothing.

    Accelerate would take the epoch's first rows, which would count twice.
    """
    shard: Any = loader.batch_sampler
    if isinstance(shard, BatchSamplerShard):
        shard.batch_sampler = Evened(shard.batch_sampler, ranks)
    return loader
