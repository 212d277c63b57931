"""The models of a server, and how a request becomes an answer.

    request -> Gate (host, key, size) -> route -> ServedModel.make_..._job -> BatchWorker -> events -> answer

A route reads the request in a helper thread, submits a job, and waits for its events, for the client to go away, or for
the time to be over, whichever comes first.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from firth.core.errors import did_you_mean, quote
from firth.serve.batching import Job, Piece, Result
from firth.serve.config import ServeConfig
from firth.serve.errors import ApiError, timeout_error
from firth.serve.served_model import ServedModel

NUM_HELPER_THREADS = 2  # encode prompts and read inputs


class ModelServer:
    """The models by name, and what the routes share."""

    def __init__(self, models: Mapping[str, ServedModel], config: ServeConfig) -> None:
        self.models, self.config = dict(models), config
        self.helpers = ThreadPoolExecutor(NUM_HELPER_THREADS, "firth-read")
        self.streams: list[Callable[[], None]] = []  # end streams that last as long as the server
        self.background: list[Callable[[], None]] = []  # end what computes beside the requests
        for model in self.models.values():
            model.worker.thread.start()

    def end_streams(self) -> None:
        """End the streams that would keep a server from stopping. Called in the event loop."""
        for end in self.streams:
            end()

    def stop(self) -> None:
        """End the computing threads; what they have not answered is answered by 503."""
        for end in self.background:
            end()
        for model in self.models.values():
            model.worker.stop()
        self.helpers.shutdown(wait=False, cancel_futures=True)

    def find(self, name: str | None, is_able: Callable[[ServedModel], bool]) -> ServedModel:
        """Return a model by its name, or the only one that can answer."""
        if name is not None:
            if name not in self.models:
                message = f"There is no model {quote(name)}. {did_you_mean(name, self.models)}"
                raise ApiError(404, message, "model_not_found", "model")
            return self.models[name]
        if not self.models:
            raise ApiError(400, "This server has no model: it shows runs only.", "no_model")
        able = [model for model in self.models.values() if is_able(model)]
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        if len(able) != 1:
            names = ", ".join(model.name for model in able or self.models.values())
            problem = "Several models can" if able else "No model can"
            raise ApiError(400, f"{problem} answer this request. Name one: {names}.", "invalid_value", "model")
        return able[0]

    async def read(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a function in a helper thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.helpers, lambda: make(*arguments, **options))

    async def events(
        self, request: Request, model: ServedModel, make_job: Callable[[], Job]
    ) -> AsyncGenerator[Piece | Result, None]:
        """Make a job, submit it and yield its events up to the last. Ends without one if the client has gone."""
        deadline_s = time.monotonic() + self.config.timeout_s
        gone = asyncio.ensure_future(request.receive())  # returns when the client has gone
        jobs: list[Job] = []
        try:
            job = await asyncio.wait_for(self.read(make_job), self.config.timeout_s)
            jobs.append(job)
            model.worker.submit(job)
            while True:
                event = asyncio.ensure_future(job.events.get())
                left_s = max(deadline_s - time.monotonic(), 0)
                await asyncio.wait((event, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    if gone.done():
                        return
                    raise timeout_error(self.config.timeout_s)
                if isinstance(found := event.result(), ApiError):
                    raise found
                yield found
                if isinstance(found, Result):
                    return
        except TimeoutError:
            raise timeout_error(self.config.timeout_s) from None
        finally:
            gone.cancel()
            for job in jobs:
                job.cancel()

    async def result(self, request: Request, model: ServedModel, make_job: Callable[[], Job]) -> Any:
        """Return the result of a job."""
        async for event in self.events(request, model, make_job):
            if isinstance(event, Result):
                return event.value
        raise ClientGone

    async def inspect(self, request: Request, model: ServedModel, compute: Callable[[], Any]) -> Any:
        """Return what a function returns in the computing thread of a model."""
        return await self.result(request, model, lambda: model.make_inspection_job(compute))

    async def stream(
        self,
        request: Request,
        model: ServedModel,
        make_job: Callable[[], Job],
        describe_piece: Callable[[Piece], Mapping[str, Any]],
        describe_end: Callable[[Any], Sequence[Mapping[str, Any]]],
        opening: Sequence[Mapping[str, Any]] = (),
    ) -> Response:
        """Answer by server-sent events. What fails before the first event is an answer with its own status."""
        events = self.events(request, model, make_job)
        try:
            first = await anext(events)
        except StopAsyncIteration:
            raise ClientGone from None

        async def lines() -> AsyncIterator[str]:
            for data in opening:
                yield event_line(data)
            try:
                event: Piece | Result | None = first
                while event is not None:
                    for data in [describe_piece(event)] if isinstance(event, Piece) else describe_end(event.value):
                        yield event_line(data)
                    event = await anext(events, None)
            except ApiError as e:
                yield event_line(e.to_json())
            finally:
                await events.aclose()
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


class ClientGone(Exception):  # noqa: N818, no error
    """The client closed its connection: nobody reads the answer."""


def event_line(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
