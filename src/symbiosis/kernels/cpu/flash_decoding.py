"""Decode attention over a long KV cache in host memory, by all cores: one query token for each sequence.

The kernel splits the context among the cores (flash decoding) and reads each key and value once, for all query heads of its
key head. Numbers of the cache are float32, bfloat16, or int8 with a scale for each token and head.

B = sequences, H = query heads, K = key heads, T = tokens of the cache, D = width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import symbol

_COLUMNS = 16  # as in flash_decoding.c
_TILE = 32
_TASKS_PER_THREAD = 16  # so that cores of unequal speed end together
_MIN_SPLIT = 512
_QUERY_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass(frozen=True, slots=True)
class KVRange:
    """Keys and values of one layer, and the tokens of each sequence that are attended to.

    Only the numbers of a head need to be contiguous, and the scales of a head's tokens.
    """

    keys_BKTD: Tensor
    values_BKTD: Tensor
    starts: Sequence[int]
    ends: Sequence[int]
    key_scales_BKT: Tensor | None = None
    """Of an int8 cache: a number is its int8 times the scale of its token and head. float32."""
    value_scales_BKT: Tensor | None = None

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.ends) == len(self.keys_BKTD)
        length = self.keys_BKTD.shape[2]
        assert all(0 <= start < end <= length for start, end in zip(self.starts, self.ends, strict=True)), "no tokens"


def fits(q_BHD: Tensor, kv: KVRange) -> bool:
    """Whether the kernel supports these."""
    keys, values, width = kv.keys_BKTD, kv.values_BKTD, q_BHD.shape[2]
    scales = (kv.key_scales_BKT, kv.value_scales_BKT)
    has_scales = all(each is not None and each.dtype is torch.float32 and each.stride(2) == 1 for each in scales)
    return (
        width % _COLUMNS == 0
        and keys.shape == values.shape
        and keys.shape[3] == width
        and q_BHD.shape[1] % keys.shape[1] == 0
        and q_BHD.dtype in _QUERY_KINDS
        and keys.dtype in _KINDS
        and values.dtype is keys.dtype
        and has_scales == (keys.dtype is torch.int8)
        and (not has_scales or scales[0].stride() == scales[1].stride())  # type: ignore[union-attr]
        and all(each.device.type == "cpu" and each.stride(-1) == 1 for each in (q_BHD, keys, values))
        and symbol("flash_decoding") is not None
    )


class _Args(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_int64)
            for name in (
                *("sequences", "key_heads", "group", "width", "split"),
                *("q_sequence", "q_head", "k_sequence", "k_head", "k_token", "v_sequence", "v_head", "v_token"),
                *("scale_sequence", "scale_head", "q_kind", "kv_kind"),
            )
        ]
        + [
            (name, ctypes.c_void_p)
            for name in ("starts", "ends", "first_tasks", "q", "keys", "values", "key_scales", "value_scales", "out", "partial")
        ]
        + [(name, ctypes.c_float) for name in ("scale", "cap")]
    )


def attend(q_BHD: Tensor, kv: KVRange, *, scale: float, cap: float | None = None) -> Tensor:
    """The attention of each query, [B, H, D], in the queries' dtype. The plain reference where the kernel does not fit."""
    if not fits(q_BHD, kv):
        return attend_reference(q_BHD, kv, scale=scale, cap=cap)
    batch, heads, width = q_BHD.shape
    keys, values, threads = kv.keys_BKTD, kv.values_BKTD, torch.get_num_threads()
    key_heads = keys.shape[1]
    split, first_tasks = _split_tokens([end - start for start, end in zip(kv.starts, kv.ends, strict=True)], key_heads, threads)
    numbers = torch.tensor([*kv.starts, *kv.ends, *first_tasks])
    partial = torch.empty(first_tasks[-1] * (heads // key_heads) * (2 * width + 2))
    out_BHD = torch.empty(batch, heads, width, dtype=q_BHD.dtype)
    scales = kv.key_scales_BKT
    address = numbers.data_ptr()
    args = _Args(
        *(batch, key_heads, heads // key_heads, width, split),
        *(q_BHD.stride(0), q_BHD.stride(1), *keys.stride()[:3], *values.stride()[:3]),
        *((0, 0) if scales is None else scales.stride()[:2]),
        *(_QUERY_KINDS[q_BHD.dtype], _KINDS[keys.dtype]),
        *(address, address + 8 * batch, address + 16 * batch),
        *(q_BHD.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(None if each is None else each.data_ptr() for each in (scales, kv.value_scales_BKT)),
        *(out_BHD.data_ptr(), partial.data_ptr()),
        *(scale, cap or 0.0),
    )
    symbol("flash_decoding")(ctypes.byref(args), threads)
    return out_BHD


def attend_reference(q_BHD: Tensor, kv: KVRange, *, scale: float, cap: float | None = None) -> Tensor:
    """The same by plain products, one sequence after the other."""
    found = []
    for index, (start, end) in enumerate(zip(kv.starts, kv.ends, strict=True)):
        k_KTD, v_KTD = kv.keys_BKTD[index, :, start:end].float(), kv.values_BKTD[index, :, start:end].float()
        if kv.key_scales_BKT is not None and kv.value_scales_BKT is not None:
            k_KTD = k_KTD * kv.key_scales_BKT[index, :, start:end, None]
            v_KTD = v_KTD * kv.value_scales_BKT[index, :, start:end, None]
        q_KGD = q_BHD[index].float().reshape(k_KTD.shape[0], -1, q_BHD.shape[2])
        scores_KGT = q_KGD @ k_KTD.transpose(1, 2) * scale
        if cap:
            scores_KGT = cap * torch.tanh(scores_KGT / cap)
        found.append((scores_KGT.softmax(-1) @ v_KTD).flatten(0, 1).to(q_BHD.dtype))
    return torch.stack(found)


def read_memory(memory: Tensor) -> int:
    """Read all of it once, with all cores, and return a sum: the time that any kernel over it takes at least."""
    kernel = symbol("read_memory")
    assert kernel is not None, "the kernels are not compiled"
    kernel.restype = ctypes.c_uint64
    return int(kernel(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes), torch.get_num_threads()))


def _split_tokens(lengths: Sequence[int], key_heads: int, threads: int) -> tuple[int, list[int]]:
    """Tokens of a task, in whole tiles, and the first task of each sequence with the number of all."""
    share = sum(lengths) * key_heads // (threads * _TASKS_PER_THREAD) + 1
    split = -(-max(share, _MIN_SPLIT) // _TILE) * _TILE
    return split, list(accumulate((key_heads * -(-length // split) for length in lengths), initial=0))
