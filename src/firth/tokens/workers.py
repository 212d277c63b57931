"""A pool of processes that tokenize documents, with the results in the order of the documents.

The parent sends a chunk of documents through a worker's stdin and receives arrays from its stdout: JSON for values, raw
bytes for arrays, no pickle. At most `PREFETCH_CHUNKS_PER_WORKER` chunks per worker are in flight, so a slow disk never
lets the corpus pile up in memory.

Why not `concurrent.futures.ProcessPoolExecutor`? Three things it cannot do here:

- It starts processes by `fork`, which is unsafe once a tokenizer has started threads, or by `spawn`, which imports the
  user's `__main__` again: `firth.prepare(...)` in a script without `if __name__ == "__main__"` would call itself.
- Its workers outlive a killed parent, because each holds both ends of the queue's pipe. Ours read end-of-file and exit.
- Near-duplicate removal asks twice about a chunk: the worker computes MinHash signatures, the parent decides in the
  order of the corpus which documents are new, and the same worker tokenizes them. A pool would send every text twice.
"""

from __future__ import annotations

import json
import math
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

PREFETCH_CHUNKS_PER_WORKER = 2  # chunks in flight for each worker
SelectDocumentsFn = Callable[[np.ndarray], list[int]]  # MinHash signatures of documents -> indices of those to tokenize


class EncodedChunk(NamedTuple):
    """Tokenized documents, to train on and held out, and the number of documents that `select` dropped."""

    parts: tuple[TokenizedDocuments, TokenizedDocuments]
    num_dropped: int


class EncodeChunksFn(Protocol):
    """Tokenizes chunks, which are NamedTuples with a field `documents`; yields each chunk, emptied, with its arrays."""

    def __call__(
        self, chunks: Iterable[Any], select: SelectDocumentsFn | None = None
    ) -> Iterator[tuple[Any, EncodedChunk]]: ...


def encode_in_process(encoder: DocumentEncoder) -> EncodeChunksFn:
    """Return the function of `worker_pool` without workers."""

    def encode(chunks: Iterable[Any], select: SelectDocumentsFn | None = None) -> Iterator[tuple[Any, EncodedChunk]]:
        for chunk in chunks:
            documents = chunk.documents
            if select is not None:
                documents = [chunk.documents[i] for i in select(minhash_signatures(chunk.documents))]
            yield chunk._replace(documents=[]), EncodedChunk(encoder(documents), len(chunk.documents) - len(documents))

    return encode


@contextmanager
def worker_pool(encoder: DocumentEncoder, tokenizer_folder: Path, num_workers: int) -> Iterator[EncodeChunksFn]:
    """Yield a function that tokenizes chunks with `num_workers` processes, in the order of the chunks.

    One thread per worker waits for its pipe. With `select`, a worker first signs the documents of a chunk; `select` is
    called for the chunks in their order, and only the documents that it returns are tokenized.
    """
    workers = [EncodeWorker(encoder, tokenizer_folder) for _ in range(num_workers)]
    idle_workers: SimpleQueue[EncodeWorker] = SimpleQueue()
    for worker in workers:
        idle_workers.put(worker)
    threads = ThreadPoolExecutor(num_workers)

    def encode_chunk(documents: Sequence[Document], turn: SelectionTurn | None) -> EncodedChunk:
        worker = idle_workers.get()
        try:
            return worker(documents, turn)
        finally:
            idle_workers.put(worker)
            if turn is not None:
                turn.release()

    def encode(chunks: Iterable[Any], select: SelectDocumentsFn | None = None) -> Iterator[tuple[Any, EncodedChunk]]:
        pending: deque[tuple[Any, Future[EncodedChunk]]] = deque()
        turn: SelectionTurn | None = None
        for chunk in chunks:
            turn = SelectionTurn(select, turn) if select is not None else None
            pending.append((chunk._replace(documents=[]), threads.submit(encode_chunk, chunk.documents, turn)))
            while len(pending) > PREFETCH_CHUNKS_PER_WORKER * num_workers or (pending and pending[0][1].done()):
                emptied, future = pending.popleft()
                yield emptied, future.result()
        while pending:
            emptied, future = pending.popleft()
            yield emptied, future.result()

    try:
        yield encode
    finally:
        for worker in workers:
            worker.close()
        threads.shutdown(cancel_futures=True)


