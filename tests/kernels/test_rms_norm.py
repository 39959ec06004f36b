"""The kernel against its plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.rms_norm import fits, rms_norm
from symbiosis.kernels.rms_norm_reference import rms_norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (1, 3, 4096), (2, 5, 4, 64)])
def test_as_the_reference(shape, dtype, twice):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, device=DEVICE).to(dtype), torch.rand(shape[-1], device=DEVICE).to(dtype)
    found, expected = rms_norm(x, weight, 1e-6, twice=twice), rms_norm_reference(x, weight, 1e-6, twice=twice)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if dtype is torch.bfloat16:
        assert (found != expected).float().mean() < 0.01  # rounded at the same places


def test_rows_within_wider_rows_and_unsupported_strides():
    wide, weight = torch.randn(6, 96, device=DEVICE), torch.rand(32, device=DEVICE)
    part = wide[:, 32:64]
    assert fits(part, weight)
    torch.testing.assert_close(rms_norm(part, weight, 1e-5, twice=True), rms_norm_reference(part, weight, 1e-5, twice=True))
    assert not fits(wide.T[:, :4], weight)
    assert not fits(wide.view(2, 3, 96).transpose(0, 1)[..., :32], weight)


def test_a_nan_stays_in_its_row():
    x, weight = torch.randn(4, 64, device=DEVICE), torch.rand(64, device=DEVICE)
    x[2, 5] = float("nan")
    found = rms_norm(x, weight, 1e-5, twice=True)
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (1, 3, 4096)])
def test_gradients_are_the_references(shape, dtype, twice):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, device=DEVICE).to(dtype), torch.rand(shape[-1], device=DEVICE).to(dtype)
    upstream, found = torch.randn(shape, device=DEVICE).to(dtype), []
    for norm in (rms_norm, rms_norm_reference):
        mine = x.clone().requires_grad_()
        norm(mine, weight, 1e-6, twice=twice).backward(upstream)
        found.append(mine.grad)
    torch.testing.assert_close(*found, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


def test_rows_that_begin_anywhere_after_rows_that_are_aligned():
    """A cached launch for aligned rows is not used for others, nor for other strides."""
    flat, weight = torch.randn(4 * 64 + 8, device=DEVICE), torch.rand(64, device=DEVICE)
    for offset, rows, stride in ((0, 4, 64), (1, 4, 64), (0, 2, 66), (3, 1, 1), (0, 4, 64)):
        x = flat.as_strided((rows, 64), (stride, 1), offset)
        for _ in range(2):
            torch.testing.assert_close(rms_norm(x, weight, 1e-5, twice=True), rms_norm_reference(x, weight, 1e-5, twice=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="streams")
def test_a_kernel_with_pdl_waits_for_a_copy():
    """With PDL a kernel begins before the previous one has ended; a copy is no kernel."""
    weight = torch.rand(4096, device=DEVICE)
    source = torch.zeros(8192, 4096, device=DEVICE)
    for number in range(1, 50):
        source.fill_(0.1 * number)
        copied = source.clone()
        found = rms_norm(copied[-64:], weight, 1e-5, twice=False)
        del copied
        torch.testing.assert_close(found, rms_norm_reference(source[-64:], weight, 1e-5, twice=False), rtol=1e-5, atol=1e-5)
