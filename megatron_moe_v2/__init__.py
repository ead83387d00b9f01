"""Fused mixture-of-experts dispatch and combine with gradients on DeepEP V2.

=============================================== =============================================================
``fused_dispatch``, ``fused_combine``           Megatron's functions: send tokens to their experts, and back
``set_deepep_num_sms``                          how many streaming multiprocessors communication may use
``HAVE_DEEP_EP``, ``HAVE_DEEP_EP_V2``           whether DeepEP's ``Buffer`` and ``ElasticBuffer`` can be imported
``FlexTokenDispatcher``, ``Dispatched``         dispatch, experts, combine, for a script of one's own
``FusedDispatch``, ``FusedCombine``             the autograd functions below both
``prepare_buffer``, ``close_buffers``           build communication buffers before the first step, free them after
``prepare_for_capture``, ``capture``            the same for CUDA graphs, and a graph whose replay knows its buffer
``check_capacity``                              whether a rollout fits under the ceilings
``ExpertLoadStats``                             tokens per expert and imbalance, counted without a synchronisation
``RoutingLayout``                               a dispatch's layout, kept for its recomputation
``RoutingReplay``                               a rollout's choice of experts, repeated in training
``BufferSpec``                                  what identifies a buffer
``EmbeddedElasticBuffer``                       ``ElasticBuffer`` on plain ``torch.distributed``, CPU and GPU
``Settings``                                    what the environment asks for
``MoEError`` and the errors below it            see :mod:`megatron_moe_v2.errors`
=============================================== =============================================================

:mod:`megatron_moe_v2.megatron` puts the first three under megatron-core's flex token dispatcher.

Importing the package imports nothing else, torch included: each name is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autograd import FusedCombine, FusedDispatch
    from .buffers.embedded import EmbeddedElasticBuffer
    from .capacity import check_capacity
    from .cuda_graphs import capture, prepare_for_capture
    from .dispatcher import Dispatched, FlexTokenDispatcher
    from .errors import (
        BackendError,
        BufferClosedError,
        CapacityError,
        CapturedBufferError,
        CaptureError,
        CommunicationError,
        HandleError,
        InputError,
        LimitError,
        MegatronError,
        MissingRankError,
        MoEError,
        RankMismatchError,
        SettingsError,
    )
    from .fused_a2a import HAVE_DEEP_EP, HAVE_DEEP_EP_V2, fused_combine, fused_dispatch, set_deepep_num_sms
    from .pool import close_buffers
    from .pooled import BufferSpec
    from .prepare import prepare_buffer
    from .recompute import RoutingLayout
    from .routing_replay import RoutingReplay
    from .settings import Settings
    from .telemetry import ExpertLoadStats

__version__ = "0.1.0"

__all__ = [
    "HAVE_DEEP_EP",
    "HAVE_DEEP_EP_V2",
    "BackendError",
    "BufferClosedError",
    "BufferSpec",
    "CapacityError",
    "CaptureError",
    "CapturedBufferError",
    "CommunicationError",
    "Dispatched",
    "EmbeddedElasticBuffer",
    "ExpertLoadStats",
    "FlexTokenDispatcher",
    "FusedCombine",
    "FusedDispatch",
    "HandleError",
    "InputError",
    "LimitError",
    "MegatronError",
    "MissingRankError",
    "MoEError",
    "RankMismatchError",
    "RoutingLayout",
    "RoutingReplay",
    "Settings",
    "SettingsError",
    "capture",
    "check_capacity",
    "close_buffers",
    "fused_combine",
    "fused_dispatch",
    "prepare_buffer",
    "prepare_for_capture",
    "set_deepep_num_sms",
]

_MODULES = {
    "HAVE_DEEP_EP": "fused_a2a",
    "HAVE_DEEP_EP_V2": "fused_a2a",
    "BackendError": "errors",
    "BufferClosedError": "errors",
    "BufferSpec": "pooled",
    "CapacityError": "errors",
    "CaptureError": "errors",
    "CapturedBufferError": "errors",
    "CommunicationError": "errors",
    "Dispatched": "dispatcher",
    "EmbeddedElasticBuffer": "buffers.embedded",
    "ExpertLoadStats": "telemetry",
    "FlexTokenDispatcher": "dispatcher",
    "FusedCombine": "autograd",
    "FusedDispatch": "autograd",
    "HandleError": "errors",
    "InputError": "errors",
    "LimitError": "errors",
    "MegatronError": "errors",
    "MissingRankError": "errors",
    "MoEError": "errors",
    "RankMismatchError": "errors",
    "RoutingLayout": "recompute",
    "RoutingReplay": "routing_replay",
    "Settings": "settings",
    "SettingsError": "errors",
    "capture": "cuda_graphs",
    "check_capacity": "capacity",
    "close_buffers": "pool",
    "fused_combine": "fused_a2a",
    "fused_dispatch": "fused_a2a",
    "prepare_buffer": "prepare",
    "prepare_for_capture": "cuda_graphs",
    "set_deepep_num_sms": "fused_a2a",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
