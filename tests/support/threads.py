"""Calls that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


def at_the_same_time(call: Callable[[Any], Any], inputs: Sequence[Any], times: int = 4) -> list[list[Any]]:
    """By input: what so many calls of it gave, each input in a thread of its own, without gradients."""
    results: list[list[Any]] = [[] for _ in inputs]

    def work(which: int) -> None:
        with torch.no_grad():  # of this thread
            for _ in range(times):
                results[which].append(call(inputs[which]))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(each) == times for each in results), "a thread did not come to its end"
    return results
