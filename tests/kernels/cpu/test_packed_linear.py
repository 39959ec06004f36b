"""The packed product against `F.linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from symbiosis.kernels.cpu.library import panel_widths
from symbiosis.kernels.cpu.packed_linear import OneDnnWeight, PackedWeight, PanelWeight, has_one_dnn, pack

DTYPES = [torch.float32, torch.bfloat16]
Kind = Callable[[torch.Tensor, torch.Tensor | None], PackedWeight]
PANELS = [pytest.param(partial(PanelWeight, width=width), id=f"panel{width}") for width in panel_widths()]
KINDS = [*PANELS, pytest.param(OneDnnWeight, id="oneDNN")]


def make_packed(kind: Kind, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedWeight:
    if kind is OneDnnWeight and not has_one_dnn(weight_OI.dtype):
        pytest.skip("oneDNN does not support this dtype here")
    return kind(weight_OI, bias_O)


def make(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x_RI, weight_OI = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    return x_RI, weight_OI, torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 32, 257, 700])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (33, 7), (1, 130), (257, 1), (256, 48)])
@torch.inference_mode()
def test_packed_is_plain(kind: Kind, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x_RI, weight_OI, bias_O = make(rows, inputs, outputs, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for bias in (None, bias_O):
        expected = F.linear(x_RI.double(), weight_OI.double(), None if bias is None else bias.double())
        found = make_packed(kind, weight_OI, bias).linear(x_RI)
        assert found.dtype is dtype
        assert (found.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_any_layout_of_weight_and_rows(kind: Kind) -> None:
    x_RI, weight_OI, _ = make(5, 48, 20, torch.float32)
    expected = F.linear(x_RI, weight_OI)
    transposed = weight_OI.t().contiguous().t()
    torch.testing.assert_close(make_packed(kind, transposed, None).linear(x_RI), expected)
    wide = torch.zeros(5, 96)
    wide[:, :48] = x_RI
    torch.testing.assert_close(make_packed(kind, weight_OI, None).linear(wide[:, :48]), expected)
    torch.testing.assert_close(make_packed(kind, weight_OI, None).linear(x_RI.t().contiguous().t()), expected)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(kind: Kind) -> None:
    x_RI, weight_OI, _ = make(8, 64, 40, torch.float32)
    packed = make_packed(kind, weight_OI, None)
    expected = packed.linear(x_RI)
    x_RI[3] = float("nan")
    x_RI[4] = 1e38
    found = packed.linear(x_RI)
    rest = [0, 1, 2, 5, 6, 7]
    assert torch.equal(found[rest], expected[rest])


@pytest.mark.parametrize("kind", PANELS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_their_number(kind: Kind) -> None:
    x_RI, weight_OI, _ = make(300, 600, 40, torch.float32)
    packed = make_packed(kind, weight_OI, None)
    expected = packed.linear(x_RI)
    for rows in (1, 2, 3, 5, 8, 9, 100):
        assert torch.equal(packed.linear(x_RI[:rows]), expected[:rows])


def test_only_what_can_be_packed() -> None:
    assert pack(torch.zeros(2, 2, dtype=torch.float64), None) is None
    assert pack(torch.zeros(2, 2, device="meta"), None) is None
