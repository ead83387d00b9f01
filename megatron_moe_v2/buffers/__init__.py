"""The classes that honour DeepEP V2's ``ElasticBuffer`` contract, and the choice between them.

:func:`choose` decides from the probe and the settings alone, on every rank by itself; that all ranks decided the same
is for the agreement to check. :func:`constructor_of` loads the chosen class's builder, so that what was not chosen is
never imported.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..errors import BackendError
from ..probe import Probe
from ..settings import Settings, name_of

__all__ = ["Backend", "choose", "constructor_of", "precheck_of"]

logger = logging.getLogger(__name__)

_CLASSES = {"deepep_v2": "ElasticBuffer", "deepep_v1": "LegacyElasticBuffer", "embedded": "EmbeddedElasticBuffer"}
_SINGLE = "DeepEP V1 refuses a group of one rank"
_INSTALL = {
    "deepep_v2": "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP",
    "deepep_v1": "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1",
}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The chosen buffer class.

    Attributes:
        name: ``deepep_v2``, ``deepep_v1`` or ``embedded``.
        class_name: the class that will be built.
        reason: one line, why this one.
        versions: of the libraries that must be equal on all ranks.
    """

    name: str
    class_name: str
    reason: str
    versions: dict[str, str] = field(default_factory=dict)


def choose(probe_record: Probe, settings: Settings, *, on_cuda: bool, num_ranks: int = 0) -> Backend:
    """Choose the buffer class.

    ``auto`` takes V2, else V1, else embedded; DeepEP runs on CUDA alone, so without it ``auto`` is embedded. Falling to
    embedded on a CUDA machine is said once at WARNING. Nothing is constructed, and with an explicit choice the others
    are not looked at.

    Args:
        on_cuda: the group communicates CUDA tensors.
        num_ranks: of the group, 0 for not said. V1 cannot serve a single rank: the embedded buffer does.

    Raises:
        BackendError: the choice was explicit and cannot be had; holds the cause and how to install it.
    """
    usable = {"deepep_v2": probe_record.have_v2, "deepep_v1": probe_record.have_v1}
    reasons = {"deepep_v2": probe_record.v2_reason, "deepep_v1": probe_record.v1_reason}
    asked, variable = settings.backend, name_of("backend")

    if asked == "embedded":
        return _backend(asked, f"{variable}=embedded", probe_record)
    if asked in usable:
        if not usable[asked]:
            raise BackendError(
                f"{variable}={asked}, but {reasons[asked]}",
                fix=f"Install it ({_INSTALL[asked]}), or set {variable} to auto or embedded.",
            )
        if not on_cuda:
            raise BackendError(
                f"{variable}={asked}, but the group has no CUDA device",
                fix=f"DeepEP runs on GPUs alone; set {variable} to auto or embedded.",
            )
        if asked == "deepep_v1" and num_ranks == 1:
            _warn_once(_SINGLE)
            return _backend("embedded", _SINGLE, probe_record)
        return _backend(asked, f"{variable}={asked}: {reasons[asked]}", probe_record)

    if not on_cuda:
        return _backend("embedded", "the group has no CUDA device, and DeepEP needs one", probe_record)
    if usable["deepep_v2"]:
        return _backend("deepep_v2", reasons["deepep_v2"], probe_record)
    if usable["deepep_v1"] and num_ranks == 1:
        _warn_once(_SINGLE)
        return _backend("embedded", _SINGLE, probe_record)
    if usable["deepep_v1"]:
        return _backend("deepep_v1", f"no V2: {reasons['deepep_v2']}; V1: {reasons['deepep_v1']}", probe_record)
    reason = "; ".join(dict.fromkeys(reasons.values()))
    _warn_once(reason)
    return _backend("embedded", reason, probe_record)


def constructor_of(backend: Backend) -> Callable[..., Any]:
    """``build(spec, ...)`` of the backend's module, which is imported here for the first time."""
    build: Callable[..., Any] = importlib.import_module(f".{backend.name}", __name__).build
    return build


def precheck_of(backend: Backend) -> Callable[..., None]:
    """What the backend checks on each host by itself before ranks build together; takes the ``BufferSpec`` fields."""
    precheck: Callable[..., None] = importlib.import_module(f".{backend.name}", __name__).precheck
    return precheck


def _backend(name: str, reason: str, probe_record: Probe) -> Backend:
    versions = {"megatron_moe_v2": __version__}
    if name != "embedded":
        versions["deep_ep"] = probe_record.version or "unknown"
    return Backend(name=name, class_name=_CLASSES[name], reason=reason, versions=versions)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "No DeepEP on this CUDA machine (%s): the embedded buffer on plain torch.distributed takes its place. Silence "
        "this with %s=embedded.",
        reason,
        name_of("backend"),
    )
