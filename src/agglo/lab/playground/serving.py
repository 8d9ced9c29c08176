"""The page on a port of this machine, behind a guard.

Gradio can also take uploads, serve files, fetch addresses and record. Its releases have had holes there: files of the
server could be read (CVE-2024-1561), and its proxy fetched what a visitor asked for (CVE-2024-2206). The page needs
none of it, so only the routes that it needs are open.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import torch

from agglo.lab.playground.models import Models

_ROUTES = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json|/(?:assets|static|svelte)/(?!.*\.\.).*"
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


def application(models: Models, host: str) -> Any:
    """Return the page as an ASGI application that refuses what the page does not need."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    import gradio as gr
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse

    from agglo.lab.playground.tabs import build, looks

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # So that no site can point its own name at this machine (DNS rebinding).
    names = {"localhost", "127.0.0.1", "::1", host} if is_loopback(host) else None

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Any:
        if names is not None and request.url.hostname not in names:
            answer = PlainTextResponse("this is not the host that was asked for", 421)
        elif not _ROUTES.fullmatch(request.url.path):
            answer = PlainTextResponse("there is nothing here", 404)
        else:
            answer = await call_next(request)
        answer.headers.update(_HEADERS)
        return answer

    closed: dict[str, Any] = {"run_history": False, "enable_monitoring": False, "pwa": False, "mcp_server": False}
    return gr.mount_gradio_app(
        app, build(models), path="/", ssr_mode=False, show_error=False, footer_links=[], **closed, **looks()
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; ValueError if the address is taken or not of this machine."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ValueError(f"host={host!r}, port={port}: {reason}; --port 0 takes any port that is free") from error


def serve(models: Models, host: str, port: int) -> None:
    """Print the address of the page and run it until it is interrupted; port 0 is any that is free.

    Whoever connects before it runs is not refused but answered once it does.
    """
    import uvicorn

    # Threads that wait for each other keep a core busy, and the page answers on the core that is left.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    with listening(host, port) as listener:
        # Windows that are open keep a connection: nobody waits for them to close, or wants to read that they were cut.
        quiet: dict[str, Any] = {"log_level": "critical", "server_header": False, "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(uvicorn.Config(application(models, host), **quiet))
        if not is_loopback(host):
            print("agglo: anybody who can reach this machine can use the page", file=sys.stderr)
        name = f"[{host}]" if ":" in host else host
        print(f"agglo: the page is at http://{name}:{listener.getsockname()[1]}/ (Ctrl+C ends it)", flush=True)
        server.run(sockets=[listener])
