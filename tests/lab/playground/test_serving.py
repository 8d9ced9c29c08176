"""What the page is served behind, and how visitors share its models."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("gradio")

from starlette.testclient import TestClient

from agglo.lab.playground.models import Locked, Models
from agglo.lab.playground.serving import application, is_loopback, listening


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    with TestClient(application(Models(), "127.0.0.1"), base_url="http://127.0.0.1:7860") as client:
        yield client.get


def test_only_what_the_page_needs_is_there(ask: Any) -> None:
    for path in ("/", "/config", "/theme.css", "/gradio_api/info"):
        answer = ask(path)
        assert answer.status_code == 200 and "default-src 'self'" in answer.headers["content-security-policy"], path
    closed = ("/gradio_api/upload", "/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/call/tokens")
    closed += ("/gradio_api/proxy=http://example.org/", "/gradio_api/component_server", "/monitoring", "/docs")
    for path in (*closed, "/assets/%2e%2e/%2e%2e/secret"):
        assert (ask(path).status_code, ask(path).text) == (404, "there is nothing here"), path


def test_another_name_for_this_machine_is_refused(ask: Any) -> None:
    names = ("evil.example:7860", "127.0.0.1.evil.example", "localhost", "LOCALHOST:1", "[::1]:7860")
    assert [ask("/robots.txt", headers={"host": name}).status_code == 421 for name in names] == [True] * 2 + [False] * 3


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
