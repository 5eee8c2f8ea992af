"""Work that is killed (SIGKILL) at random moments, in processes that are forked for it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator


def kill_at_random(work: Callable[[], object], times: int, seconds: float, seed: int = 0) -> Iterator[int]:
    """Start `work` so often and kill it within `seconds`; after each, the moment in milliseconds. Half of them come early."""
    draw = random.Random(seed)
    for _ in range(times):
        moment = seconds * draw.random() ** 2
        child = os.fork()
        if child == 0:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            try:
                work()
            finally:
                os._exit(0)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield round(1000 * moment)
