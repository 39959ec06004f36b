"""The kernel against its plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import math
import os
import random

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels import token_draw, token_draw_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
WIDTHS = (7, 1001, 5000, 50_257, 128_256) if DEVICE == "cuda" else (7, 300)


def arguments(width: int, seed: int, spread: float, dtype: torch.dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = (torch.randn(12, width) * spread).to(dtype)
    logits[3] = math.nan
    logits[4] = -math.inf
    logits[5, width // 2] = math.inf
    logits[6, ::2] = -math.inf
    rows = rng.sample(range(12), 9)
    floats = [
        (
            rng.choice([0.3, 1.0, 2.0]),
            rng.choice([-math.inf, -math.inf, math.log(0.05)]),
            rng.choice([1.0, 1.0, 0.9, 0.5, 1e-9]),
        )
        for _ in rows
    ]
    integers = [
        (rng.randrange(-(2**31), 2**31), rng.randrange(-(2**31), 2**31) | 1, rng.choice([0, 0, 1, 5, 50, 10**6])) for _ in rows
    ]
    made = (
        logits, torch.tensor(rows), logits.amax(-1), torch.tensor(floats, dtype=torch.float64),
        torch.tensor(integers, dtype=torch.int32),
    )  # fmt: skip
    return [each.to(DEVICE) for each in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("width", WIDTHS)
def test_draws_as_the_reference(width: int, dtype: torch.dtype):
    """But for rounding at the border of top-p. Float16 has many equal logits."""
    different = total = 0
    for seed in range(20 if DEVICE == "cuda" else 6):
        inputs = arguments(width, seed, (0.1, 3.0, 30.0)[seed % 3], dtype)
        found, expected = token_draw.draw(*inputs), token_draw_reference.draw(*inputs)
        different, total = different + (found != expected).sum().item(), total + len(found)
    assert different <= total // 100


def test_no_rows_and_strided_logits():
    logits, rows, best, floats, integers = arguments(300, 1, 3.0, torch.float32)
    assert token_draw.draw(logits, rows[:0], best, floats[:0], integers[:0]).tolist() == []
    wide = torch.zeros(12, 700, device=DEVICE)
    wide[:, :300] = logits
    expected = token_draw.draw(logits, rows, best, floats, integers)
    assert torch.equal(token_draw.draw(wide[:, :300], rows, best, floats, integers), expected)
