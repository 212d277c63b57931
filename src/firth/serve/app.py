"""The application: all routes, the page that describes them, and errors as answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from firth.core.errors import UserError
from firth.core.html import HtmlPage
from firth.core.parse import parse_json
from firth.serve import schemas
from firth.serve.errors import ApiError, to_api_error
from firth.serve.model_server import ClientGone, ModelServer
from firth.serve.openai_routes import add_openai_routes
from firth.serve.page_files import add_page
from firth.serve.play_routes import add_play_routes
from firth.serve.run_routes import add_run_routes
from firth.serve.runs import RunsFolder
from firth.serve.task_routes import add_task_routes

API_VERSION = "1"
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer, "description": description}
    for status, description in {
        400: "The request is wrong.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The request took too long to arrive.",
        413: "The request is too large.",
        415: "The request is not JSON.",
        429: "Too many requests wait already.",
        500: "The server failed.",
        503: "The server is stopping.",
        504: "The answer took too long.",
    }.items()
}


class JsonRoute(APIRoute):
    """A route whose body is read by Firth's JSON reader: no endless nesting, no text that is not Unicode."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            body = await self.body()
            value = parse_json(body.decode(), "the request")
            if SURROGATE_ESCAPE.search(body):
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except UnicodeDecodeError:
            raise HTTPException(400, "The request is not UTF-8.") from None
        except UnicodeEncodeError:
            raise HTTPException(400, "The request has half of a surrogate pair, which is no character.") from None
        except UserError as e:
            raise HTTPException(400, str(e)) from None


def make_app(server: ModelServer) -> FastAPI:
    """Return the application, without the gate."""
    app = FastAPI(
        title="Firth",
        version=API_VERSION,
        description="Language models from your own text. Errors have the form of OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
    )
    app.router.route_class = JsonRoute
    app.add_exception_handler(RequestValidationError, answer_invalid_request)
    app.add_exception_handler(HTTPException, answer_http_error)
    for kind in (ApiError, UserError, Exception):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(ClientGone, lambda request, error: Response(status_code=499))
    add_openai_routes(app, server)
    add_task_routes(app, server)
    add_play_routes(app, server)
    if server.config.runs:
        add_run_routes(app, server, RunsFolder(server.config.runs))
    add_pages(app, server)
    add_page(app)
    list_model_names(app.openapi(), list(server.models))
    return app


def list_model_names(openapi: dict[str, Any], names: Sequence[str]) -> None:
    """Let the OpenAPI document name the models that a request can ask. FastAPI keeps the document that it has made."""
    for name, schema in openapi["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema["properties"]:
            field = schema["properties"]["model"]
            for part in field.get("anyOf", [field]):
                if part["type"] == "string":
                    part["enum"] = list(names)
    for parameter in openapi["paths"]["/v1/models/{name}"]["get"]["parameters"]:
        parameter["schema"]["enum"] = list(names)


def add_pages(app: FastAPI, server: ModelServer) -> None:
    @app.get("/health", tags=["server"])
    async def health() -> schemas.Health:
        """Tell that the server answers. Needs no key."""
        return schemas.Health(models=list(server.models), has_runs=bool(server.config.runs))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(describe_api(app.openapi()))


def describe_api(openapi: Mapping[str, Any]) -> str:
    """Return the OpenAPI document as a page without scripts."""
    page = HtmlPage("Firth's server")
    page.add_paragraph("The same as a document for programs: /openapi.json")
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            page.add_heading(f"{method.upper()} {path}")
            page.add_paragraph(route.get("description", route.get("summary", "")))
            content = route.get("requestBody", {}).get("content", {}).get("application/json")
            if content:
                schema = resolve_reference(openapi, content["schema"])
                required = schema.get("required", ())
                rows = [
                    (name, describe_type(field), "yes" if name in required else "", field.get("description", ""))
                    for name, field in schema["properties"].items()
                ]
                page.add_table(["field", "type", "required", "meaning"], rows)
    return page.to_html()


def resolve_reference(openapi: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return openapi["components"]["schemas"][name] if name else schema


def describe_type(schema: Mapping[str, Any]) -> str:
    """
    >>> describe_type({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
    'array of string'
    """
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(describe_type(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if schema.get("type") == "array":
        return f"array of {describe_type(schema.get('items', {}))}"
    return str(schema.get("type") or schema.get("$ref", "any").rpartition("/")[2] or schema.get("const", "any"))


# --- errors


def answer_api_error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.to_json(), error.status, dict(error.headers))


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    return answer_api_error(to_api_error(error))


async def answer_invalid_request(request: Request, error: Exception) -> JSONResponse:
    """Name the first field that is wrong, as 400."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(path) or None
    return answer_api_error(ApiError(400, f"{param or 'the request'}: {first['msg']}.", first["type"], param))


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return answer_api_error(ApiError(error.status_code, str(error.detail), headers=error.headers))
