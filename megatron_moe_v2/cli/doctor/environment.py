"""Environment variables: values that are not allowed, names that nothing reads, pairs that contradict each other."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...settings import DEEPEP_DEFAULTS, PREFIX, VARIABLES, read, unknown
from .findings import FAIL, OK, WARN, Finding, Status, numbers

__all__ = ["Surroundings", "environment_check", "relevant", "wanted_backend"]

GROUP = "environment"

# DeepEP's README, "Environment variables", and what its sources read beyond that.
EP_VARIABLES = (
    "EP_AVOID_RECORD_STREAM", "EP_BUFFER_DEBUG", "EP_DISABLE_BARRIER_PROFILING", "EP_DISABLE_GIN", "EP_GIN_GDAKI_DEBUG",
    "EP_JIT_CACHE_DIR", "EP_JIT_CPP_STANDARD", "EP_JIT_DEBUG", "EP_JIT_DUMP_ASM", "EP_JIT_DUMP_PTX", "EP_JIT_DUMP_SASS",
    "EP_JIT_NVCC_COMPILER", "EP_JIT_PRINT_COMPILER_COMMAND", "EP_JIT_PTXAS_CHECK", "EP_JIT_PTXAS_VERBOSE",
    "EP_JIT_WITH_LINEINFO", "EP_NCCL_ROOT_DIR", "EP_NIC_NAME", "EP_NUM_TOPK_IDX_BITS", "EP_NVSHMEM_ROOT_DIR",
    "EP_OVERRIDE_RDMA_SL", "EP_REUSE_NCCL_COMM", "EP_SUPPRESS_NCCL_CHECK", "EP_USE_NVIDIA_TOOLS",
)  # fmt: skip
EP_TEXTS = ("EP_JIT_CACHE_DIR", "EP_JIT_NVCC_COMPILER", "EP_NCCL_ROOT_DIR", "EP_NIC_NAME", "EP_NVSHMEM_ROOT_DIR")

# NCCL's user guide, "Environment Variables", as far as they bear on DeepEP, and those of its GIN.
NCCL_VARIABLES = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_COMM_BLOCKING", "NCCL_CONF_FILE", "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS",
    "NCCL_DMABUF_ENABLE", "NCCL_GIN_ENABLE", "NCCL_GIN_PLUGIN", "NCCL_GIN_TYPE", "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_AR_THRESHOLD", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA",
    "NCCL_IB_MERGE_NICS", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_RETRY_CNT",
    "NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_SL", "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_TC", "NCCL_IB_TIMEOUT",
    "NCCL_IGNORE_CPU_AFFINITY", "NCCL_IGNORE_DISABLED_P2P", "NCCL_LAUNCH_MODE", "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MNNVL_ENABLE", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NET",
    "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_NET_PLUGIN", "NCCL_NSOCKS_PERTHREAD", "NCCL_NTHREADS",
    "NCCL_NVB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_OOB_NET_ENABLE", "NCCL_OOB_NET_IFNAME", "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_PROTO", "NCCL_PXN_DISABLE", "NCCL_RAS_ENABLE",
    "NCCL_RUNTIME_CONNECT", "NCCL_SHM_DISABLE", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS",
    "NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE", "NCCL_TUNER_PLUGIN", "NCCL_WIN_ENABLE", "NCCL_WORK_FIFO_BYTES",
)  # fmt: skip

_OURS = tuple(variable.name for variable in VARIABLES)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What contradictions depend on beside the variables.

    Attributes:
        gpu: a GPU is here.
        v2: DeepEP V2 can be imported.
        rdma: ``efa``, ``infiniband`` or None.
        nccl: version of the loaded NCCL, where known.
    """

    gpu: bool = False
    v2: bool = False
    rdma: str | None = None
    nccl: str | None = None


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that bear on this package, DeepEP and NCCL."""
    others = ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "LD_PRELOAD")
    prefixes = (PREFIX, "EP_", "NCCL_", "FI_", "OFI_NCCL_")
    return {name: environ[name] for name in sorted(environ) if name.startswith(prefixes) or name in others}


def wanted_backend(environ: Mapping[str, str]) -> str:
    """The backend setting as it is written, which may be a bad value."""
    return environ.get(f"{PREFIX}BACKEND", "").strip() or "auto"


def environment_check(environ: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    yield _settings(environ)
    yield _unknown(environ)
    yield _values(environ)
    hit = [(rule, text) for rule in RULES if (text := rule.test(environ, around))]
    for rule, text in hit:
        yield Finding(
            id=f"conflict-{rule.name}", group=GROUP, status=rule.status, found=text, needed=rule.needed, fix=rule.fix
        )
    if not hit:
        yield Finding(id="conflicts", group=GROUP, status=OK, found=f"none of {len(RULES)} known contradictions")


def _settings(environ: Mapping[str, str]) -> Finding:
    """Of this package; every bad one is named, where :func:`read` stops at the first."""
    bad = []
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if text:
            try:
                read({variable.name: text})
            except ValueError:
                bad.append(f"{variable.name}={text!r} (allowed: {variable.allowed})")
    mine = [name for name in _OURS if environ.get(name, "").strip()]
    found = "; ".join(bad) or (f"{len(mine)} set: {', '.join(mine)}" if mine else "none set, all defaults")
    return Finding(
        id="settings",
        group=GROUP,
        status=FAIL if bad else OK,
        found=found,
        needed=f"allowed values of {PREFIX}*",
        fix="Change or unset them." if bad else "",
    )


def _unknown(environ: Mapping[str, str]) -> Finding:
    """EP_ is a prefix that scripts use too: there, and in NCCL's many, only what looks like a slip is reported."""
    slips = [f"{name} (did you mean {nearest}?)" for name, nearest in sorted(unknown(environ).items())]
    for name in sorted(environ):
        known: tuple[str, ...]
        if name.startswith("EP_"):
            known, cutoff = EP_VARIABLES, 0.6 if name.startswith(("EP_JIT", "EP_GIN", "EP_DISABLE")) else 0.8
        elif name.startswith("NCCL_"):
            known, cutoff = NCCL_VARIABLES, 0.88
        else:
            continue
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
        if name not in known and nearest:
            slips.append(f"{name} (did you mean {nearest[0]}?)")
    return Finding(
        id="unknown-variables",
        group=GROUP,
        status=WARN if slips else OK,
        found="; ".join(slips) or "no name that looks like a slip",
        needed="names that something reads",
        fix="Correct or unset them." if slips else "",
    )


