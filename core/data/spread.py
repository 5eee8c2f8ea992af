"""Work spread over workers by Ray Data, on this machine or a cluster: pieces go out, what comes of each comes back as it is done."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import ForedraftError

Work = Callable[[list[int]], list[Any]]
"""What a worker does with the numbers of a few pieces: something that JSON holds, of each or of all."""


def spread(pieces: Sequence[int], begin: Callable[[], Work], workers: int, batch_size: int) -> Iterator[Any]:
    """What comes of `pieces`, `batch_size` of them at a time, in any order.

    Every worker calls `begin` once, which loads what it needs, and works on whatever comes next; each has a GPU where the cluster has
    some. A batch whose worker is lost goes to another one. Raises `ForedraftError` if Ray is not installed, and what a worker raises.
    """
    try:
        import ray
    except ImportError as error:
        raise ForedraftError("several workers need Ray: pip install 'foredraft[ray]'") from error

    class Worker:
        def __init__(self) -> None:
            self.work = begin()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"said": [json.dumps(found) for found in self.work(batch["item"].tolist())]}
            except ForedraftError as error:
                return {"said": [json.dumps({"error": str(error)})]}  # Ray would hand it over as its own, among much else

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    data = ray.data.from_items([int(piece) for piece in pieces], override_num_blocks=-(-len(pieces) // batch_size))
    found = data.map_batches(Worker, batch_size=batch_size, compute=ray.data.ActorPoolStrategy(size=workers), num_gpus=gpus)
    for row in found.iter_rows():
        said = json.loads(row["said"])
        if isinstance(said, dict) and "error" in said:
            raise ForedraftError(said["error"])
        yield said
