"""What the page is served behind, and how visitors share its models."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

pytest.importorskip("starlette")

from agglo.lab.playground.serving import MOST_BODY, Guard, is_loopback, listening
from agglo.lab.playground.sharing import Locked, StoppedError, streamed
from tests.support.processes import HANGS

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


def ask(path: str, **headers: str) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of the answer; what is let through answers 200."""
    answers: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    async def send(message: Any) -> None:
        answers.append(message)

    given = {"host": "127.0.0.1:7860", **headers}
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "path": path, "headers": encoded}
    asyncio.run(Guard(inner, LOCAL)(scope, None, send))  # type: ignore[arg-type]
    return answers[0]["status"], dict(answers[0]["headers"])


@pytest.mark.parametrize(
    "path", ["/", "/config", "/theme.css", "/assets/index-1.js", "/gradio_api/queue/join", "/gradio_api/heartbeat/abc1"]
)
def test_what_the_page_needs_is_there(path: str) -> None:
    status, headers = ask(path)
    assert status == 200 and b"default-src 'self'" in headers[b"content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/upload",
        "/gradio_api/file=/etc/passwd",
        "/file=/etc/passwd",
        "/gradio_api/proxy=http://example.org/",
        "/gradio_api/call/tokens",
        "/gradio_api/run/tokens",
        "/gradio_api/component_server",
        "/gradio_api/stream/a/b/c/d",
        "/monitoring",
        "/docs",
        "/openapi.json",
        "/assets/../../secret",
    ],
)
def test_nothing_else_is(path: str) -> None:
    assert ask(path)[0] == 404


def test_another_name_for_this_machine_is_refused() -> None:
    assert [ask("/", host=host)[0] for host in ("evil.example:7860", "", "127.0.0.1.evil.example")] == [421] * 3
    assert [ask("/", host=host)[0] for host in ("localhost", "LOCALHOST:1", "[::1]:7860")] == [200] * 3


def test_bodies_are_limited_and_say_how_long_they_are() -> None:
    route = "/gradio_api/queue/join"
    assert ask(route, content_length=str(MOST_BODY))[0] == 200
    assert [ask(route, content_length=length)[0] for length in (str(MOST_BODY + 1), "-1", "x")] == [413] * 3
    assert ask(route, transfer_encoding="chunked")[0] == 411


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "example.org")] == [False] * 4


def test_whoever_comes_before_the_page_runs_is_not_refused() -> None:
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as early:
        served, _ = listener.accept()
        with served:
            early.sendall(b"in time")
            assert served.recv(7) == b"in time"


def test_a_port_that_is_taken_is_said() -> None:
    with listening("127.0.0.1", 0) as listener, pytest.raises(ValueError, match="--port 0"):
        listening("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ValueError, match="port=99999"):
        listening("127.0.0.1", 99999)


def test_one_user_at_a_time() -> None:
    made: list[int] = []
    locked = Locked(lambda: made.append(1) or [0])

    def add() -> None:
        for _ in range(50):
            with locked.use() as counter:
                seen = counter[0]
                time.sleep(0)
                counter[0] = seen + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with locked.use() as counter:
        assert counter == [200] and made == [1]


def test_what_could_not_be_made_is_tried_again_and_an_error_frees_it() -> None:
    tries = iter([ValueError("not yet"), None])

    def make() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "made"

    locked = Locked(make)
    with pytest.raises(ValueError, match="not yet"), locked.use():
        pass
    with pytest.raises(RuntimeError, match="in use"), locked.use():
        raise RuntimeError("in use")
    with locked.use() as value:
        assert value == "made"


def test_reports_come_in_order_and_errors_come_last() -> None:
    def work(report: Any) -> None:
        for number in range(3):
            report(number)
        raise ValueError("at the end")

    iterator = streamed(work)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="at the end"):
        next(iterator)


def test_work_that_nobody_reads_ends() -> None:
    ended = threading.Event()

    def work(report: Any) -> None:
        try:
            while True:
                report(1)
        except StoppedError:
            ended.set()
            raise

    iterator = streamed(work)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert ended.wait(HANGS)
