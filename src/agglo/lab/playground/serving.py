"""The page on a port of this machine, behind a guard.

Gradio can also take uploads, serve files, fetch addresses and record. Its releases have had holes there: files of the
server could be read (CVE-2024-1561), and its proxy fetched what a visitor asked for (CVE-2024-2206). The page needs
none of it, so only the routes that it needs are open.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import torch

from agglo.lab.playground.images import MOST_BYTES
from agglo.lab.playground.models import Models

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
# Two images as text, and room for the rest.
MOST_BODY = 2 * (MOST_BYTES * 4 // 3) + 64 * 1024
_ROUTES = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json|/(?:assets|static|svelte)/.*"
    r"|/gradio_api/(?:info|startup-events|app_id|cancel|reset|queue/(?:join|data|status)|heartbeat/[\w-]+)/?"
)
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
        "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Guard:
    """ASGI middleware that refuses what the page does not need.

    Args:
        app: The page.
        hosts: Names under which the page answers, so that no site can point its own name at it (DNS rebinding). None
            accepts any.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers, MutableHeaders
        from starlette.responses import PlainTextResponse

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return  # the page has no web sockets

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        app = self._app if refusal is None else PlainTextResponse(refusal[1], refusal[0])
        await app(scope, receive, send_with_headers)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and reason; None if the request is welcome."""
        length = headers.get("content-length", "0")
        host = re.sub(r":\d+$", "", headers.get("host", "").strip()).strip("[]").lower()
        if self._hosts is not None and host not in self._hosts:
            return 421, "this is not the host that was asked for"
        if not _ROUTES.fullmatch(path) or ".." in path:
            return 404, "there is nothing here"
        if "transfer-encoding" in headers:  # a body of unknown size; browsers say how long theirs are
            return 411, "the length of the body is required"
        if not length.isdigit() or int(length) > MOST_BODY:
            return 413, f"at most {MOST_BODY} bytes are accepted"
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def serving(models: Models, host: str, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of the page and the function that runs it; port 0 is any that is free.

    Whoever connects before it runs is not refused but answered once it does. Files of libraries go to a folder that is
    removed at the end.
    """
    import uvicorn

    # Threads that wait for each other keep a core busy, and the page answers on the core that is left.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    with tempfile.TemporaryDirectory(prefix="agglo-play-") as folder, listening(host, port) as listener:
        os.environ["GRADIO_TEMP_DIR"] = folder
        os.environ.setdefault("MPLCONFIGDIR", folder)  # a library imports matplotlib, which writes a list of fonts
        # Windows that are open keep a connection: nobody waits for them to close, or wants to read that they were cut.
        settings = uvicorn.Config(
            _application(models, host), log_level="critical", server_header=False, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(settings)

        def warm_up() -> None:
            with suppress(Exception):  # whoever asks for the model meets the error again
                models.warm_up()

        threading.Thread(target=warm_up, daemon=True).start()
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listener.getsockname()[1]}/", lambda: server.run(sockets=[listener])


def _application(models: Models, host: str) -> Any:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    import gradio as gr
    from fastapi import FastAPI

    from agglo.lab.playground.page.tabs import build, looks

    inner = gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        build(models),
        path="/",
        ssr_mode=False,
        show_error=False,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        **looks(),
    )
    return Guard(inner, frozenset({"localhost", LOOPBACK, "::1", host}) if is_loopback(host) else None)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; ValueError if the address is taken or not of this machine."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ValueError(f"host={host!r}, port={port}: {reason}; --port 0 takes any port that is free") from error
