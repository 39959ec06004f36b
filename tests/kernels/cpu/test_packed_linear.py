"""The packed product against `F.linear`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from symbiosis.kernels.cpu.packed_linear import PackedLinear, can_pack

DTYPES = [torch.float32, torch.bfloat16]


def make(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x_RI, weight_OI = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    if not can_pack(weight_OI):
        pytest.skip(f"this processor does not pack {dtype}")
    return x_RI, weight_OI, torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 32, 129, 700])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (33, 7), (1, 130), (257, 1)])
@torch.inference_mode()
def test_packed_is_plain(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x_RI, weight_OI, bias_O = make(rows, inputs, outputs, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for bias in (None, bias_O):
        expected = F.linear(x_RI.double(), weight_OI.double(), None if bias is None else bias.double())
        found = PackedLinear(weight_OI, bias)(x_RI)
        assert found.dtype is dtype
        assert (found.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@torch.inference_mode()
def test_any_layout_of_weight_and_rows() -> None:
    x_RI, weight_OI, _ = make(5, 48, 20, torch.float32)
    expected = F.linear(x_RI, weight_OI)
    transposed = weight_OI.t().contiguous().t()
    torch.testing.assert_close(PackedLinear(transposed, None)(x_RI), expected)
    wide = torch.zeros(5, 96)
    wide[:, :48] = x_RI
    torch.testing.assert_close(PackedLinear(weight_OI, None)(wide[:, :48]), expected)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    x_RI, weight_OI, _ = make(8, 64, 40, torch.float32)
    linear = PackedLinear(weight_OI, None)
    expected = linear(x_RI)
    x_RI[3] = float("nan")
    x_RI[4] = 1e38
    found = linear(x_RI)
    rest = [0, 1, 2, 5, 6, 7]
    assert torch.equal(found[rest], expected[rest])


def test_only_what_can_be_packed() -> None:
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float64))
    assert not can_pack(torch.zeros(2, 2, device="meta"))
