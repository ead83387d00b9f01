"""How many tokens a rank may dispatch in one call, from Megatron's own arguments where nobody says.

First that is known: ``max_tokens_per_rank=`` of ``install`` or ``prepare``; the environment; ``seq_length=`` and
``micro_batch_size=`` of ``prepare``; the buffers that exist; Megatron's arguments, where ``megatron.training`` has
parsed them; the default of the settings. All are the same on every rank, which building a buffer compares.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..pool import pool
from ..settings import Settings, is_set, name_of, read

__all__ = ["Ceiling", "ceiling", "tokens_per_rank"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Tokens that a rank may dispatch in one call.

    Attributes:
        tokens: the number.
        source: where it comes from, for the log.
        per_sequence: sequence length and the tokens that it makes on a rank, where it was derived.
    """

    tokens: int
    source: str
    per_sequence: tuple[int, int] | None = None

    def log(self) -> None:
        logger.info("ceiling of %d tokens a rank, from %s%s", self.tokens, self.source, self._longer())

    def _longer(self) -> str:
        if self.per_sequence is None:
            return ""
        length, tokens = self.per_sequence
        return (
            f"; evaluation on longer sequences needs more, {2 * tokens} for {2 * length}: "
            f"set {name_of('max_tokens_per_rank')}"
        )


def tokens_per_rank(
    seq_length: int, micro_batch_size: int, *, tensor: int = 1, context: int = 1, sequence_parallel: bool = False
) -> int:
    """Tokens that reach a rank's MoE layer: context parallelism splits the sequence, and tensor parallelism splits it
    again only with sequence parallelism."""
    for name, value in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
        if not isinstance(value, int) or value < 1:
            raise InputError(name, got=repr(value), expected="an integer from 1")
    split = context * (tensor if sequence_parallel else 1)
    return -(-seq_length // split) * micro_batch_size


def ceiling(
    explicit: int | None = None,
    *,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    config: Any = None,
) -> Ceiling:
    """What holds for the next buffer; see the module.

    Args:
        explicit: of ``install`` or ``prepare``.
        seq_length, micro_batch_size: of ``prepare``; both or neither.
        config: ``TransformerConfig``, with the parallel sizes that go with them.

    Raises:
        InputError: a number that cannot be, or one of the two alone.
        SettingsError: the environment holds a bad value.
    """
    if (seq_length is None) != (micro_batch_size is None):
        got = f"seq_length={seq_length}, micro_batch_size={micro_batch_size}"
        raise InputError("ceiling", got=got, expected="both or neither")
    if explicit is not None:
        if not isinstance(explicit, int) or explicit < 1:
            raise InputError("max_tokens_per_rank", got=repr(explicit), expected="an integer from 1")
        return Ceiling(tokens=explicit, source="max_tokens_per_rank=")
    if is_set("max_tokens_per_rank"):
        return Ceiling(tokens=(pool.pinned or read()).max_tokens_per_rank, source=name_of("max_tokens_per_rank"))
    if seq_length is not None and micro_batch_size is not None:
        return _derived("seq_length= and micro_batch_size=", seq_length, micro_batch_size, config)
    if pool.pinned is not None and any(
        entry.spec.num_max_tokens_per_rank == pool.pinned.max_tokens_per_rank for entry in pool.entries()
    ):
        return Ceiling(tokens=pool.pinned.max_tokens_per_rank, source="the buffers that exist")
    arguments = _megatron_arguments()
    if arguments is not None:
        return _derived("Megatron's arguments", arguments.seq_length, arguments.micro_batch_size, arguments)
    return Ceiling(tokens=Settings.max_tokens_per_rank, source="the default")


def _derived(source: str, seq_length: int, micro_batch_size: int, sizes: Any) -> Ceiling:
    hybrid = getattr(sizes, "hybrid_context_parallel", False)  # each rank then takes sequences up to its own length
    tokens = tokens_per_rank(
        sizes.max_seqlen_per_dp_cp_rank if hybrid else seq_length,
        micro_batch_size,
        tensor=getattr(sizes, "tensor_model_parallel_size", 1),
        context=1 if hybrid else getattr(sizes, "context_parallel_size", 1),
        sequence_parallel=getattr(sizes, "sequence_parallel", False),
    )
    return Ceiling(tokens=tokens, source=source, per_sequence=(seq_length, tokens))


def _megatron_arguments() -> Any:
    """What ``megatron.training`` parsed, where it is loaded, has parsed, and says how long sequences are."""
    training = sys.modules.get("megatron.training.global_vars")
    if training is None:
        return None
    try:
        arguments = training.get_args()
    except AssertionError:  # not initialised
        return None
    wanted = ("seq_length", "micro_batch_size")
    return arguments if all(getattr(arguments, name, None) for name in wanted) else None
