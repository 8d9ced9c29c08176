"""What stands in front of the page: only the addresses it needs, requests of a limited size, and no other host."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agglo.playground.uploads import MOST_BYTES

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Two pictures as text, and room for the rest.
MOST_BODY = 2 * (MOST_BYTES * 4 // 3) + 64 * 1024
# Gradio can also upload, serve files, fetch addresses and record: nothing of this is needed, so nothing of it is there.
_ALLOWED = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json|/(?:assets|static|svelte)/.*"
    r"|/gradio_api/(?:info|startup-events|app_id|cancel|reset|queue/(?:join|data|status)|heartbeat/[\w-]+)/?"
)
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class TooLargeError(Exception):
    """A request with more than is accepted."""


class Guard:
    """An ASGI middleware. hosts: names under which the page may be asked for, so that no other site's name can be made
    to point at it; None is any."""

    def __init__(self, inner: Application, hosts: frozenset[str] | None) -> None:
        self._inner, self._hosts = inner, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the page has no sockets
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
            await _refuse(send, 421, "this is not the host that was asked for")
        elif not _ALLOWED.fullmatch(scope["path"]) or ".." in scope["path"]:
            await _refuse(send, 404, "there is nothing here")
        elif not length.isdigit() or int(length) > MOST_BODY:
            await _refuse(send, 413, f"at most {MOST_BODY} bytes are accepted")
        else:
            await self._hand_on(scope, receive, send)

    async def _hand_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        received, started = 0, False

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BODY:
                raise TooLargeError
            return message

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
            await send(message)

        try:
            await self._inner(scope, limited, guarded)
        except TooLargeError:
            if not started:
                await _refuse(send, 413, f"at most {MOST_BODY} bytes are accepted")


def _host(header: bytes) -> str:
    """The name in a Host header, without its port."""
    name = header.decode("latin-1").strip()
    return re.sub(r":\d+$", "", name).strip("[]").lower()


async def _refuse(send: Send, status: int, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode()})
