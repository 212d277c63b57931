"""Errors of the server, in the form of OpenAI's API, so that its clients raise their own exceptions.

{"error": {"message": "...", "type": "invalid_request_error", "param": "prompt", "code": "context_length_exceeded"}}
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

from firth.core.errors import UserError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 200: its status, what is wrong, and the field of the request that it concerns."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: Any = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers: Mapping[str, str] = headers or {}

    def to_json(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def queue_full_error() -> ApiError:
    message = "Too many requests wait already. Try again later."
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})


def stopping_error() -> ApiError:
    message = "The server is stopping."
    return ApiError(503, message, "stopping", headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})


def timeout_error(seconds: float) -> ApiError:
    return ApiError(504, f"The answer took more than {seconds:g} seconds.", "timeout")


def to_api_error(error: BaseException) -> ApiError:
    """Return any exception as an answer. An unexpected one is printed here, and its answer tells nothing of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error), "invalid_value")
    traceback.print_exception(error, file=sys.stderr)
    return ApiError(500, "The server failed to answer this request.", "internal_error")
