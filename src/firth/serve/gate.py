"""What every request passes before it is read: the host, the key, the number of requests, and the size of the body.

Pure ASGI, so that nothing stands between a route and the news that its client has gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.core.files import read_utf8
from firth.serve.batching import MAX_RUNNING_BATCHES
from firth.serve.config import ServeConfig
from firth.serve.errors import ApiError, queue_full_error, stopping_error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

BODY_TIMEOUT_S = 10.0  # to receive a whole request
OPEN_PATHS = ("/", "/health")  # need no key
OPEN_PREFIX = "/page/"  # nor do the files of the page, which asks for the key
EVENTS_PATH = "/runs/events"  # a stream that lasts as long as somebody watches: it is counted apart
MAX_WATCHERS = 500
MIN_KEY_CHARS = 8
SECURITY_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


def read_api_keys(file: str) -> list[bytes]:
    """Return the hashes of the keys in a file, one key on each line."""
    keys = [line.strip() for line in read_utf8(Path(file)).splitlines() if line.strip()]
    if not keys:
        raise UserError(f"{file}: no key in this file. Write one on a line of its own.")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(f"{file}: key {number} must have {MIN_KEY_CHARS} or more ASCII characters, and no space.")
    return [hash_key(key.encode()) for key in keys]


def hash_key(key: bytes) -> bytes:
    """Hash a key: comparing hashes, which have one length, tells nothing of a key's length."""
    return hashlib.sha256(key).digest()


class Gate:
    """The outermost application. `num_requests` are between their first and last byte; who watches is no request."""

    def __init__(self, app: AsgiApp, config: ServeConfig, num_models: int, key_hashes: Sequence[bytes] = ()) -> None:
        self.app, self.config, self.key_hashes = app, config, key_hashes
        self.max_requests = max(num_models, 1) * (config.max_queue + MAX_RUNNING_BATCHES * config.max_batch_size)
        self.num_requests = self.num_watchers = 0
        self.is_stopping = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_watching = scope["path"] == EVENTS_PATH
        self.num_watchers += is_watching
        self.num_requests += not is_watching
        try:
            headers = dict(scope["headers"])
            self.check(scope["path"], headers)
            body = await asyncio.wait_for(self.read_body(scope["method"], headers, receive), BODY_TIMEOUT_S)
        except TimeoutError:
            await send_error(ApiError(408, f"The request took more than {BODY_TIMEOUT_S:g} seconds to arrive."), send)
        except ApiError as e:
            await send_error(e, send)
        except ConnectionAbortedError:
            pass
        else:
            await self.app(scope, replay(body, receive), with_security_headers(send))
        finally:
            self.num_watchers -= is_watching
            self.num_requests -= not is_watching

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Refuse a request by its headers."""
        if is_loopback(self.config.host) and not is_local_host(headers.get(b"host", b"")):
            # A web page may name a host of its own that leads to 127.0.0.1 (DNS rebinding).
            raise ApiError(400, "This server answers requests to localhost only.", "invalid_host")
        if self.is_stopping:
            raise stopping_error()
        if self.key_hashes and path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            self.check_key(headers.get(b"authorization", b""))
        if self.num_requests > self.max_requests or (path == EVENTS_PATH and self.num_watchers > MAX_WATCHERS):
            raise queue_full_error()

    def check_key(self, authorization: bytes) -> None:
        scheme, _, key = authorization.partition(b" ")
        given = hash_key(key.strip())
        found = [hmac.compare_digest(given, known) for known in self.key_hashes]  # all of them: no early end
        if scheme.lower() != b"bearer" or not any(found):
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def read_body(self, method: str, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Return the whole body; raise ApiError where it is too large or not JSON."""
        limit = self.config.max_body_bytes
        too_large = ApiError(413, f"The request has more than {limit:,} bytes.", "request_too_large")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError
            chunks.append(message.get("body", b""))
            size, more = size + len(chunks[-1]), message.get("more_body", False)
            if size > limit:
                raise too_large
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if size and method == "POST" and kind != b"application/json":
            # A page of another site may send any other type without asking first (CORS).
            raise ApiError(415, "Send JSON, with `Content-Type: application/json`.", "unsupported_media_type")
        return b"".join(chunks)


def is_local_host(host: bytes) -> bool:
    """
    >>> is_local_host(b"localhost:8000"), is_local_host(b"[::1]:80"), is_local_host(b"example.org")
    (True, True, False)
    """
    name = host.decode("latin-1")
    name = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
    return is_loopback(name)


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.2"), is_loopback("LOCALHOST"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then waits for the client to go."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
        await send(message)

    return send_with_headers


async def send_error(error: ApiError, send: Send) -> None:
    """Answer without the application."""
    body = json.dumps(error.to_json()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    start = {"type": "http.response.start", "status": error.status, "headers": [*encoded, *SECURITY_HEADERS]}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
