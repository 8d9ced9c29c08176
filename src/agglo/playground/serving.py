"""The page on a port of this machine."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from agglo.playground.guard import Guard
from agglo.playground.models import Models

LOOPBACK = "127.0.0.1"
PORT = 7860


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def application(models: Models, host: str = LOOPBACK) -> Any:
    """The page as an ASGI application."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    import gradio as gr
    from fastapi import FastAPI

    from agglo.playground.page.layout import build, looks

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
    names = frozenset({"localhost", LOOPBACK, "::1", host}) if is_loopback(host) else None
    return Guard(inner, names)


@dataclass(frozen=True)
class Served:
    """A page that can run. address: where."""

    address: str
    run: Callable[[], None]


@contextmanager
def serving(models: Models, host: str = LOOPBACK, port: int = PORT) -> Iterator[Served]:
    """A page that is ready to run; port 0 is any that is free. Files of libraries go to a folder that ends with it."""
    import uvicorn

    with tempfile.TemporaryDirectory(prefix="agglo-play-") as folder, bound(host, port) as listener, one_core_left():
        os.environ["GRADIO_TEMP_DIR"] = folder
        os.environ.setdefault("MPLCONFIGDIR", folder)  # a library imports matplotlib, which writes a list of fonts
        inner = application(models, host)
        # Windows that are open keep a connection: nobody waits for them to close, or wants to read that they were cut.
        settings = uvicorn.Config(inner, log_level="critical", server_header=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        threading.Thread(target=_quietly, args=[models.warm_up], daemon=True).start()
        name = f"[{host}]" if ":" in host else host
        yield Served(f"http://{name}:{listener.getsockname()[1]}/", lambda: server.run(sockets=[listener]))


@contextmanager
def one_core_left() -> Iterator[None]:
    """Models take one core less than torch would, and the page answers on it: threads that wait for each other keep a
    core busy, and would keep the page waiting."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quietly(work: Any) -> None:
    """What fails while nobody asked for it is told to the first who does."""
    try:
        work()
    except Exception:
        return


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens there; ValueError if the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = f"{error.strerror or error}".lower() if isinstance(error, OSError) else str(error)
            raise ValueError(f"host={host!r}, port={port}: {reason}; --port 0 takes any port that is free") from error
        yield listener
