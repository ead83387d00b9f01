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
    """Whether the grouped product works forward and backward here, also with empty groups and no rows at all.

    The first call tries it; make that outside of inference mode, checkpoints and captures.
    """
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
        rows_per_expert: integer ``[L]``, sums to P or less; on the device of ``rows`` (static shapes) the grouped
            product takes it without a host synchronisation.

    Returns:
        ``[P, O]``, dtype of ``rows``; rows beyond the sum are not to be read. Both operands have a gradient also where
        P is 0.
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
    counts = rows_per_expert.tolist()
    *groups, rest = rows.split([*counts, len(rows) - sum(counts)])
    products = [group @ matrix for group, matrix in zip(groups, weight, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weight.shape[2])])


def _dense(grad: Tensor) -> Tensor:
    """The grouped product's backward reads strides, and refuses those of an expanded gradient (a sum's, say)."""
    return grad.clone(memory_format=torch.contiguous_format) if 0 in grad.stride() else grad