class SelectionTurn:
    """Calls `select` for a chunk after the chunk before it, whichever was signed first."""

    def __init__(self, select: SelectDocumentsFn, previous: SelectionTurn | None) -> None:
        self.select = select
        self.previous = previous.finished if previous else None
        self.finished: Future[None] = Future()

    def __call__(self, signatures: np.ndarray) -> list[int]:
        if self.previous is not None:
            self.previous.result()
        selected = self.select(signatures)
        self.finished.set_result(None)
        return selected

    def release(self) -> None:
        """Cancel the turn if its chunk failed before it, so that later chunks fail instead of waiting forever."""
        self.finished.cancel()


class EncodeWorker:
    """A process that tokenizes, and the pipes to it. It exits when this process does, even when that is killed."""

    def __init__(self, encoder: DocumentEncoder, tokenizer_folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",  # a worker uses one core
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-c", "from firth.tokens.workers import worker_main; worker_main()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        salient = None if encoder.find_salient is None else salient_finder_name(encoder.find_salient)
        self._send(
            (str(tokenizer_folder.absolute()), encoder.held_out_share, encoder.language, salient, encoder.cache_bytes)
        )

    def __call__(self, documents: Sequence[Document], select: SelectDocumentsFn | None = None) -> EncodedChunk:
        """Tokenize all documents, or those that `select` chooses by their signatures."""
        self._send((documents, select is not None))
        num_dropped = 0
        if select is not None:
            selected = select(self._receive()[0])
            num_dropped = len(documents) - len(selected)
            self._send(selected)
        arrays = self._receive()
        half = len(arrays) // 2
        return EncodedChunk((TokenizedDocuments(*arrays[:half]), TokenizedDocuments(*arrays[half:])), num_dropped)

    def _send(self, message: Any) -> None:
        try:
            send_message(self.process.stdin, message)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise self._exit_error() from None

    def _receive(self) -> list[np.ndarray]:
        try:
            error, arrays = receive_message(self.process.stdout)  # type: ignore[arg-type]
        except EOFError:
            raise self._exit_error() from None
        if error is not None:
            raise UserError(error)
        return arrays

    def _exit_error(self) -> UserError:
        code = self.process.wait()
        return UserError(
            f"A tokenizing process died (exit code {code}; -9 often means that memory ran out). The work so far is "
            "saved: run the command again with --resume, and with fewer --workers or a --max-memory."
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # bytes that the worker had not read
                pipe.close()  # type: ignore[union-attr]


def send_message(pipe: IO[bytes], value: Any, arrays: Sequence[np.ndarray] = ()) -> None:
    """Write a JSON value and arrays: the length of a JSON header, the header, the bytes of each array."""
    layouts = [(array.dtype.str, array.shape) for array in arrays]
    header = json.dumps([value, layouts], ensure_ascii=False).encode("utf-8", "surrogatepass")
    pipe.write(struct.pack("<Q", len(header)) + header)
    for array in arrays:
        pipe.write(array.tobytes())
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> tuple[Any, list[np.ndarray]]:
    """Return the next value and its arrays; EOFError if the other side is gone."""
    header = read_exactly(pipe, *struct.unpack("<Q", read_exactly(pipe, 8)))
    value, layouts = json.loads(header.decode("utf-8", "surrogatepass"))
    sizes = [np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layouts]
    return value, [
        np.frombuffer(read_exactly(pipe, size), dtype).reshape(shape)
        for size, (dtype, shape) in zip(sizes, layouts, strict=True)
    ]


def read_exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


# --- in the worker ------------------------------------------------------------------------------------------------


def worker_main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which closes the pipes
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write into the responses
    try:
        serve_requests(sys.stdin.buffer, responses)
    except BrokenPipeError:
        os._exit(1)


def serve_requests(requests: IO[bytes], responses: IO[bytes]) -> None:
    """Respond to chunks of documents until the pipe ends."""
    (folder, held_out_share, language, salient, cache_bytes), _ = receive_message(requests)
    find_salient = load_salient_finder(salient) if salient else None
    encoder = DocumentEncoder(load_tokenizer(folder), held_out_share, language, find_salient, cache_bytes)
    while True:
        try:
            (rows, selects), _ = receive_message(requests)
            documents = [
                Document(text, source, None if starts is None else tuple(starts), text_pair)
                for text, source, starts, text_pair in rows
            ]
            if selects:
                send_message(responses, None, [minhash_signatures(documents)])
                documents = [documents[i] for i in receive_message(requests)[0]]
        except EOFError:
            return
        try:
            send_message(responses, None, [array for part in encoder(documents) for array in part])
        except UserError as e:
            send_message(responses, str(e))
