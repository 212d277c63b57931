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

from firth.core.errors import UserError
from firth.text import Document, load_salient_finder, salient_finder_name
from firth.tokens.dedup import minhash_signatures
from firth.tokens.encode import DocumentEncoder, TokenizedDocuments
from firth.tokens.tokenizer import load_tokenizer

PREFETCH_CHUNKS_PER_WORKER = 2  # chunks for each worker that are read before they are asked for
SelectDocumentsFn = Callable[[np.ndarray], list[int]]  # the signatures of some documents -> which of them are wanted


class EncodedChunk(NamedTuple):
    """Some documents as arrays, to train on and held out, without those that were not wanted."""

    parts: tuple[TokenizedDocuments, TokenizedDocuments]
    num_dropped: int


class EncodeChunksFn(Protocol):
    """Tokenises chunks, each a tuple with the field `documents`, and gives them back without these."""

    def __call__(
        self, chunks: Iterable[Any], select: SelectDocumentsFn | None = None
    ) -> Iterator[tuple[Any, EncodedChunk]]: ...


# A message is a header as JSON, and bytes


def send_message(pipe: IO[bytes], header: Any, *blobs: bytes | memoryview) -> None:
    head = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    pipe.write(struct.pack("<II", len(head), len(blobs)))
    pipe.write(head)
    for blob in blobs:
        pipe.write(struct.pack("<Q", len(blob)))
        pipe.write(blob)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> tuple[Any, list[bytes]]:
    """The next message; EOFError where there is none."""
    size, count = struct.unpack("<II", read_exactly(pipe, 8))
    header = json.loads(read_exactly(pipe, size).decode("utf-8", "surrogatepass"))
    return header, [read_exactly(pipe, struct.unpack("<Q", read_exactly(pipe, 8))[0]) for _ in range(count)]


def read_exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The side of the one who has the documents


class EncodeWorker:
    """One process, and the pipes to it. It ends by itself when this process is gone, however that went."""

    def __init__(self, encoder: DocumentEncoder, tokenizer_folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",  # a worker is one core
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-c", "from firth.tokens.workers import worker_main; worker_main()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        salient = None if encoder.find_salient is None else salient_finder_name(encoder.find_salient)
        self._send(
            [str(tokenizer_folder.absolute()), encoder.held_out_share, encoder.language, salient, encoder.cache_bytes]
        )

    def __call__(self, documents: Sequence[Document], select: SelectDocumentsFn | None = None) -> EncodedChunk:
        """Tokenise all documents, or have them signed first and then tokenise those that are wanted."""
        self._send({"documents": documents, "sign": select is not None})
        dropped = 0
        if select is not None:
            wanted = select(self._receive()[0])
            dropped = len(documents) - len(wanted)
            self._send(wanted)
        arrays = self._receive()
        half = len(arrays) // 2
        return EncodedChunk((TokenizedDocuments(*arrays[:half]), TokenizedDocuments(*arrays[half:])), dropped)

    def _receive(self) -> list[np.ndarray]:
        try:
            header, blobs = receive_message(self.process.stdout)  # type: ignore[arg-type]
        except EOFError:
            raise self._exit_error() from None
        if "wrong" in header:
            raise UserError(header["wrong"])
        kinds = zip(blobs, header["dtypes"], header["shapes"], strict=True)
        return [np.frombuffer(blob, dtype).reshape(shape) for blob, dtype, shape in kinds]

    def _send(self, header: Any) -> None:
        try:
            send_message(self.process.stdin, header)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise self._exit_error() from None

    def _exit_error(self) -> UserError:
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


class SelectionTurn:
    """A chunk's turn to decide what of it is wanted: after the chunk before it, whoever has signed them first."""

    def __init__(self, select: SelectDocumentsFn, previous: SelectionTurn | None) -> None:
        self.select = select
        self.previous = previous.finished if previous else None
        self.finished: Future[None] = Future()

    def __call__(self, signatures: np.ndarray) -> list[int]:
        if self.previous is not None:
            self.previous.result()
        wanted = self.select(signatures)
        self.finished.set_result(None)
        return wanted

    def release(self) -> None:
        """Let nobody wait for this turn any more. If it was not taken, those after it cannot be taken either."""
        self.finished.cancel()


def encode_in_process(encoder: DocumentEncoder) -> EncodeChunksFn:
    """As `worker_pool`, in this process."""

    def in_order(chunks: Iterable[Any], select: SelectDocumentsFn | None = None) -> Iterator[tuple[Any, EncodedChunk]]:
        for chunk in chunks:
            wanted = (
                chunk.documents
                if select is None
                else [chunk.documents[i] for i in select(minhash_signatures(chunk.documents))]
            )
            yield chunk._replace(documents=[]), EncodedChunk(encoder(wanted), len(chunk.documents) - len(wanted))

    return in_order


@contextmanager
def worker_pool(encoder: DocumentEncoder, tokenizer_folder: Path, num_workers: int) -> Iterator[EncodeChunksFn]:
    """A function like `map(way, chunks)`, done by so many processes; the results come in the order of the chunks.

    With `select` each document is signed first, and of each chunk, in their order, only what is wanted is tokenised.
    """
    free: SimpleQueue[EncodeWorker] = SimpleQueue()
    everyone = [EncodeWorker(encoder, tokenizer_folder) for _ in range(num_workers)]
    for worker in everyone:
        free.put(worker)
    threads = ThreadPoolExecutor(num_workers)

    def work(documents: Sequence[Document], turn: SelectionTurn | None) -> EncodedChunk:
        worker = free.get()
        try:
            return worker(documents, turn)
        finally:
            free.put(worker)
            if turn is not None:
                turn.release()

    def in_order(chunks: Iterable[Any], select: SelectDocumentsFn | None = None) -> Iterator[tuple[Any, EncodedChunk]]:
        pending: deque[tuple[Any, Future[EncodedChunk]]] = deque()
        turn: SelectionTurn | None = None
        for chunk in chunks:
            turn = SelectionTurn(select, turn) if select is not None else None
            pending.append((chunk._replace(documents=[]), threads.submit(work, chunk.documents, turn)))
            while len(pending) > PREFETCH_CHUNKS_PER_WORKER * num_workers or (pending and pending[0][1].done()):
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


def serve_requests(requests: IO[bytes], responses: IO[bytes]) -> None:
    """Answer until the requests end."""
    (folder, share, language, salient, memory), _ = receive_message(requests)
    way = DocumentEncoder(
        load_tokenizer(folder), share, language, load_salient_finder(salient) if salient else None, memory
    )
    while True:
        try:
            order, _ = receive_message(requests)
            documents = [document_from_json(*fields) for fields in order["documents"]]
            if order["sign"]:
                send_arrays(responses, [minhash_signatures(documents)])
                documents = [documents[place] for place in receive_message(requests)[0]]
        except EOFError:
            return
        try:
            arrays = [array for part in way(documents) for array in part]
        except UserError as e:
            send_message(responses, {"wrong": str(e)})
        else:
            send_arrays(responses, arrays)


def send_arrays(responses: IO[bytes], arrays: Sequence[np.ndarray]) -> None:
    kinds = {"dtypes": [array.dtype.str for array in arrays], "shapes": [array.shape for array in arrays]}
    send_message(responses, kinds, *(array.tobytes() for array in arrays))


def document_from_json(
    text: str, source: str, word_starts: list[int] | None, second_text: str | None, *rest: Any
) -> Document:
    """A document as JSON has it."""
    return Document(text, source, None if word_starts is None else tuple(word_starts), second_text)


def worker_main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who has the documents
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        serve_requests(sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(1)
