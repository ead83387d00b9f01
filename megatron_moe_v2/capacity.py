"""Whether a rollout's batches fit under the ceilings, said before weights are loaded.

The check of the rows in each call stays authoritative; this one only comes in time to change a setting.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import CapacityError, InputError
from .settings import name_of, read

__all__ = ["check_capacity"]


def check_capacity(
    *,
    prefill_rows: int = 0,
    decode_max_batch: int | Sequence[int] = 0,
    running_requests: int = 0,
    dp_size: int = 1,
    speculative_width: int = 1,
    sequence_parallel: int = 1,
    max_tokens_per_rank: int | None = None,
    decode_max_tokens_per_rank: int | None = None,
) -> None:
    """Compare the largest batches of a rollout with the ceilings.

    Args:
        prefill_rows: rows of the largest prefill chunk or training micro-batch on a data-parallel rank.
        decode_max_batch: requests in the largest captured batch, or in each; 0 without CUDA graphs.
        running_requests: requests that may run at once over all data-parallel ranks.
        dp_size: data-parallel ranks that share them.
        speculative_width: tokens that a request decodes at once.
        sequence_parallel: ranks that share the rows of a data-parallel rank.
        max_tokens_per_rank, decode_max_tokens_per_rank: the ceilings; default from the environment.

    Raises:
        CapacityError: names every bound exceeded, the variable, and what else could be made smaller.
        InputError: a number that cannot be.
    """
    graphs = [decode_max_batch] if isinstance(decode_max_batch, int) else list(decode_max_batch)
    numbers = {
        "prefill_rows": (prefill_rows, 0),
        "decode_max_batch": (min(graphs, default=0), 0),
        "running_requests": (running_requests, 0),
        "dp_size": (dp_size, 1),
        "speculative_width": (speculative_width, 1),
        "sequence_parallel": (sequence_parallel, 1),
    }
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or value < least:
            raise InputError(name, got=repr(value), expected=f"an integer from {least}")
    settings = read()
    usual = settings.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
    decode = settings.decode_max_tokens_per_rank if decode_max_tokens_per_rank is None else decode_max_tokens_per_rank
    a_rank = -(-running_requests // dp_size)
    bounds = [
        ("prefill rows", prefill_rows, usual, "max_tokens_per_rank", "a smaller prefill chunk or micro-batch"),
        (
            "decode rows of the largest graph",
            max(graphs, default=0) * speculative_width,
            decode,
            "decode_max_tokens_per_rank",
            "smaller graph batches",
        ),
        (
            f"decode rows of {a_rank} requests a data-parallel rank",
            a_rank * speculative_width,
            decode,
            "decode_max_tokens_per_rank",
            "fewer concurrent requests",
        ),
    ]
    exceeded = [
        f"{what}: {-(-rows // sequence_parallel)} rows a rank, ceiling {ceiling}: set {name_of(field)} to at least "
        f"{-(-rows // sequence_parallel)}, or use {knob}"
        for what, rows, ceiling, field, knob in bounds
        if -(-rows // sequence_parallel) > ceiling
    ]
    if exceeded:
        raise CapacityError("the rollout does not fit\n  " + "\n  ".join(exceeded))
