"""``RoutingLayout``: the layout of a dispatch, kept for its recomputation.

    layout = RoutingLayout()                                  # one for each micro-batch and layer
    y = checkpoint(lambda x: moe(x, layout_cache=layout), x)  # the second dispatch exchanges no counts

Recomputing a dispatch repeats its exchange of counts and waits for it on the host, though the routing is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import HandleError, InputError, MoEError

if TYPE_CHECKING:
    from .communication import Call, DispatchHandle

__all__ = ["RoutingLayout"]


class RoutingLayout:
    """Empty until a dispatch that it is passed to fills it; a later dispatch repeats that one's routing.

    It keeps the handle of the dispatch alive: drop it after the backward. Make it outside of what is recomputed.
    """

    def __init__(self) -> None:
        self.handle: DispatchHandle | None = None
        self.captured = False

    def fill(self, handle: DispatchHandle, *, captured: bool) -> None:
        """Keep the handle of a dispatch, made inside a CUDA graph capture or not."""
        self.handle, self.captured = handle, captured

    def mismatch(self, call: Call, topk_idx: Tensor, *, compare: bool) -> MoEError | None:
        """Why ``call`` cannot repeat the kept dispatch, if it cannot.

        Args:
            topk_idx: ``[T, K]`` of the call.
            compare: also compare every selection, which costs a host synchronisation.
        """
        if self.handle is None:
            return None
        first, kept = self.handle.call, self.handle.ep_handle.topk_idx
        if first.entry is not call.entry or first.entry.closed:
            return HandleError("layout_cache is of another buffer", fix="Make a new RoutingLayout.")
        for name in ("num_experts", "expert_layout", "expert_alignment", "static_shapes"):
            if getattr(first, name) != getattr(call, name):
                return HandleError(
                    f"{name} of a recomputed dispatch", got=getattr(call, name), expected=getattr(first, name)
                )
        if kept.shape != topk_idx.shape:
            return HandleError(
                "token_indices of a recomputed dispatch",
                got=list(topk_idx.shape),
                expected=list(kept.shape),
                fix="Use one RoutingLayout for each micro-batch and layer.",
            )
        if torch.is_grad_enabled() and kept.is_inference():
            return HandleError(
                "a layout kept in inference_mode cannot be trained with", fix="Fill it outside torch.inference_mode()."
            )
        if not compare:
            return None
        differs = (kept.clamp_min(-1) != topk_idx.long().clamp_min(-1)).any(1)
        if not bool(differs.any()):
            return None
        token = int(differs.nonzero()[0])
        return InputError(
            f"the router decided differently in the recomputation, first for token {token}",
            got=topk_idx[token].tolist(),
            expected=kept[token].tolist(),
            fix="Make the router deterministic, or recompute without layout_cache.",
        )
