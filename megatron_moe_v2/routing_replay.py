"""``RoutingReplay``: the experts that a rollout's router chose, for the training forward of the same tokens.

    replay = RoutingReplay(num_layers=48, num_sequences=64, num_positions=512, num_topk=8, device="cuda")
    replay.clear()                                             # before each rollout
    replay.record(layer, topk_idx, position)                   # in its router, for one position or several
    topk_idx = replay.replay(layer, topk_idx)                  # in the training router
    topk_weights = probs.gather(-1, topk_idx)                  # the router's gradient flows through these

Rounding differs between decoding and training, and the weights may have moved in between: a router near a tie then
takes another expert, and the token's probability jumps. Replayed, both run the same experts.

Legend: B sequences, S positions, K top-k, b sequences and n positions of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .errors import InputError
from .pool import pool, resolve_group

__all__ = ["RoutingReplay"]

_UNKNOWN = -2
"""A selection that was not recorded; recorded ones that select nothing are -1."""


_F = TypeVar("_F", bound=Callable[..., Any])


def _heard_by_all(method: _F) -> _F:
    """What ``method`` raises also ends the dispatch or combine that the other ranks of the group are in."""

    @functools.wraps(method)
    def run(self: RoutingReplay, *args: Any, **arguments: Any) -> Any:
        try:
            return method(self, *args, **arguments)
        except Exception as error:  # whatever it is
            if self._group is None:
                raise
            pool.fail(self._group, "routing replay", error)

    return cast(_F, run)


class RoutingReplay:
    """Expert indices per layer, sequence and position. Nothing here is collective unless it fails.

    Args:
        num_layers: layers with a router.
        num_sequences: B of a rollout on this rank.
        num_positions: S, positions that the training forward sees.
        num_topk: K.
        device: of the indices.
        group: whose ranks dispatch together: an error of :meth:`record`, :meth:`replay` or :meth:`compare` is then
            raised on all of them. With None, unlike elsewhere, it is this rank's alone.

    Attributes:
        counts: int64 ``[2]`` on the device, since :meth:`clear`: of the selections that the training router made by
            itself, those that the rollout did not make for that token, and all. A recomputed router counts twice.

    Raises:
        InputError: a number that cannot be.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_sequences: int,
        num_positions: int,
        num_topk: int,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self._group = None if group is None else resolve_group(group)
        numbers = {"num_layers": num_layers, "num_positions": num_positions, "num_topk": num_topk}
        for name, value in {**numbers, "num_sequences": num_sequences}.items():
            least = 0 if name == "num_sequences" else 1
            if not isinstance(value, int) or value < least:
                raise InputError(name, got=repr(value), expected=f"an integer from {least}")
        with torch.inference_mode(False):  # what backward keeps must be no inference tensor
            shape = (num_layers, num_sequences, num_positions, num_topk)
            self._chosen = torch.full(shape, _UNKNOWN, dtype=torch.int64, device=device)
            self._places = torch.arange(num_positions, device=device)
            self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._complete = False

    def clear(self) -> None:
        """Forget what was recorded and counted."""
        self._chosen.fill_(_UNKNOWN)
        self.counts.zero_()
        self._complete = False

    @_heard_by_all
    def record(self, layer: int, topk_idx: Tensor, position: int | Tensor = 0) -> None:
        """Keep what the rollout's router chose for ``n`` positions of every sequence.

        No host synchronisation: it can be captured in a CUDA graph, with ``position`` a tensor that is changed between
        replays.

        Args:
            topk_idx: integer ``[..., K]``, B * n tokens, those of a sequence side by side.
            position: of the first of them; an int64 tensor ``[1]`` on the device is not checked.

        Raises:
            InputError: no such layer or position, or the tokens do not fit.
        """
        chosen = self._layer(layer)
        num_sequences, num_positions, num_topk = chosen.shape
        tokens = _tokens(topk_idx, num_topk)
        n = tokens // max(num_sequences, 1)
        if n * num_sequences != tokens:
            wanted = f"a multiple of the {num_sequences} sequences"
            raise InputError("tokens to record", got=tokens, expected=wanted)
        if n > num_positions or (isinstance(position, int) and not 0 <= position <= num_positions - n):
            where = f"{n} from {position}" if isinstance(position, int) else n
            raise InputError("positions to record", got=where, expected=f"within {num_positions}")
        new = topk_idx.detach().reshape(num_sequences, n, num_topk).to(torch.int64).clamp_min(-1)
        chosen.index_copy_(1, self._places[:n] + position, new)

    @_heard_by_all
    def replay(self, layer: int, topk_idx: Tensor, *, sequences: slice = slice(None)) -> Tensor:
        """What the rollout chose, in place of what the training router chose by itself, ``topk_idx``, which is counted.

        The first call after :meth:`clear` waits for the device, to see that everything was recorded.

        Args:
            topk_idx: integer ``[..., K]``, b * S tokens, those of a sequence side by side.
            sequences: which of the rollout's sequences they are; b of them.

        Returns:
            int64, the shape of ``topk_idx``; -1 selects nothing.

        Raises:
            InputError: no such layer, other tokens than were recorded, or nothing was recorded for some.
        """
        recorded = self._recorded(layer, topk_idx, sequences)
        self._count(topk_idx, recorded)
        return recorded

    @_heard_by_all
    def compare(self, layer: int, topk_idx: Tensor, *, sequences: slice = slice(None)) -> None:
        """Only count where the training router's own choice differs; arguments and errors as :meth:`replay`."""
        self._count(topk_idx, self._recorded(layer, topk_idx, sequences))

    def disagreement(self) -> float:
        """Fraction of the training router's own selections that the rollout did not make; waits for the device."""
        differing, compared = map(int, self.counts.tolist())
        return differing / max(compared, 1)

    def _layer(self, layer: int) -> Tensor:
        if not 0 <= layer < len(self._chosen):
            raise InputError("layer", got=layer, expected=f"0 to {len(self._chosen) - 1}")
        return self._chosen[layer]

    def _recorded(self, layer: int, topk_idx: Tensor, sequences: slice) -> Tensor:
        recorded = self._layer(layer)[sequences]
        tokens, expected = _tokens(topk_idx, recorded.shape[-1]), recorded.shape[:2].numel()
        if tokens != expected:
            wanted = f"{expected}, {len(recorded)} sequences of {recorded.shape[1]} positions"
            raise InputError("tokens to replay", got=tokens, expected=wanted, fix="Train on what was rolled out.")
        if not self._complete:
            self._require_complete()
        return recorded.reshape(topk_idx.shape).clone()  # backward keeps it beyond the next rollout

    def _require_complete(self) -> None:
        missing = (self._chosen == _UNKNOWN).any(-1)
        if bool(missing.any()):
            layer, sequence, position = missing.nonzero()[0].tolist()
            raise InputError(
                f"the routing of layer {layer}, sequence {sequence}, position {position} was not recorded",
                fix="Call record() in the rollout, after clear() and before the training forward.",
            )
        self._complete = True

    @torch.no_grad()
    def _count(self, own: Tensor, recorded: Tensor) -> None:
        real = own >= 0
        differs = (own[..., None] != recorded[..., None, :]).all(-1) & real
        self.counts += torch.stack((differs.sum(), real.sum()))


def _tokens(topk_idx: Tensor, num_topk: int) -> int:
    if topk_idx.dim() < 2 or topk_idx.shape[-1] != num_topk or topk_idx.is_floating_point():
        got = f"{topk_idx.dtype} {list(topk_idx.shape)}"
        raise InputError("topk_idx", got=got, expected=f"integer [..., {num_topk}]")
    return topk_idx.shape[:-1].numel()
