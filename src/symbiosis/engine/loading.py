"""An adapter as the engine computes with it: in its dtype, on its device, what can be worked out before worked out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters.parts import Adapter, LowRank, Part, Scaling, Tokens, Whole
from symbiosis.engine.bank import Loaded, Low, Own, Rows, Scale, Virtual
from symbiosis.engine.bank import Part as Computed
from symbiosis.errors import UnsupportedAdapter


def load(adapter: Adapter, model: PreTrainedModel) -> Loaded:
    """Raises `UnsupportedAdapter` if a part acts on a module that no adapter can act on here."""
    parts = {path: tuple(_computed(path, part, model) for part in found) for path, found in adapter.parts.items()}
    return Loaded(adapter.hash, parts, _virtual(adapter, model))


def _virtual(adapter: Adapter, model: PreTrainedModel) -> Virtual | None:
    if adapter.prefix is not None:
        keys, values = (
            t.to(model.device, model.dtype).transpose(1, 2) for t in (adapter.prefix.keys_LHTD, adapter.prefix.values_LHTD)
        )
        return Virtual(keys.shape[1], keys_LTKD=keys, values_LTKD=values)
    if adapter.prompt is not None:
        rows = adapter.prompt.embeddings_TD.to(model.device, model.dtype)
        return Virtual(len(rows), embeddings_TD=rows)
    return None


def _computed(path: str, part: Part, model: PreTrainedModel) -> Computed:
    module = model.get_submodule(path)
    if not isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        raise UnsupportedAdapter(
            f"{path} is a {type(module).__name__}: the engine applies adapters to linear layers and embeddings"
        )
    weight: Any = module.weight
    if isinstance(part, LowRank):
        return _low(part, weight.T if isinstance(module, Conv1D | nn.Embedding) else weight)
    if isinstance(part, Scaling):
        return Scale(part.vector.to(weight), part.of_input)
    if isinstance(part, Tokens):
        return Rows(torch.tensor(part.ids, device=weight.device), part.rows_TD.to(weight))
    assert isinstance(part, Whole), part
    own = weight if part.weight is None else part.weight.to(weight)
    bias = getattr(module, "bias", None) if part.bias is None else part.bias.to(weight)
    return Own(own.T if isinstance(module, Conv1D) else own, bias)


def _low(part: LowRank, weight_OI: Tensor) -> Low:
    a_RI, b_OR = part.a_RI.to(weight_OI.device).float(), part.b_OR.to(weight_OI.device).float()
    stretch = None
    if part.magnitude_O is not None:
        length_O = torch.cat(
            [  # a few rows at a time: the whole in float32 may be large
                torch.linalg.norm(rows.float() + part.scale * (b @ a_RI), dim=1)
                for rows, b in zip(torch.split(weight_OI, 1024), torch.split(b_OR, 1024), strict=True)
            ]
        )
        stretch = (part.magnitude_O.to(length_O).float() / length_O).to(weight_OI.dtype)
    bias = None if part.bias_O is None else (part.scale * part.bias_O.float()).to(weight_OI)
    return Low(a_RI.T.to(weight_OI.dtype).contiguous(), (part.scale * b_OR.T).to(weight_OI.dtype).contiguous(), bias, stretch)
