"""Processes that tokenise: each reads documents from a pipe and writes arrays to another, until the pipe ends."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from firth.errors import UserError
from firth.text import Document, load_salient, salient_name
from firth.tokens.duplicates import sign
from firth.tokens.tokenise import Tokenised, Way
from firth.tokens.tokenizer import load_tokenizer

AHEAD = 2  # chunks for each worker that are read before they are asked for
Decide = Callable[[np.ndarray], list[int]]  # the signatures of some documents -> which of them are wanted


class Result(NamedTuple):
    """Some documents as arrays, to train on and held out, without those that were not wanted."""

    parts: tuple[Tokenised, Tokenised]
    dropped: int


class InOrder(Protocol):
    """Tokenises chunks, each a tuple with the field `documents`, and gives them back without these."""

    def __call__(self, chunks: Iterable[Any], decide: Decide | None = None) -> Iterator[tuple[Any, Result]]: ...


# A message is a header as JSON, and bytes


def send(pipe: IO[bytes], header: Any, *blobs: bytes | memoryview) -> None:
    head = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    pipe.write(struct.pack("<II", len(head), len(blobs)))
    pipe.write(head)
    for blob in blobs:
        pipe.write(struct.pack("<Q", len(blob)))
        pipe.write(blob)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[Any, list[bytes]]:
    """The next message; EOFError where there is none."""
    size, count = struct.unpack("<II", exactly(pipe, 8))
    header = json.loads(exactly(pipe, size).decode("utf-8", "surrogatepass"))
    return header, [exactly(pipe, struct.unpack("<Q", exactly(pipe, 8))[0]) for _ in range(count)]


def exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The side of the one who has the documents


class Worker:
    """One process, and the pipes to it. It ends by itself when this process is gone, however that went."""

    def __init__(self, way: Way, tokenizer_folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",  # a worker is one core
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-c", "from firth.tokens.workers import main; main()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        salient = None if way.salient is None else salient_name(way.salient)
        self._send([str(tokenizer_folder.absolute()), way.held_out_share, way.language, salient, way.memory])

    def __call__(self, documents: Sequence[Document], decide: Decide | None = None) -> Result:
        """Tokenise all documents, or have them signed first and then tokenise those that are wanted."""
        self._send({"documents": documents, "sign": decide is not None})
        dropped = 0
        if decide is not None:
            wanted = decide(self._receive()[0])
            dropped = len(documents) - len(wanted)
            self._send(wanted)
        arrays = self._receive()
        half = len(arrays) // 2
        return Result((Tokenised(*arrays[:half]), Tokenised(*arrays[half:])), dropped)

    def _receive(self) -> list[np.ndarray]:
        try:
            header, blobs = receive(self.process.stdout)  # type: ignore[arg-type]
        except EOFError:
            raise self._gone() from None
        if "wrong" in header:
            raise UserError(header["wrong"])
        kinds = zip(blobs, header["dtypes"], header["shapes"], strict=True)
        return [np.frombuffer(blob, dtype).reshape(shape) for blob, dtype, shape in kinds]

    def _send(self, header: Any) -> None:
        try:
            send(self.process.stdin, header)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise self._gone() from None

    def _gone(self) -> UserError:
        code = self.process.wait()
        return UserError(
            f"A process that tokenises ended by itself (exit code {code}); -9 is often a lack of memory. What is done "
            "is kept: run it again with --resume, and with fewer --workers or a --max-memory."
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # what it had not read yet
                pipe.close()  # type: ignore[union-attr]


class Turn:
    """A chunk's turn to decide what of it is wanted: after the chunk before it, whoever has signed them first."""

    def __init__(self, decide: Decide, before: Turn | None) -> None:
        self.decide = decide
        self.before = before.over if before else None
        self.over: Future[None] = Future()

    def __call__(self, signatures: np.ndarray) -> list[int]:
        if self.before is not None:
            self.before.result()
        wanted = self.decide(signatures)
        self.over.set_result(None)
        return wanted

    def leave(self) -> None:
        """Let nobody wait for this turn any more. If it was not taken, those after it cannot be taken either."""
        self.over.cancel()


def alone(way: Way) -> InOrder:
    """As `crew`, in this process."""

    def in_order(chunks: Iterable[Any], decide: Decide | None = None) -> Iterator[tuple[Any, Result]]:
        for chunk in chunks:
            wanted = chunk.documents if decide is None else [chunk.documents[i] for i in decide(sign(chunk.documents))]
            yield chunk._replace(documents=[]), Result(way(wanted), len(chunk.documents) - len(wanted))

    return in_order


@contextmanager
def crew(way: Way, tokenizer_folder: Path, workers: int) -> Iterator[InOrder]:
    """A function like `map(way, chunks)`, done by so many processes; the results come in the order of the chunks.

    With `decide` each document is signed first, and of each chunk, in their order, only what is wanted is tokenised.
    """
    free: SimpleQueue[Worker] = SimpleQueue()
    everyone = [Worker(way, tokenizer_folder) for _ in range(workers)]
    for worker in everyone:
        free.put(worker)
    threads = ThreadPoolExecutor(workers)

    def work(documents: Sequence[Document], turn: Turn | None) -> Result:
        worker = free.get()
        try:
            return worker(documents, turn)
        finally:
            free.put(worker)
            if turn is not None:
                turn.leave()

    def in_order(chunks: Iterable[Any], decide: Decide | None = None) -> Iterator[tuple[Any, Result]]:
        pending: deque[tuple[Any, Future[Result]]] = deque()
        turn: Turn | None = None
        for chunk in chunks:
            turn = Turn(decide, turn) if decide is not None else None
            pending.append((chunk._replace(documents=[]), threads.submit(work, chunk.documents, turn)))
            while len(pending) > AHEAD * workers or (pending and pending[0][1].done()):
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()

    try:
        yield in_order
    finally:
        for worker in everyone:
            worker.close()
        threads.shutdown(cancel_futures=True)


# The side of the worker


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until the requests end."""
    (folder, share, language, salient, memory), _ = receive(requests)
    way = Way(load_tokenizer(folder), share, language, load_salient(salient) if salient else None, memory)
    while True:
        try:
            order, _ = receive(requests)
            documents = [document(*fields) for fields in order["documents"]]
            if order["sign"]:
                answer(answers, [sign(documents)])
                documents = [documents[place] for place in receive(requests)[0]]
        except EOFError:
            return
        try:
            arrays = [array for part in way(documents) for array in part]
        except UserError as e:
            send(answers, {"wrong": str(e)})
        else:
            answer(answers, arrays)


def answer(answers: IO[bytes], arrays: Sequence[np.ndarray]) -> None:
    kinds = {"dtypes": [array.dtype.str for array in arrays], "shapes": [array.shape for array in arrays]}
    send(answers, kinds, *(array.tobytes() for array in arrays))


def document(text: str, source: str, words: list[int] | None, second: str | None, *rest: Any) -> Document:
    """A document as JSON has it."""
    return Document(text, source, None if words is None else tuple(words), second)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who has the documents
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(1)
