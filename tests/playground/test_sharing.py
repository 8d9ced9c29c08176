"""Models are lent to one at a time; long work tells how it goes on, and ends when nobody listens."""

from __future__ import annotations

import threading
import time

import pytest

from agglo.playground.lending import Lent
from agglo.playground.streaming import StoppedError, streamed


def test_one_borrower_at_a_time() -> None:
    made: list[int] = []
    lent = Lent(lambda: made.append(1) or [0])
    inside: list[int] = []

    def borrow() -> None:
        for _ in range(50):
            with lent.borrowed() as counter:
                seen = counter[0]
                inside.append(1)
                assert len(inside) == 1
                time.sleep(0)
                counter[0] = seen + 1
                inside.pop()

    threads = [threading.Thread(target=borrow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with lent.borrowed() as counter:
        assert counter == [200]
    assert made == [1]


def test_what_could_not_be_made_is_tried_again_and_an_error_gives_the_thing_back() -> None:
    tries = iter([ValueError("not yet"), None])

    def make() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "made"

    lent = Lent(make)
    with pytest.raises(ValueError, match="not yet"), lent.borrowed():
        pass
    with pytest.raises(RuntimeError, match="while borrowed"), lent.borrowed():
        raise RuntimeError("while borrowed")
    with lent.borrowed() as thing:
        assert thing == "made"


def test_everything_said_comes_in_order_and_errors_come_last() -> None:
    assert list(streamed(lambda say: [say(n) for n in range(5)] and None)) == [0, 1, 2, 3, 4]

    def fails(say: object) -> None:
        say(1)  # type: ignore[operator]
        raise ValueError("in the middle")

    iterator = streamed(fails)
    assert next(iterator) == 1
    with pytest.raises(ValueError, match="in the middle"):
        next(iterator)


def test_work_that_nobody_listens_to_ends() -> None:
    ended = threading.Event()

    def work(say: object) -> None:
        try:
            while True:
                say(1)  # type: ignore[operator]
                time.sleep(0.005)
        except StoppedError:
            ended.set()
            raise

    iterator = streamed(work)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert ended.wait(10)
