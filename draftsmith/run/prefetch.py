"""Load items in background threads before they are needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def prefetched(load: Callable[[Item], Loaded], items: Iterable[Item], *, ahead: int = 2) -> Iterator[Loaded]:
    """Yield `load(item)` for each item in order, loaded by background threads up to `ahead` items early.

    Several threads call `load` at once. Its exceptions are raised here, when their item is due.
    """
    waiting: deque[Future[Loaded]] = deque()
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prefetch")  # reading and decoding release the GIL
    try:
        for item in items:
            waiting.append(pool.submit(load, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
