"""In front of the page: only what it needs, nothing too large, no other host's name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agglo.playground.guard import MOST_BODY, Guard
from agglo.playground.page.answers import sentence
from agglo.playground.serving import bound, is_loopback, one_core_left

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


def test_models_leave_a_core_to_the_page() -> None:
    before = torch.get_num_threads()
    try:
        for threads, left in ((3, 2), (1, 1)):
            torch.set_num_threads(threads)
            with one_core_left():
                assert torch.get_num_threads() == left
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def ask(
    path: str, *, host: str = "127.0.0.1:7860", bodies: tuple[bytes, ...] = (b"",), length: int | None = None
) -> Any:
    """Status, headers and what the inner application read."""
    read: list[bytes] = []
    answers: list[Any] = []
    waiting = list(bodies)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            read.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    async def receive() -> Any:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        answers.append(message)

    headers = [(b"host", host.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(Guard(inner, LOCAL)(scope, receive, send))
    return answers[0]["status"], dict(answers[0]["headers"]), b"".join(read)


@pytest.mark.parametrize(
    "path", ["/", "/config", "/theme.css", "/assets/index-1.js", "/gradio_api/queue/join", "/gradio_api/heartbeat/abc1"]
)
def test_what_the_page_needs_is_there(path: str) -> None:
    status, headers, _ = ask(path)
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


def test_requests_are_limited_by_what_they_say_and_by_what_they_send() -> None:
    assert ask("/gradio_api/queue/join", length=MOST_BODY)[0] == 200
    assert ask("/gradio_api/queue/join", length=MOST_BODY + 1)[0] == 413
    part = bytes(MOST_BODY // 2)
    status, _, read = ask("/gradio_api/queue/join", bodies=(part, part, part))
    assert status == 413 and len(read) <= MOST_BODY


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "example.org")] == [False] * 4


def test_a_port_that_is_taken_is_said() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(ValueError, match="--port 0"), bound("127.0.0.1", listener.getsockname()[1]):
            pass
    with pytest.raises(ValueError, match="port=99999"), bound("127.0.0.1", 99999):
        pass


def test_sentences_hold_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError(
        "checkpoint='/home/anna/models/deit.safetensors' has 3 names, 0.5 of 1/2 and C:\\Users\\anna\\x.pt"
    )
    assert sentence(error) == "checkpoint='…' has 3 names, 0.5 of 1/2 and …"
    assert sentence(ValueError("model='hf:/home/anna/vit' of http://example.org/a/b")) == (
        "model='hf:…' of http://example.org/a/b"
    )
    assert "tome/atc" in sentence(ValueError("tome/atc do"))
    assert "/secret" not in sentence(RuntimeError("/secret/place broke")) and "/secret/place" in capsys.readouterr().err
    assert "pip install" in sentence(ModuleNotFoundError("no", name="diffusers"))
