"""The playground: one page, its styles and its modules, read from the package once. Reports share its design.

A request names a file of the page, and the name is looked up in a dictionary: no path of a request reaches the file
system. The content security policy allows scripts, styles and requests of this server alone, and no inline script, so
text that a model writes cannot run; the page sets every text by `textContent`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from fastapi.responses import Response

from firth.core.html import READOUT_SCRIPT, SHARED_STYLES, read_template
from firth.serve.errors import ApiError
from firth.serve.gate import OPEN_PREFIX

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class PageFile(NamedTuple):
    content: bytes
    media_type: str


def read_page_files() -> dict[str, PageFile]:
    """Return the files of the page by name."""
    found = {}
    for file in files("firth.serve").joinpath("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            found[file.name] = PageFile(file.read_bytes(), MEDIA_TYPES[suffix])
    for name in (*SHARED_STYLES, READOUT_SCRIPT):
        found[name] = PageFile(read_template(name).encode(), MEDIA_TYPES[Path(name).suffix])
    return found


def add_page(app: FastAPI) -> None:
    page_files = read_page_files()

    def answer(name: str) -> Response:
        if name not in page_files:
            raise ApiError(404, "There is no such file.", "not_found")
        file = page_files[name]
        return Response(file.content, media_type=file.media_type, headers=PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return answer("index.html")

    @app.get(OPEN_PREFIX + "{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return answer(name)
