"""Start and stop a server.

The socket is bound before the models are loaded, so that a port in use is an error at once. On SIGTERM or Ctrl-C new
requests get 503 while running ones end; what has not ended after `GRACE_S` gets 503 too, and the process exits.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from firth.core.console import format_count, quiet, say, warn
from firth.core.errors import UserError, shorten
from firth.serve.config import TASK_KINDS, ServeConfig

if TYPE_CHECKING:
    from firth.serve.gate import Gate
    from firth.serve.model_server import ModelServer
    from firth.serve.served_model import ServedModel

GRACE_S = 3.5  # for running requests after a signal; the process exits within 5 seconds
MAX_CONNECTIONS = 1000
KEEP_ALIVE_S = 65  # longer than clients keep a connection: else it may close while a client begins to write


def serve(checkpoints: Sequence[str], config: ServeConfig) -> None:
    """Serve checkpoints until SIGTERM or Ctrl-C."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("`firth serve` needs FastAPI and uvicorn: pip install 'firth[web]'") from None
    from firth.serve.app import make_app
    from firth.serve.gate import Gate, read_api_keys
    from firth.serve.model_server import ModelServer
    from firth.serve.served_model import ServedModel, name_checkpoints

    if not checkpoints and not config.runs:
        raise UserError(
            "Nothing to serve: name a checkpoint (firth serve run/final), or a folder of runs (--runs runs)."
        )
    named = name_checkpoints(checkpoints)
    key_hashes = read_api_keys(config.api_key_file) if config.api_key_file else []
    if config.api_key_file and Path(config.api_key_file).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warn(f"Others on this machine can read {config.api_key_file}: chmod 600 {config.api_key_file}")
    listener = listen(config.host, config.port)
    try:
        models = {name: ServedModel(name, folder, config) for name, folder in named.items()}
        server = ModelServer(models, config)
        gate = Gate(make_app(server), config, len(models), key_hashes)
        for model in models.values():
            say(f"{model.name}: {describe_abilities(model)}")
        run_until_signal(server, gate, listener, config)
    finally:
        listener.close()
    say("stopped")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise UserError(f"--host {shorten(host)}: not an address of this machine ({e.strerror}).") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        listener.close()
        raise UserError(f"Cannot listen on {host}:{port} ({os.strerror(e.errno or 0)}). Set another --port.") from None
    return listener


def describe_abilities(model: ServedModel) -> str:
    """What a model can be asked, for the line that is printed at the start."""
    abilities = [
        "/v1/completions, /generate" if model.can_generate else "",
        "/v1/chat/completions" if model.can_generate and model.has_chat_template else "",
        "/fill" if model.can_fill else "",
        *(route for route, kinds in TASK_KINDS.items() if set(kinds) & set(model.tasks.values())),
        "/v1/embeddings",
    ]
    count = format_count(sum(p.numel() for p in model.model.parameters()), "parameter")
    return f"{model.model.config.architecture} with {count}: {', '.join(filter(None, abilities))}"


def announce(listener: socket.socket, has_key: bool) -> None:
    """Print the address, and who can reach it."""
    host, port = listener.getsockname()[:2]
    is_local = ipaddress.ip_address(host).is_loopback
    reach = "only this machine reaches it; --host opens it to others" if is_local else "others can reach it"
    shown = f"[{host}]" if ":" in host else host
    say(f"Serving on http://{shown}:{port} ({reach}). Open it in a browser; the API is at /docs. Ctrl-C ends.")
    if not is_local and not has_key:
        warn("No key is needed: anyone who reaches this address can use the models. Set --api-key-file.")


def run_until_signal(server: ModelServer, gate: Gate, listener: socket.socket, config: ServeConfig) -> None:
    """Answer requests; return after a signal, when running requests have ended or their time is over."""
    import uvicorn

    class GracefulServer(uvicorn.Server):
        deadline_s = 0.0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce(listener, bool(gate.key_hashes))
            silence.enter_context(quiet())  # a library's message about one request says nothing here

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Refuse new requests from now on; a second signal ends at once."""
            self.should_exit = self.force_exit = gate.is_stopping
            gate.is_stopping, self.deadline_s = True, time.monotonic() + GRACE_S

        async def on_tick(self, counter: int) -> bool:
            if gate.is_stopping:
                server.end_streams()
            if gate.is_stopping and (gate.num_requests == 0 or time.monotonic() > self.deadline_s):
                server.stop()
                self.should_exit = True
            return await super().on_tick(counter)

    settings = uvicorn.Config(
        gate,
        log_level="info" if config.access_log else "error",
        access_log=config.access_log,
        lifespan="off",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    with ExitStack() as silence:
        try:
            GracefulServer(settings).run(sockets=[listener])
        finally:
            server.stop()
            for model in server.models.values():
                model.worker.thread.join(timeout=0.5)
