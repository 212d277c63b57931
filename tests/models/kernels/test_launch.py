"""Triton kernels compile in threads while a step is traced; a launch waits for its kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from threading import Event
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from firth.models.kernels import launch as launching
from firth.models.kernels.launch import kernel_op, launch


class Kernel:
    """Records in order what it was compiled for and launched with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.go, self.error, self.ready = Event(), error, 0

    def warmup(self, *kinds: Any, grid: tuple[int, ...], **made_for: Any) -> Kernel:
        self.go.wait(300)
        self.calls.append((kinds, made_for))
        if self.error:
            raise self.error
        return self

    @property
    def run(self) -> None:
        """Triton creates the launcher on first access."""
        self.ready += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **made_for: self.calls.append((grid, made_for))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launching, "_compile_keys", set())
    yield
    assert not launching._pending_compiles


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("error", [None, ValueError("no such kernel")])
def test_a_kernel_is_compiled_once_and_then_launched(error: Exception | None) -> None:
    kernel = Kernel(error)
    for _ in range(3):  # layers that are alike
        launch(kernel, (4,), fake(2, 3), 6, fake(1, dtype=torch.float32), BLOCK=64)
    launch(kernel, (4,), fake(2, 3), 7, fake(1, dtype=torch.float32), BLOCK=64)
    assert kernel.calls == [], "who traces does not wait"
    kernel.go.set()
    launch(kernel, (4,), torch.zeros(2, 3), 6, torch.zeros(1), BLOCK=64)
    made_for = {"BLOCK": 64}
    compiled = [((torch.bfloat16, number, torch.float32), made_for) for number in (6, 7)]
    assert sorted(kernel.calls[:2], key=lambda calls: calls[0][1]) == compiled
    assert kernel.calls[2:] == [((4,), made_for)], "only now, and although it could not be compiled beforehand"
    assert kernel.ready == (0 if error else 2)


def test_nothing_is_compiled_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launching, "_compile_keys", set())
    launch(Kernel(), (1,), fake(2))
    assert not launching._compile_keys
    assert not launching._pending_compiles


def test_one_function_is_kernel_and_fake_kernel() -> None:
    kinds_seen = []

    @kernel_op("firth_test::twice_as_wide")
    def twice_as_wide(x: torch.Tensor) -> torch.Tensor:
        kinds_seen.append(type(x).__name__)
        return torch.cat([x, x], 1)

    assert twice_as_wide(torch.ones(2, 3)).shape == (2, 6)
    assert twice_as_wide(fake(2, 3)).shape == (2, 6)
    assert kinds_seen == ["Tensor", "FakeTensor"]
    assert torch.compile(twice_as_wide, backend="aot_eager")(torch.ones(2, 5)).shape == (2, 10)
