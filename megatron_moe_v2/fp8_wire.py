"""FP8 rows on the wire: what a call must satisfy, what is sent, and what is made of what arrives.

A buffer for FP8 is a buffer for bfloat16 rows of the stored width: the combine and its gradient go over it in
bfloat16, and that is the larger use (see :func:`dispatch_bytes`), so that FP8 and bfloat16 layers of one width share
it. Legend: T own tokens, n received rows, H hidden, W stored width, H rounded up to 128.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .buffers.contract import align
from .errors import InputError
from .fp8 import GROUP, QuantizedRows, ScaleFormat, quantized_pair

__all__ = [
    "buffer_hidden",
    "check_gradient",
    "check_options",
    "check_tokens",
    "dispatch_bytes",
    "quantized_for_wire",
    "received_rows",
]

_CARRIED = (torch.bfloat16, torch.float32)
"""What rows are quantised from and de-quantised to."""


def buffer_hidden(hidden: int) -> int:
    """The hidden size that a buffer must be built for so that FP8 rows of ``hidden`` channels and bfloat16 rows fit."""
    return align(hidden, GROUP)


def dispatch_bytes(
    *, num_ranks: int, num_max_tokens_per_rank: int, width: int, num_scales: int, num_topk: int, element_size: int = 1
) -> int:
    """Bytes of a DeepEP V2 buffer that one dispatch takes on one NVLink domain, not rounded up.

    Args:
        width: elements of a row.
        num_scales: 4-byte scales of a row.
        element_size: 1 for FP8, 2 for bfloat16.
    """
    row = width * element_size + align(4 * num_scales, 32) + align(12 * num_topk + 4, 32)
    return num_ranks * num_max_tokens_per_rank * row


def check_options(fp8: Any, dequantize: Any, fp8_backward: Any) -> None:
    """The FP8 arguments of a dispatch, which belong together.

    Raises:
        InputError: a type that is wrong, or one that means nothing without ``fp8``.
    """
    if fp8 is not None and not isinstance(fp8, ScaleFormat):
        raise InputError("fp8", got=repr(fp8), expected="a ScaleFormat or None", fix="Pass fp8=ScaleFormat().")
    for name, value, usual in (("dequantize", dequantize, True), ("fp8_backward", fp8_backward, False)):
        if not isinstance(value, bool):
            raise InputError(name, got=repr(value), expected="True or False")
        if fp8 is None and value is not usual:
            raise InputError(f"{name}={value} without fp8", fix="Pass fp8=ScaleFormat() too.")


def check_tokens(x: Tensor) -> None:
    """Tokens that can travel in FP8.

    Raises:
        InputError: another dtype, or no channel.
    """
    if x.dtype not in _CARRIED:
        raise InputError("x of an FP8 dispatch", got=x.dtype, expected="bfloat16, or float32 on the embedded buffer")
    if not x.shape[1]:
        raise InputError("hidden of an FP8 dispatch", got=0, expected="at least 1")


def check_gradient(x: Tensor, call_fp8_backward: bool) -> None:
    """Rows of a combine whose gradient is to travel in FP8.

    Raises:
        InputError: another dtype.
    """
    if call_fp8_backward and x.dtype not in _CARRIED:
        raise InputError("x of a combine with fp8_backward", got=x.dtype, expected="bfloat16 or float32")


def quantized_for_wire(x: Tensor, format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """``[T, H]`` as the pair that a buffer dispatches; the sender's scales are row-major, as a token's are read."""
    return quantized_pair(x, replace(format, column_major=False) if format.column_major else format)


def received_rows(
    pair: tuple[Tensor, Tensor], format: ScaleFormat, tokens: Tensor, *, handed_on: bool = False
) -> QuantizedRows:
    """What a buffer delivered, with an anchor in the dtype of the sent ``tokens`` ``[T, H]``.

    Reads nothing on the device, so that it may be called before the wait. The anchor's zeros are written only for rows
    that are ``handed_on``.
    """
    data, scales = pair
    tokens = tokens.detach()
    anchor = (tokens.new_zeros if handed_on else tokens.new_empty)(()).expand(len(data), tokens.shape[1])
    return QuantizedRows(data=data, scales=scales, format=format, hidden=tokens.shape[1], anchor=anchor)
