"""A stand-in for the API of the Hugging Face Hub, as much of it as an upload needs, on a port of this machine.

It keeps repositories in memory: `repos[name]["branches"][branch]` has the content of each file.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}  # of git-lfs, by SHA-256
        self.requests: list[str] = []
        self.tokens = {"hf_write"}
        self.answer: Callable[[str], int | None] = lambda request: None  # a status to fail with
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def reply(self, status: int, value: Any = None) -> None:
                body = value if isinstance(value, bytes) else json.dumps(value if value is not None else {}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):  # a client that was stopped
                    self.wfile.write(body)

            def read_body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return body
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def serve(self) -> None:
                body, path = self.read_body(), self.path.partition("?")[0]
                request = f"{self.command} {path}"
                hub.requests.append(request)
                if (status := hub.answer(request)) is not None:
                    return self.reply(status, {"error": "out of order"})
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if token not in hub.tokens and not path.startswith("/objects/"):
                    return self.reply(401, {"error": "Invalid credentials"})
                return self.reply(*hub.handle(request, body))

            do_GET = do_POST = do_PUT = serve  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def handle(self, request: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON of a request."""
        if request == "POST /api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.repos:
                return 409, {"error": "exists", "url": f"{self.url}/{name}"}
            self.repos[name] = {
                "visibility": asked.get("visibility"),
                "branches": {"main": {".gitattributes": b""}},
                "commits": [],
            }
            return 200, {"url": f"{self.url}/{name}"}
        if request == "POST /api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\nlicense")
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"PUT /objects/(\w+)", request):
            self.objects[match[1]] = body
            return 200, {}
        if match := re.fullmatch(r"POST /([\w-]+/[\w-]+)\.git/info/lfs/objects/batch", request):
            objects = json.loads(body)["objects"]
            actions = {"actions": {"upload": {"href": f"{self.url}/objects/OID", "header": {}}}}
            return 200, {
                "transfer": "basic",
                "objects": [item | json.loads(json.dumps(actions).replace("OID", item["oid"])) for item in objects],
            }
        if match := re.fullmatch(r"GET /api/models/([\w-]+/[\w-]+)/tree/([\w.-]+)", request):
            files = self.repos[match[1]]["branches"][match[2]]
            return 200, [{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files]
        if match := re.fullmatch(r"GET /([\w-]+/[\w-]+)/resolve/([\w.-]+)/(.+)", request):
            content = self.repos[match[1]]["branches"][match[2]].get(match[3])
            return (404, {"error": "no such file"}) if content is None else (200, content)
        match = re.fullmatch(r"POST /api/models/([\w-]+/[\w-]+)/(preupload|commit|branch)/([\w.-]+)", request)
        if match is None or match[1] not in self.repos:
            return 404, {"error": "not found"}
        repo, branch = self.repos[match[1]], match[3]
        if match[2] == "branch":
            if branch in repo["branches"]:
                return 409, {"error": "exists"}
            repo["branches"][branch] = dict(repo["branches"]["main"])
            return 200, {}
        if branch not in repo["branches"]:
            return 404, {"error": "no such revision"}
        if match[2] == "preupload":
            files = json.loads(body)["files"]
            modes = {
                f["path"]: "lfs" if f["path"].endswith((".safetensors", ".onnx", ".gguf")) else "regular" for f in files
            }
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        files, deleted = {}, set()
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                if value["path"] not in repo["branches"][branch]:
                    return 400, {"error": f"{value['path']} does not exist"}
                deleted.add(value["path"])
        kept = {name: content for name, content in repo["branches"][branch].items() if name not in deleted}
        repo["branches"][branch] = kept | files
        repo["commits"].append(branch)
        oid = f"{len(repo['commits']):040x}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{match[1]}/commit/{oid}"}
