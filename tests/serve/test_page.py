"""The page without a browser: it is complete, small, and asks nothing of other hosts."""

from __future__ import annotations

import re
from typing import Any

from firth.serve.page_files import read_page_files


def test_the_page_loads_its_own_files_only(client: Any) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    files = read_page_files()
    names = set(files)
    assert sum(len(file.content) for file in files.values()) < 1_000_000
    for name, file in files.items():
        served = client.get(f"/page/{name}")
        assert served.content == file.content
        assert served.headers["content-security-policy"] == policy
        text = file.content.decode()
        assert set(re.findall(r'"/page/([^"]+)"', text)) <= names
        assert not re.findall(r"https?://", text.replace("http://www.w3.org/2000/svg", ""))
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert unsafe not in text, name
    assert "<script>" not in answer.text
    assert not re.search(r"\son\w+=", answer.text)


def test_no_path_of_a_request_reaches_the_file_system(client: Any) -> None:
    for path in ("/page/app.py", "/page/..%2Fapp.py", "/page/../app.py", "/page/%2e%2e/config.py"):
        assert client.get(path).status_code == 404


def test_a_server_with_a_key_shows_the_page_and_nothing_else(connect: Any) -> None:
    with connect("bert", key="secret-key-1") as (client, _):
        assert client.get("/").status_code == client.get("/page/app.js").status_code == 200
        assert client.get("/v1/models").status_code == client.get("/docs").status_code == 401
