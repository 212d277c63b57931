"""The routes of training runs: a list, the log as it grows, changes as events, the doctor's notes, and samples."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse

from firth.core.errors import UserError
from firth.serve import play_schemas as schemas
from firth.serve.errors import ApiError
from firth.serve.gate import EVENTS_PATH
from firth.serve.model_server import ModelServer
from firth.serve.openai_routes import EVENT_STREAM
from firth.serve.run_events import RunEvents
from firth.serve.run_notes import RunNotes
from firth.serve.run_samples import KeptSamples, SampleStore
from firth.serve.runs import COLUMNS, RunsFolder, WatchedRun, run_references

RUN_TAGS: Any = ["runs"]
SAMPLES_WAIT_S = 20.0  # before an answer tells the samples so far


def add_run_routes(app: FastAPI, server: ModelServer, folder: RunsFolder) -> None:
    notes, samples = RunNotes(), SampleStore()
    events = RunEvents(folder, notes, server.read)
    server.streams.append(events.close)
    server.background += [notes.stop, samples.stop]
    add_log_routes(app, server, folder, events)
    add_notes_route(app, server, folder, notes)
    add_sample_routes(app, server, folder, samples)


def add_log_routes(app: FastAPI, server: ModelServer, folder: RunsFolder, events: RunEvents) -> None:
    @app.get("/runs", tags=RUN_TAGS, response_model=schemas.RunsAnswer)
    async def list_runs() -> Any:
        """List the training runs below the folder of --runs."""
        found = await server.read(folder.list_summaries)
        return JSONResponse({"runs": [run._asdict() for run in found]})

    @app.get("/runs/log", tags=RUN_TAGS, response_model=schemas.RunLogAnswer)
    async def read_run_log(
        name: str, version: Annotated[int, Query(ge=0)] = 0, after: Annotated[int, Query(ge=0)] = 0
    ) -> Any:
        """Return the log of a run as rows, or what is new since the last call."""

        def read() -> dict[str, Any]:
            run = find_run(folder, name)
            part = run.log_after(version, after)
            return {
                "name": name,
                "version": part.version,
                "next_row": part.next_row,
                "columns": list(COLUMNS),
                "rows": part.rows,
                "run": run.summary._asdict() if run.summary else None,
                "references": run.references(run_references),
            }

        return JSONResponse(await server.read(read))  # many rows, and many who watch: not checked against the type

    @app.get(EVENTS_PATH, tags=RUN_TAGS, responses={200: EVENT_STREAM}, response_class=StreamingResponse)
    async def watch_runs() -> Response:
        """Send all runs, then what changes in any of them, by server-sent events."""
        return StreamingResponse(events.watch(), media_type="text/event-stream")


def add_notes_route(app: FastAPI, server: ModelServer, folder: RunsFolder, notes: RunNotes) -> None:
    @app.get("/runs/notes", tags=RUN_TAGS, response_model=schemas.NotesAnswer)
    async def read_notes(name: str) -> Any:
        """Return what `firth doctor` says about a run. It is examined in the background when its log has changed."""

        def read() -> dict[str, Any]:
            run = find_run(folder, name)
            return {"name": name, **notes.read(run)}

        return await server.read(read)


def add_sample_routes(app: FastAPI, server: ModelServer, folder: RunsFolder, samples: SampleStore) -> None:
    @app.get("/runs/samples", tags=RUN_TAGS, response_model=schemas.OwnSamplesAnswer)
    async def read_own_samples(name: str) -> Any:
        """Return what the run itself made of a few held-out sentences, at each of its checkpoints."""

        def read() -> dict[str, Any]:
            return {"run": name, "checkpoints": find_run(folder, name).own_samples()}

        return await server.read(read)

    @app.post("/runs/samples", tags=RUN_TAGS, response_model=schemas.SamplesAnswer)
    async def sample_run(body: schemas.SamplesRequest) -> Any:
        """Tell what each checkpoint of a run makes of a text. On a busy machine some come later: ask again."""

        def request() -> tuple[KeptSamples, Future[None] | None]:
            try:
                return samples.request(find_run(folder, body.run), body.text)
            except UserError as e:
                raise ApiError(503, str(e), "busy") from None

        kept, job = await server.read(request)
        if job is not None:
            await asyncio.wait([asyncio.wrap_future(job)], timeout=SAMPLES_WAIT_S)
        return {"run": body.run, **samples.describe(kept)}


def find_run(folder: RunsFolder, name: str) -> WatchedRun:
    try:
        return folder.find(name)
    except UserError as e:
        raise ApiError(404, str(e), "run_not_found", "run") from None
