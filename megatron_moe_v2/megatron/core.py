"""megatron-core as it is found here: its modules, its version, and whether it has what is replaced.

Everything is checked before anything is replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from packaging.version import Version

from ..errors import MegatronError
from ..fused_a2a import Layout

__all__ = [
    "FREE_INPUT",
    "FUSED_A2A",
    "NEEDED",
    "OLDEST",
    "TOKEN_DISPATCHER",
    "check",
    "free_input_modules",
    "module",
    "version",
]

OLDEST = Version("0.13")
"""First release with these signatures."""

FUSED_A2A = "megatron.core.transformer.moe.fused_a2a"
TOKEN_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
FREE_INPUT = ("megatron.core.models.common.utils", "megatron.core.models.gpt.fine_grained_callables")
"""Where ``should_free_input`` of the fine-grained overlap is defined and used: from 0.19 on, and before."""

_FUNCTIONS = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
_MANAGER = (
    "setup_metadata",
    "dispatch",
    "combine",
    "get_number_of_tokens_per_expert",
    "get_permuted_hidden_states_by_experts",
    "get_restored_hidden_states_by_experts",
)

NEEDED: dict[str, tuple[str, ...]] = {
    "token": (
        *(f"{FUSED_A2A}.{name}" for name in (*_FUNCTIONS, "HAVE_DEEP_EP", "FusedDispatch.forward")),
        *(f"{TOKEN_DISPATCHER}.{name}" for name in (*_FUNCTIONS, "MoEFlexTokenDispatcher", "_DeepepManager")),
    ),
    "expert": tuple(f"{TOKEN_DISPATCHER}._DeepepManager.{name}" for name in _MANAGER),
}
"""Dotted paths that must exist; the expert layout needs those of the token layout too."""

_SIGNATURES = {
    f"{FUSED_A2A}.FusedDispatch.forward": (
        "ctx x token_indices token_probs num_experts group async_finish allocate_on_comm_stream"
    ),
    f"{TOKEN_DISPATCHER}._DeepepManager.__init__": "self group num_local_experts router_topk num_experts config",
}


_FREE_INPUT_ARGUMENTS = "name is_moe config"


def module(path: str) -> ModuleType:
    """A module of megatron-core.

    Raises:
        MegatronError: it, or megatron-core, cannot be imported.
    """
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise MegatronError(f"megatron-core cannot be imported: {error}") from error
        raise MegatronError("megatron-core is not installed", fix="pip install megatron-core") from None
    except Exception as error:  # whatever an installation that is broken raises
        raise MegatronError(f"megatron-core cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise MegatronError(f"{path} cannot be imported: {error}") from error
        raise _missing(path) from None


def version() -> str:
    """Of megatron-core."""
    return str(module("megatron.core").__version__)


def check(layout: Layout) -> None:
    """All names that ``layout`` needs exist, with the signatures it needs.

    Raises:
        MegatronError: with the dotted path that is missing or different, and the version of megatron-core.
    """
    if Version(version()) < OLDEST:
        raise MegatronError("megatron-core", got=version(), expected=f"{OLDEST} or later", fix="Its API differs.")
    paths: Iterable[str] = NEEDED["token"] if layout == "token" else (*NEEDED["token"], *NEEDED["expert"])
    for path in paths:
        _find(path)
    for path, wanted in _SIGNATURES.items():
        if layout == "token" and "_DeepepManager" in path:
            continue
        found = " ".join(inspect.signature(_find(path)).parameters)
        if found != wanted:
            raise MegatronError(f"arguments of {path} in megatron-core {version()}", got=found, expected=wanted)
    if layout == "expert":
        owners = free_input_modules()
        if not owners:
            raise _missing(f"{FREE_INPUT[0]}.should_free_input")
        for owner in owners:
            found = " ".join(inspect.signature(owner.should_free_input).parameters)
            if not found.startswith(_FREE_INPUT_ARGUMENTS):
                path = f"{owner.__name__}.should_free_input"
                raise MegatronError(
                    f"arguments of {path} in megatron-core {version()}", got=found, expected=_FREE_INPUT_ARGUMENTS
                )


def free_input_modules() -> list[ModuleType]:
    """The modules that hold ``should_free_input``."""
    holders = [module(path) for path in FREE_INPUT if importlib.util.find_spec(path) is not None]
    return [holder for holder in holders if hasattr(holder, "should_free_input")]


def _find(path: str) -> Any:
    """The object of a dotted path below one of the two modules."""
    owner = next(one for one in (FUSED_A2A, TOKEN_DISPATCHER) if path.startswith(f"{one}."))
    found: Any = module(owner)
    for name in path[len(owner) + 1 :].split("."):
        if not hasattr(found, name):
            raise _missing(path)
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found.__func__ if isinstance(found, staticmethod) else found


def _missing(path: str) -> MegatronError:
    return MegatronError(
        f"megatron-core {version()} has no {path}", fix="This package does not fit that version: report it."
    )