def _values(environ: Mapping[str, str]) -> Finding:
    """DeepEP reads its numbers as C++ integers: a word there ends the process or counts as 0."""
    names = [name for name in EP_VARIABLES if name not in EP_TEXTS]
    bad = [f"{name}={environ[name]!r}" for name in names if name in environ and not environ[name].strip().isdecimal()]
    return Finding(
        id="deep_ep-variables",
        group=GROUP,
        status=FAIL if bad else OK,
        found="; ".join(bad) or "all numbers are numbers",
        needed="integers in DeepEP's EP_* switches",
        fix="Use 0 or 1." if bad else "",
    )


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A contradiction: ``test`` gives what is found, or nothing."""

    name: str
    status: Status
    test: Callable[[Mapping[str, str], Surroundings], str | None]
    needed: str
    fix: str


def _set(environ: Mapping[str, str], **expected: str) -> str | None:
    """``NAME=value NAME=value`` if all are so."""
    if all(environ.get(name, "").strip() == value for name, value in expected.items()):
        return " with ".join(f"{name}={value}" for name, value in expected.items())
    return None


def _uses_v2(environ: Mapping[str, str], around: Surroundings) -> bool:
    return wanted_backend(environ) == "deepep_v2" or (wanted_backend(environ) == "auto" and around.gpu and around.v2)


def _hosts(environ: Mapping[str, str]) -> int:
    """As a launcher says it; 0 where it does not."""
    try:
        return -(-int(environ["WORLD_SIZE"]) // int(environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError, ZeroDivisionError):
        return 0


def _gin_between_hosts(environ: Mapping[str, str], _: Surroundings) -> str | None:
    return (
        f"EP_DISABLE_GIN=1 on {_hosts(environ)} hosts"
        if _set(environ, EP_DISABLE_GIN="1") and _hosts(environ) > 1
        else None
    )


def _gin_without_rdma(environ: Mapping[str, str], around: Surroundings) -> str | None:
    if around.gpu and _uses_v2(environ, around) and around.rdma is None and environ.get("EP_DISABLE_GIN") != "1":
        return f"no RDMA device, and EP_DISABLE_GIN={environ.get('EP_DISABLE_GIN', '(unset)')}"
    return None


def _gin_off_in_nccl(environ: Mapping[str, str], around: Surroundings) -> str | None:
    if _uses_v2(environ, around) and environ.get("EP_DISABLE_GIN") != "1":
        return _set(environ, NCCL_GIN_ENABLE="0")
    return None


def _gin_type_unused(environ: Mapping[str, str], _: Surroundings) -> str | None:
    named = [f"{name}={environ[name]}" for name in ("NCCL_GIN_TYPE", "NCCL_GIN_PLUGIN") if environ.get(name)]
    return f"EP_DISABLE_GIN=1 with {', '.join(named)}" if named and _set(environ, EP_DISABLE_GIN="1") else None


def _cumem(environ: Mapping[str, str], around: Surroundings) -> str | None:
    return _set(environ, NCCL_CUMEM_ENABLE="0") if _uses_v2(environ, around) else None


def _cumem_unset(environ: Mapping[str, str], around: Surroundings) -> str | None:
    if _uses_v2(environ, around) and _set(environ, **{f"{PREFIX}SET_ENV": "0"}):
        missing = [name for name in DEEPEP_DEFAULTS if name not in environ]
        return f"{PREFIX}SET_ENV=0 and {', '.join(missing)} unset" if missing else None
    return None


def _p2p(environ: Mapping[str, str], around: Surroundings) -> str | None:
    return _set(environ, NCCL_P2P_DISABLE="1") if _uses_v2(environ, around) else None


def _ib_off(environ: Mapping[str, str], around: Surroundings) -> str | None:
    if around.rdma == "infiniband" and _uses_v2(environ, around) and environ.get("EP_DISABLE_GIN") != "1":
        return _set(environ, NCCL_IB_DISABLE="1")
    return None


def _shared_gpu(environ: Mapping[str, str], around: Surroundings) -> str | None:
    if around.nccl and numbers(around.nccl) < (2, 30, 4) and _set(environ, NCCL_MULTI_RANK_GPU_ENABLE="1"):
        return f"NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL {around.nccl}"
    return None


def _check_hidden(environ: Mapping[str, str], _: Surroundings) -> str | None:
    return _set(environ, EP_SUPPRESS_NCCL_CHECK="1")


def _efa_qps(environ: Mapping[str, str], around: Surroundings) -> str | None:
    text = environ.get(f"{PREFIX}NUM_QPS", "")
    return f"{PREFIX}NUM_QPS={text} on EFA" if around.rdma == "efa" and text.isdecimal() and int(text) > 128 else None


def _without_effect(environ: Mapping[str, str], _: Surroundings) -> str | None:
    backend = wanted_backend(environ)
    v2 = ("MODE", "DETERMINISTIC", "NUM_QPS", "CPU_TIMEOUT_SECS", "GPU_TIMEOUT_SECS")
    unread = {"deepep_v1": v2, "embedded": (*v2, "NUM_SMS")}.get(backend, ())
    idle = [PREFIX + name for name in unread if environ.get(PREFIX + name, "").strip()]
    return f"{PREFIX}BACKEND={backend}, which does not read {', '.join(idle)}" if idle else None


_GIN = "one switch for DeepEP and NCCL alike"

RULES = (
    _Rule(
        name="gin-between-hosts",
        status=FAIL,
        test=_gin_between_hosts,
        needed="GIN, DeepEP V2's only path between hosts",
        fix="unset EP_DISABLE_GIN",
    ),
    _Rule(
        name="gin-without-rdma",
        status=FAIL,
        test=_gin_without_rdma,
        needed="an RDMA device for GIN, or GIN off on a single host",
        fix="export EP_DISABLE_GIN=1",
    ),
    _Rule(name="gin-off-in-nccl", status=FAIL, test=_gin_off_in_nccl, needed=_GIN, fix="unset NCCL_GIN_ENABLE"),
    _Rule(name="gin-type-unused", status=WARN, test=_gin_type_unused, needed=_GIN, fix="Unset one of them."),
    _Rule(
        name="cumem-off",
        status=FAIL,
        test=_cumem,
        needed="cuMem, by which DeepEP V2 maps its memory",
        fix="export NCCL_CUMEM_ENABLE=1",
    ),
    _Rule(
        name="cumem-unset",
        status=WARN,
        test=_cumem_unset,
        needed="NCCL_CUMEM_ENABLE=1, which this package may then not set",
        fix="export NCCL_CUMEM_ENABLE=1",
    ),
    _Rule(
        name="p2p-off",
        status=FAIL,
        test=_p2p,
        needed="peer access between the GPUs of a host",
        fix="unset NCCL_P2P_DISABLE",
    ),
    _Rule(
        name="ib-off",
        status=FAIL,
        test=_ib_off,
        needed="InfiniBand or RoCE for GIN",
        fix="unset NCCL_IB_DISABLE, or export EP_DISABLE_GIN=1 on a single host",
    ),
    _Rule(
        name="shared-gpu",
        status=FAIL,
        test=_shared_gpu,
        needed="NCCL 2.30.4 or later for several ranks on one GPU",
        fix="Upgrade NCCL.",
    ),
    _Rule(
        name="check-suppressed",
        status=WARN,
        test=_check_hidden,
        needed="DeepEP's own comparison of NCCL libraries",
        fix="unset EP_SUPPRESS_NCCL_CHECK, and mend nccl-loaded or nccl-duplicates",
    ),
    _Rule(
        name="efa-queue-pairs",
        status=FAIL,
        test=_efa_qps,
        needed="at most 128 queue pairs on EFA",
        fix=f"Lower {PREFIX}NUM_QPS.",
    ),
    _Rule(
        name="without-effect",
        status=WARN,
        test=_without_effect,
        needed="settings that the chosen backend reads",
        fix="Unset them, or choose another backend.",
    ),
)
