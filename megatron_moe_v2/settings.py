"""Every environment variable of the package, read and checked in one place.

:func:`read` turns the environment into a frozen :class:`Settings`. Nothing else in the package reads the prefix
``MCORE_DEEPEP_V2_``. Order of precedence: explicit argument, environment, what the caller's own configuration implies,
default; the SM count alone is the user's through the environment first.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import SettingsError
from .names import squashed

__all__ = [
    "PREFIX",
    "TUNE",
    "VARIABLES",
    "Settings",
    "Variable",
    "agreement_timeout",
    "deepep_environment",
    "is_set",
    "name_of",
    "read",
    "set_deepep_defaults",
    "snapshot",
]

logger = logging.getLogger(__name__)

PREFIX = "MCORE_DEEPEP_V2_"

_LEAST = {
    "max_tokens_per_rank": 1,
    "decode_max_tokens_per_rank": 1,
    "hidden": 0,
    "num_topk": 0,
    "num_sms": -1,
    "num_qps": 0,
    "cpu_timeout_secs": 1,
    "gpu_timeout_secs": 1,
    "agree_secs": 0.1,
}

BACKENDS = ("auto", "deepep_v2", "deepep_v1", "embedded")
MODES = ("hybrid", "direct")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for.

    Attributes:
        backend: which buffer class, ``auto`` takes the first that works of V2, V1, embedded.
        mode: topology of DeepEP V2 between nodes, ``hybrid`` or ``direct``.
        max_tokens_per_rank: the per-rank token ceiling, rows of ``x`` in one call.
        decode_max_tokens_per_rank: the same for decoding, where a buffer of its own is asked for.
        hidden: least hidden size that a buffer is sized for; 0 takes the model's own.
        num_topk: least top-k that a buffer is sized for; 0 takes the model's own.
        num_sms: streaming multiprocessors that communication may use; 0 is automatic, -1 (``tune``) lets
            warm-up choose.
        deterministic: ask DeepEP V2 for a fixed receive order (the embedded buffer always has one).
        check: check indices and compare every call between ranks; slow, for debugging.
        num_qps: queue pairs of DeepEP V2; 0 leaves the number to DeepEP.
        cpu_timeout_secs: seconds that the host waits for a synchronised dispatch of DeepEP V2.
        gpu_timeout_secs: seconds that a kernel of DeepEP V2 waits; the CUDA context is lost after it.
        set_env: set the variables of ``DEEPEP_DEFAULTS``, which DeepEP V2 wants, where they are unset.
        agree_secs: seconds that ranks wait for each other when a buffer is built.
        nvtx: NVTX ranges around every phase, on CUDA; a running ``torch.profiler`` sees them without it.
    """

    backend: str = "auto"
    mode: str = "hybrid"
    max_tokens_per_rank: int = 8192
    decode_max_tokens_per_rank: int = 128
    hidden: int = 0
    num_topk: int = 0
    num_sms: int = 0
    deterministic: bool = False
    check: bool = False
    num_qps: int = 0
    cpu_timeout_secs: int = 300
    gpu_timeout_secs: int = 100
    set_env: bool = True
    agree_secs: float = 60.0
    nvtx: bool = False

    def __post_init__(self) -> None:
        for field, options in (("backend", BACKENDS), ("mode", MODES)):
            if getattr(self, field) not in options:
                raise SettingsError(field, got=repr(getattr(self, field)), expected=", ".join(options))
        for field, least in _LEAST.items():
            if getattr(self, field) < least:
                raise SettingsError(field, got=getattr(self, field), expected=f"at least {least}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable: its name without the prefix, the field it sets, how it is parsed, what is allowed."""

    suffix: str
    field: str
    parse: Callable[[str], Any]
    allowed: str

    @property
    def name(self) -> str:
        return PREFIX + self.suffix


def _choice(options: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in options:
            raise ValueError
        return text

    return parse


_MOST = 2**31 - 1
"""What a C int holds."""

_MOST_SECS = 1e6
"""In milliseconds less than a C int holds."""


def _number(kind: type, least: float, most: float = _MOST) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return parse


TUNE = -1
"""Value of ``num_sms`` for the word ``tune``: let warm-up time a few SM counts."""


def _num_sms(text: str) -> int:
    return TUNE if text == "tune" else int(_number(int, 0)(text))


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


VARIABLES = (
    Variable(suffix="BACKEND", field="backend", parse=_choice(BACKENDS), allowed=", ".join(BACKENDS)),
    Variable(suffix="MODE", field="mode", parse=_choice(MODES), allowed=", ".join(MODES)),
    Variable(
        suffix="MAX_TOKENS_PER_RANK", field="max_tokens_per_rank", parse=_number(int, 1), allowed="an integer from 1"
    ),
    Variable(
        suffix="DECODE_MAX_TOKENS_PER_RANK",
        field="decode_max_tokens_per_rank",
        parse=_number(int, 1),
        allowed="an integer from 1",
    ),
    Variable(suffix="HIDDEN", field="hidden", parse=_number(int, 0), allowed="an integer from 0"),
    Variable(suffix="NUM_TOPK", field="num_topk", parse=_number(int, 0), allowed="an integer from 0"),
    Variable(suffix="NUM_SMS", field="num_sms", parse=_num_sms, allowed="an integer from 0, or tune"),
    Variable(suffix="DETERMINISTIC", field="deterministic", parse=_flag, allowed="0 or 1"),
    Variable(suffix="CHECK", field="check", parse=_flag, allowed="0 or 1"),
    Variable(suffix="NUM_QPS", field="num_qps", parse=_number(int, 0), allowed="an integer from 0"),
    Variable(suffix="CPU_TIMEOUT_SECS", field="cpu_timeout_secs", parse=_number(int, 1), allowed="seconds from 1"),
    Variable(suffix="GPU_TIMEOUT_SECS", field="gpu_timeout_secs", parse=_number(int, 1), allowed="seconds from 1"),
    Variable(suffix="SET_ENV", field="set_env", parse=_flag, allowed="0 or 1"),
    Variable(
        suffix="AGREE_SECS",
        field="agree_secs",
        parse=_number(float, 0.1, _MOST_SECS),
        allowed="seconds from 0.1 to 1e6",
    ),
    Variable(suffix="NVTX", field="nvtx", parse=_flag, allowed="0 or 1"),
)

_BY_FIELD = {variable.field: variable for variable in VARIABLES}
_BY_NAME = {variable.name: variable for variable in VARIABLES}


DEEPEP_DEFAULTS = {"NCCL_CUMEM_ENABLE": "1", "EP_AVOID_RECORD_STREAM": "1"}
"""Every variable of others that this package sets, where it is unset and ``set_env`` allows it.

``NCCL_CUMEM_ENABLE``: DeepEP V2 maps other ranks' memory through it. ``EP_AVOID_RECORD_STREAM``: an asynchronous call
keeps its tensors in its event, which is dropped at the wait, instead of in ``record_stream``: freed memory is there at
once for the next call, and the call can be captured in a CUDA graph.
"""


def set_deepep_defaults(settings: Settings) -> None:
    """Set what DeepEP V2 wants and the user left open, and log it."""
    for name, value in DEEPEP_DEFAULTS.items() if settings.set_env else ():
        if name not in os.environ:
            os.environ[name] = value
            logger.info("set %s=%s, which DeepEP V2 wants", name, value)


def deepep_environment() -> dict[str, str | None]:
    """The variables of others that decide whether DeepEP V2 can be built here."""
    return {name: os.environ.get(name) for name in ("NCCL_CUMEM_ENABLE", "EP_DISABLE_GIN")}


def name_of(field: str) -> str:
    """Full name of the variable that sets ``field``, for messages."""
    return _BY_FIELD[field].name


def is_set(field: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment says anything about ``field``."""
    return bool((os.environ if environ is None else environ).get(name_of(field), "").strip())


def snapshot(environ: Mapping[str, str] | None = None) -> tuple[str | None, ...]:
    """The raw texts of all known variables, to see cheaply whether anything changed since."""
    environ = os.environ if environ is None else environ
    return tuple(environ.get(name) for name in _BY_NAME)


def agreement_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Seconds that ranks wait for each other, also where another variable's value is bad and must be reported."""
    variable = _BY_FIELD["agree_secs"]
    try:
        return float(variable.parse((os.environ if environ is None else environ)[variable.name]))
    except (KeyError, ValueError):
        return Settings.agree_secs


_BY_SQUASHED = {squashed(name): name for name in _BY_NAME}


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with this package's prefix that nothing reads, or nearly a setting's name, each with the one meant."""
    found = {}
    for name in environ:
        if name in _BY_NAME:
            continue
        cutoff = 0.0 if name.startswith(PREFIX) else _SLIP
        nearest = difflib.get_close_matches(squashed(name), _BY_SQUASHED, n=1, cutoff=cutoff)
        if nearest:
            found[name] = _BY_SQUASHED[nearest[0]]
    return found


_SLIP = 0.85
"""How alike a name without the prefix must be to a setting's to be taken for a slip."""


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check the environment.

    Raises:
        SettingsError: a value is not allowed; names the variable, the value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    for name, nearest in unknown(environ).items():
        logger.warning("%s is no setting of this package; did you mean %s?", name, nearest)
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if not text:
            continue
        try:
            values[variable.field] = variable.parse(text)
        except (ValueError, KeyError, OverflowError):
            raise SettingsError(
                variable.name, got=repr(text), expected=variable.allowed, fix="Change it or unset it."
            ) from None
    return Settings(**values)
