"""The kernel against its plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.cross_entropy import cross_entropy, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 300), (3, 4096), (7, 5001), (0, 64)])
def test_losses_and_gradients_are_those_of_the_reference(rows: int, width: int, dtype: torch.dtype):
    torch.manual_seed(rows)
    logits = (4 * torch.randn(rows, width, device=DEVICE)).to(dtype).requires_grad_()
    labels = torch.randint(0, width, (rows,), device=DEVICE)
    labels[1::3] = -100
    upstream = torch.rand(rows, device=DEVICE)
    grads = []
    for compute in (cross_entropy(logits, labels), reference(logits, labels, -100)):
        logits.grad = None
        compute.backward(upstream)
        grads.append(logits.grad.float())
    torch.testing.assert_close(cross_entropy(logits, labels), reference(logits, labels, -100), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*grads, rtol=8e-3, atol={torch.float32: 1e-6}.get(dtype, 1e-3))


def test_strided_logits_and_infinities():
    logits = torch.randn(6, 80, device=DEVICE)[::2, :70]
    logits[0, 3], logits[1, :] = float("-inf"), float("nan")
    labels = torch.tensor([5, 6, 7], device=DEVICE)
    torch.testing.assert_close(cross_entropy(logits, labels), reference(logits, labels, -100), equal_nan=True)


def test_the_loss_of_a_label_outside_the_vocabulary_is_nan():
    losses = cross_entropy(torch.randn(3, 50, device=DEVICE), torch.tensor([50, -5, 1 << 40], device=DEVICE))
    assert losses.isnan().all()
