"""``install`` and ``uninstall``: names of megatron-core replaced where they are defined and where they are used.

``token_dispatcher`` imports the functions by value, so both modules get them. Megatron's ``_DeepepManager`` is left as
it is in the token layout and replaced in the expert layout. There the experts read what the dispatch wrote, which
Megatron's fine-grained overlap must then not free after their forward; it has that rule for other dispatchers whose
rows need no permutation, and ``should_free_input`` gets it for this one.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, MegatronError
from ..fp8 import ScaleFormat
from ..fp8_wire import check_options
from ..fused_a2a import Layout
from . import core
from .ceiling import ceiling
from .functions import MARKER, Functions
from .manager import ExpertLayoutManager

__all__ = ["current_functions", "install", "installed", "uninstall"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Installation:
    """What is replaced at present.

    Attributes:
        layout: None where nothing is.
        functions: what the replaced names call.
        originals: module, name, the object that was there, the object that is.
    """

    layout: Layout | None = None
    functions: Functions = field(default_factory=Functions)
    originals: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.originals.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, original, ours in reversed(self.originals):
            if getattr(owner, name) is not ours:
                logger.warning("%s.%s was replaced by another since: it is the original again", owner.__name__, name)
            setattr(owner, name, original)
        self.originals.clear()
        self.layout = None


_installation = _Installation()


def install(
    layout: Layout = "token",
    *,
    max_tokens_per_rank: int | None = None,
    nvtx: bool = False,
    fp8: ScaleFormat | None = None,
    fp8_backward: bool = False,
) -> None:
    """Put this package under megatron-core's flex token dispatcher with the ``deepep`` backend.

    Call it before the model is built. A second call with the same layout renews the options, one with the other layout
    replaces the first.

    Args:
        layout: ``"token"`` keeps Megatron's own manager: it permutes what is received. ``"expert"`` replaces it: the
            buffer delivers rows grouped by expert, padded where GEMMs are quantised.
        max_tokens_per_rank: ceiling of a rank's tokens in one call; else see :mod:`megatron_moe_v2.megatron.ceiling`.
        nvtx: NVTX ranges around the launches of dispatch and combine, on CUDA.
        fp8: tokens travel in FP8 with scales of this format, and are de-quantised on arrival; the experts see their own
            dtype.
        fp8_backward: so does the gradient of the combine.

    Raises:
        InputError: an argument that cannot be.
        MegatronError: megatron-core is missing or lacks a name, or dispatchers of the other layout exist already.
    """
    if layout not in ("token", "expert"):
        raise InputError("layout", got=repr(layout), expected='"token" or "expert"')
    if max_tokens_per_rank is not None:
        ceiling(max_tokens_per_rank)
    check_options(fp8, True, fp8_backward)
    if _installation.layout != layout:
        core.check(layout)
        _refuse_after(layout)
    # Managers that exist call through this object.
    functions = _installation.functions
    vars(functions).update(
        vars(Functions(max_tokens_per_rank=max_tokens_per_rank, nvtx=nvtx, fp8=fp8, fp8_backward=fp8_backward))
    )
    if _installation.layout == layout:
        return
    _installation.restore()
    _installation.layout = layout
    fused_a2a, dispatcher = core.module(core.FUSED_A2A), core.module(core.TOKEN_DISPATCHER)
    for name, function in functions.replacements().items():
        for owner in (fused_a2a, dispatcher):
            _installation.replace(owner, name, _marked(function, layout, getattr(owner, name)))
    _installation.replace(fused_a2a, "HAVE_DEEP_EP", True)
    if layout == "expert":
        manager = type("ExpertLayoutManager", (ExpertLayoutManager,), {"functions": functions, MARKER: layout})
        _installation.replace(dispatcher, "_DeepepManager", manager)
        for owner in core.free_input_modules():
            keeping = _keeping_expert_input(owner.should_free_input)
            _installation.replace(owner, "should_free_input", _marked(keeping, layout, owner.should_free_input))
    logger.info("megatron-core %s runs its flex dispatcher on this package, %s layout", core.version(), layout)


def uninstall() -> None:
    """Megatron-core as it was: the original objects are back. Without an installation it does nothing."""
    if _installation.layout is None:
        return
    if _installation.layout == "token" and (alive := _managers("token")):
        logger.warning("%d dispatchers of the token layout exist, and lose the functions they call", alive)
    _installation.restore()


def installed() -> Layout | None:
    """The layout that is installed, or None."""
    return _installation.layout


def current_functions() -> Functions:
    """What the replaced names call."""
    return _installation.functions


def _marked(function: Callable[..., Any], layout: Layout, original: Any) -> Callable[..., Any]:
    """A function of its own for each place, which knows what it replaced."""

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(replacement, MARKER, layout)
    if original is not None:
        replacement.__wrapped__ = original
    return replacement


def _keeping_expert_input(original: Callable[..., bool]) -> Callable[..., bool]:
    """``should_free_input`` for a dispatcher whose rows are the experts' input itself.

    They are then saved for the experts' backward. Quantised experts save a cast of them instead, unless the weights are
    multiplied into the rows first.
    """

    def should_free_input(name: str, is_moe: bool, config: Any, *args: Any, **kwargs: Any) -> bool:
        answer = original(name, is_moe, config, *args, **kwargs)
        backend = getattr(config, "moe_flex_dispatcher_backend", "deepep")
        if name != "mlp" or not is_moe or (config.moe_token_dispatcher_type, backend) != ("flex", "deepep"):
            return answer
        cast = config.fp8 or getattr(config, "fp4", None)
        return answer and bool(cast) and not config.moe_apply_probs_on_input

    return should_free_input


def _managers(layout: Layout) -> int:
    """How many managers of a layout exist."""
    kind = ExpertLayoutManager if layout == "expert" else _original_manager()
    return sum(1 for one in gc.get_objects() if issubclass(type(one), kind))


def _original_manager() -> Any:
    for _, name, original, _ in _installation.originals:
        if name == "_DeepepManager":
            return original
    return core.module(core.TOKEN_DISPATCHER)._DeepepManager


def _refuse_after(layout: Layout) -> None:
    """A dispatcher keeps the manager it was built with, so the other layout's must not exist."""
    other: Layout = "token" if layout == "expert" else "expert"
    if not _managers(other):
        return
    gc.collect()  # of models that are gone
    if alive := _managers(other):
        raise MegatronError(
            f"install(layout={layout!r}) after {alive} dispatchers of the {other} layout were built",
            fix="Call install() before the model is built.",
        )
