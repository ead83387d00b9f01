"""Which ``deep_ep`` is here, what it exports, and why not.

The one place that imports ``deep_ep``. Its import may raise anything (a missing module, an assertion about NCCL
libraries, a loader error), so everything is caught and its text kept. Three states, for V1 and V2 each: usable, not
there, and there but broken. The third is logged once with its cause. Neither torch nor CUDA is touched from here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import to_wire

__all__ = ["Probe", "probe"]

logger = logging.getLogger(__name__)

# Where an export may live; the first place that has it wins. A release that guards its own imports hides the cause at
# the top level, and the module further down raises it.
_PLACES = {
    "ElasticBuffer": ("deep_ep", "deep_ep.buffers.elastic"),
    "Buffer": ("deep_ep", "deep_ep.buffers.legacy", "deep_ep.buffer"),
    "EventOverlap": ("deep_ep.utils.event", "deep_ep.utils", "deep_ep"),
    "EventHandle": ("deep_ep.utils.event", "deep_ep.utils", "deep_ep"),
    "topk_idx_t": ("deep_ep",),
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found.

    Attributes:
        installed: a module ``deep_ep`` exists, usable or not.
        version, file: of that module; None where it does not tell, or did not import.
        ElasticBuffer, Buffer, EventOverlap, EventHandle: DeepEP's classes, None when absent. ``Buffer`` is V1's.
        topk_idx_t: torch dtype that DeepEP wants for expert indices, None when it does not say.
        v1_error, v2_error: text of the exception that keeps a present V1 or V2 from being used, else None.
    """

    installed: bool = False
    version: str | None = None
    file: str | None = None
    ElasticBuffer: type[Any] | None = None
    Buffer: type[Any] | None = None
    EventOverlap: type[Any] | None = None
    EventHandle: type[Any] | None = None
    topk_idx_t: Any = None
    v1_error: str | None = None
    v2_error: str | None = None

    @property
    def have_v1(self) -> bool:
        return self.Buffer is not None

    @property
    def have_v2(self) -> bool:
        return self.ElasticBuffer is not None

    @property
    def v1_reason(self) -> str:
        """One line: where V1 comes from, or why it cannot be used."""
        return self._reason("Buffer", self.have_v1, self.v1_error)

    @property
    def v2_reason(self) -> str:
        """One line: where V2 comes from, or why it cannot be used."""
        return self._reason("ElasticBuffer", self.have_v2, self.v2_error)

    def _reason(self, name: str, usable: bool, error: str | None) -> str:
        if not self.installed:
            return "deep_ep is not installed"
        if error is not None:
            return f"deep_ep is broken: {' '.join(error.split())}"
        origin = f"deep_ep {self.version or 'of unknown version'} at {self.file or 'an unknown place'}"
        return origin if usable else f"{origin} has no {name}"


@functools.cache
def probe() -> Probe:
    """Look once, at the first call; later calls return the same record. Never raises."""
    if not _exists():
        return Probe()
    try:
        module = importlib.import_module("deep_ep")
    except (Exception, SystemExit) as error:
        text = to_wire(error)
        logger.warning("deep_ep is installed but its import fails: %s", text)
        return Probe(installed=True, v1_error=text, v2_error=text)

    found = {name: _look(name, places) for name, places in _PLACES.items()}
    for name, (_, cause) in found.items():
        if cause is not None:
            logger.warning("deep_ep is installed but its %s cannot be imported: %s", name, cause)
    return Probe(
        installed=True,
        version=_version(module),
        file=getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None),
        v1_error=found["Buffer"][1],
        v2_error=found["ElasticBuffer"][1],
        **{name: value for name, (value, _) in found.items()},
    )


def _exists() -> bool:
    try:
        return importlib.util.find_spec("deep_ep") is not None
    except Exception:  # e.g. ValueError: a module without a spec was put into sys.modules. The import tells more.
        return True


def _look(name: str, places: tuple[str, ...]) -> tuple[Any, str | None]:
    """``(export, None)`` from the first place that has it, else ``(None, the first real error on the way or None)``."""
    first = None
    for place in places:
        try:
            value = getattr(importlib.import_module(place), name, None)
        except (Exception, SystemExit) as error:
            no_such_place = isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")
            if not no_such_place:
                first = first or to_wire(error)
        else:
            if value is not None:
                return value, None
    return None, first


def _version(module: ModuleType) -> str | None:
    version = getattr(module, "__version__", None)
    if version is None:
        from importlib import metadata  # slow to import, and needed only here

        try:
            version = metadata.version("deep_ep")
        except metadata.PackageNotFoundError:
            return None
    return str(version)
