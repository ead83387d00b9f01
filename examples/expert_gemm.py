"""Matrix products of several experts over rows that are grouped by expert.

PyTorch's own grouped matrix product does it in one kernel where it supports device, dtype and strides; elsewhere a
loop over experts does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GroupedMM = Callable[..., Tensor]


def native_grouped_mm() -> GroupedMM | None:
    """``torch.nn.functional.grouped_mm``, its older private name, or None."""
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@functools.cache
def runs_native(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the grouped product works forward and backward here, also with empty groups and no rows at all."""
    grouped_mm = native_grouped_mm()
    if grouped_mm is None:
        return False
    try:
        for counts in ((3, 0, 2), (0, 0, 0)):
            rows = torch.ones(sum(counts), 16, device=device_type, dtype=dtype, requires_grad=True)
            weight = torch.ones(3, 16, 16, device=device_type, dtype=dtype, requires_grad=True)
            ends = torch.tensor(counts, device=device_type).cumsum(0).to(torch.int32)
            out = grouped_mm(rows, weight, offs=ends)
            grads = torch.autograd.grad(out, (rows, weight), torch.ones_like(out))
            expected = torch.tensor(counts, device=device_type, dtype=dtype)
            if not torch.equal(grads[1], expected.view(3, 1, 1).expand_as(weight)):
                return False
    except RuntimeError:
        return False
    return True


def grouped_linear(rows: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    """Multiply each group of rows with its expert's matrix.

    Args:
        rows: ``[P, I]``, grouped by expert.
        weight: ``[L, I, O]``; cast to the dtype of ``rows``.
        rows_per_expert: CPU int64 ``[L]``, sums to P.

    Returns:
        ``[P, O]``, dtype of ``rows``. Both operands have a gradient also where P is 0.
    """
    weight = weight.to(rows.dtype)
    grouped_mm = native_grouped_mm()
    whole_vectors = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    if grouped_mm is not None and whole_vectors and runs_native(rows.device.type, rows.dtype):
        ends = rows_per_expert.cumsum(0).to(device=rows.device, dtype=torch.int32)
        out = grouped_mm(rows, weight, offs=ends)
        if out.requires_grad:
            out.register_hook(_dense)
        return out
    groups = rows.split(rows_per_expert.tolist())
    return torch.cat([group @ matrix for group, matrix in zip(groups, weight, strict=True)])


def _dense(grad: Tensor) -> Tensor:
    """The grouped product's backward reads strides, and refuses those of an expanded gradient (a sum's, say)."""
    return grad.clone(memory_format=torch.contiguous_format) if 0 in grad.stride() else grad
