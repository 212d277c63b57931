"""The routes of training runs: a list, the log as it grows, and samples of the checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse

from firth.core.errors import UserError
from firth.serve import play_schemas as schemas
from firth.serve.errors import ApiError
from firth.serve.model_server import ModelServer
from firth.serve.run_samples import sample_checkpoints
from firth.serve.runs import COLUMNS, RunsFolder, WatchedRun, run_references


def add_run_routes(app: FastAPI, server: ModelServer, folder: RunsFolder) -> None:
    tags: Any = ["runs"]

    def find_run(name: str) -> WatchedRun:
        try:
            return folder.find(name)
        except UserError as e:
            raise ApiError(404, str(e), "run_not_found", "run") from None

    @app.get("/runs", tags=tags, response_model=schemas.RunsAnswer)
    async def list_runs() -> Any:
        """List the training runs below the folder of --runs."""
        found = await server.read(folder.list_summaries)
        return JSONResponse({"runs": [run._asdict() for run in found]})

    @app.get("/runs/log", tags=tags, response_model=schemas.RunLogAnswer)
    async def read_run_log(
        name: str, version: Annotated[int, Query(ge=0)] = 0, after: Annotated[int, Query(ge=0)] = 0
    ) -> Any:
        """Return the log of a run as rows, or what is new since the last call."""

        def read() -> dict[str, Any]:
            run = find_run(name)
            part = run.log_after(version, after)
            return {
                "name": name,
                "version": part.version,
                "next_row": part.next_row,
                "columns": list(COLUMNS),
                "rows": part.rows,
                "run": folder.summaries[name]._asdict(),
                "references": run.references(run_references),
            }

        return JSONResponse(await server.read(read))  # many rows, and many who watch: not checked against the type

    @app.post("/runs/samples", tags=tags, response_model=schemas.SamplesAnswer)
    async def sample_run(body: schemas.SamplesRequest) -> Any:
        """Tell what each checkpoint of a run makes of a text."""
        run = await server.read(find_run, body.run)
        return {"run": body.run, "samples": await server.read(sample_checkpoints, run, body.text)}
