"""Triton kernels, each with its plain reference."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def run_on(device: torch.device) -> bool:
    """Whether kernels run there: on GPUs, if Triton is installed; on a CPU with Triton's interpreter (TRITON_INTERPRET)."""
    return find_spec("triton") is not None and (device.type == "cuda" or "TRITON_INTERPRET" in os.environ)
