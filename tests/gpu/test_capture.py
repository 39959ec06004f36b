"""Threads that capture or synchronize the device do not break each other. A failed capture leaves no state behind."""

from __future__ import annotations

import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from symbiosis.gpu.cuda_graph import capture
from symbiosis.gpu.driver import synchronized

pytestmark = pytest.mark.gpu


def test_the_device_is_not_synchronized_during_a_capture():
    device = torch.device("cuda", 0)
    over, errors, waits = threading.Event(), [], []

    def wait() -> None:
        x = torch.ones(256, 256, device=device)
        try:
            while not over.is_set():
                x = x @ x / 256
                with synchronized(device):
                    torch.cuda.empty_cache()
                waits.append(1)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            x, pool = torch.ones(64, 64, device=device), torch.cuda.graph_pool_handle()
            _ = x @ x  # initializes cuBLAS, which cannot happen during a capture
            for _ in range(50):
                graph, found = capture(lambda: sum(x @ x for _ in range(20)), pool)
                graph.replay()
                torch.cuda.current_stream(device).synchronize()
                assert found[0, 0].item() == 64 * 20
    finally:
        over.set()
        thread.join()
    assert not errors
    assert waits


@pytest.mark.parametrize("fail", [torch.cuda.synchronize, lambda: 1 / 0], ids=["the driver", "Python"])
def test_after_a_failed_capture_random_numbers_and_captures_work(fail):
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        x = torch.ones(64, 64, device=device)
        _ = x @ x

        def compute() -> torch.Tensor:
            y = x @ x
            fail()
            return y

        with pytest.raises((RuntimeError, ZeroDivisionError)):
            capture(compute, torch.cuda.graph_pool_handle())
        assert torch.randn(1 << 20, device=device).isfinite().all()
        graph, found = capture(lambda: x @ x, torch.cuda.graph_pool_handle())
        graph.replay()
        assert found[0, 0].item() == 64


def test_failed_captures_release_their_memory():
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream(device)):

        def compute() -> None:
            _ = torch.empty(1 << 28, dtype=torch.uint8, device=device)
            torch.cuda.synchronize()

        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        for _ in range(4):
            with pytest.raises(RuntimeError):
                capture(compute, torch.cuda.graph_pool_handle())
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(device) < before + (1 << 28)
