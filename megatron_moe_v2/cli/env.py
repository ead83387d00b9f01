"""``megatron-moe-v2 env``: lines to export for a fabric, each with its reason and source, and the settings in force."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..names import named
from ..settings import DEEPEP_DEFAULTS, PREFIX, TUNE, VARIABLES, Settings, read, unknown

__all__ = ["FABRICS", "FABRIC_ALIASES", "Export", "effective", "main"]


@dataclass(frozen=True, kw_only=True)
class Export:
    """One line.

    Attributes:
        value: None where the line only says to unset the variable.
        reason: why.
        source: where that is written.
        optional: printed as a comment, for the reader to decide.
    """

    name: str
    value: str | None
    reason: str
    source: str
    optional: bool = False

    def line(self) -> str:
        text = f"unset {self.name}" if self.value is None else f"export {self.name}={_quoted(self.value)}"
        return f"# {text}" if self.optional else text


def _quoted(value: str) -> str:
    """For a shell; a variable in it stays one."""
    return f'"{value}"' if "$" in value else shlex.quote(value)


_README = "DeepEP README, Environment variables"
_GUIDE = "NCCL user guide, Environment Variables"
_REPORT = "DeepEP issues 629 and 680"
_ONE_GPU = "docs/single_gpu_testing.md"
_AWS = "awslabs/awsome-distributed-ai, DeepEP V2 benchmark and serving recipes (pull requests 1230 and 1234)"

_CUMEM = Export(
    name="NCCL_CUMEM_ENABLE",
    value="1",
    reason="DeepEP V2 maps the memory of its peers by cuMem; this package sets it too, unless SET_ENV=0",
    source=_GUIDE,
)
_NO_GIN = Export(
    name="EP_DISABLE_GIN",
    value="1",
    reason="within one host NVLink is enough, and without RDMA the construction fails when it asks NCCL for GIN",
    source=f"{_README}; {_REPORT}",
)
_GIN = Export(
    name="EP_DISABLE_GIN",
    value=None,
    reason="between hosts GIN is DeepEP V2's only path",
    source=_README,
)
_HYBRID = Export(
    name=f"{PREFIX}MODE",
    value="hybrid",
    reason="a token crosses the network once for each node, then NVLink; direct sends it once for each rank",
    source="DeepEP README, Performance",
)
_CACHE = Export(
    name="EP_JIT_CACHE_DIR",
    value="/tmp/deep_ep_$USER",
    reason="the default, $HOME/.deep_ep, is often a network file system, where many ranks compile into one folder",
    source=_README,
    optional=True,
)
_NIC = Export(
    name="EP_NIC_NAME",
    value="mlx5_0",
    reason="DeepEP derives its SM count from this device's speed; name one that is up (ls /sys/class/infiniband)",
    source=_README,
    optional=True,
)
_HCA = Export(
    name="NCCL_IB_HCA",
    value="mlx5",
    reason="keeps NCCL off devices for storage or management",
    source=_GUIDE,
    optional=True,
)
_QPS = Export(
    name=f"{PREFIX}NUM_QPS",
    value="65",
    reason="if the NIC runs out of queue pairs (default 129 in hybrid mode, at EP 32 and above)",
    source="deepseek-ai/DeepEP#649",
    optional=True,
)
_LANE = Export(
    name="EP_OVERRIDE_RDMA_SL",
    value="3",
    reason="a service level of its own keeps expert traffic from other traffic; ask who runs the fabric",
    source="DeepEP README, Traffic isolation",
    optional=True,
)

FABRICS: dict[str, tuple[Export, ...]] = {
    "nvlink": (_CUMEM, _NO_GIN, _CACHE),
    "ib": (_CUMEM, _GIN, _HYBRID, _NIC, _HCA, _QPS, _LANE, _CACHE),
    "roce": (
        _CUMEM,
        _GIN,
        _HYBRID,
        _NIC,
        _HCA,
        Export(
            name="NCCL_IB_GID_INDEX",
            value="3",
            reason="the RoCE v2 address, where NCCL picks another (show_gids); usually found by itself",
            source=_GUIDE,
            optional=True,
        ),
        Export(
            name="NCCL_IB_TC",
            value="106",
            reason="the traffic class that the switches run without loss; ask who runs the fabric",
            source=_GUIDE,
            optional=True,
        ),
        _QPS,
        _CACHE,
    ),
    "efa": (
        _CUMEM,
        _GIN,
        _HYBRID,
        Export(name="FI_PROVIDER", value="efa", reason="libfabric takes EFA and no other provider", source=_AWS),
        Export(name="FI_EFA_USE_DEVICE_RDMA", value="1", reason="the device reads and writes GPU memory", source=_AWS),
        Export(
            name="NCCL_NET_PLUGIN",
            value="ofi",
            reason="aws-ofi-nccl, also as a path to libnccl-net-ofi.so; NCCL_DEBUG=INFO must then say NET/OFI",
            source=_AWS,
        ),
        Export(
            name="NCCL_IB_DISABLE",
            value="1",
            reason="keeps NCCL's own InfiniBand transport off the EFA devices",
            source=_AWS,
        ),
        Export(
            name="NCCL_GIN_TYPE",
            value="2",
            reason="GIN by a CPU proxy; 5 is EFA-GDA, of Amazon's NCCL fork alone; unset lets the plugin choose",
            source=_AWS,
            optional=True,
        ),
        Export(
            name=f"{PREFIX}NUM_QPS",
            value="2",
            reason="if GIN's 128 slots overflow; without, 128 are asked for, which newer plugins run faster",
            source="DeepEP pull request 612; awslabs/awsome-distributed-ai pull request 1230",
            optional=True,
        ),
        _CACHE,
    ),
    "single-gpu": (
        Export(
            name="NCCL_MULTI_RANK_GPU_ENABLE",
            value="1",
            reason="several ranks on one GPU, with NCCL 2.30.4 or later",
            source=_ONE_GPU,
        ),
        _CUMEM,
        _NO_GIN,
        Export(name=f"{PREFIX}NUM_SMS", value="8", reason="fewer and faster compilations", source=_ONE_GPU),
        Export(name=f"{PREFIX}NUM_QPS", value="17", reason="no network needs more", source=_ONE_GPU),
        Export(
            name=f"{PREFIX}CPU_TIMEOUT_SECS", value="20", reason="a hang costs seconds, not minutes", source=_ONE_GPU
        ),
        Export(name=f"{PREFIX}GPU_TIMEOUT_SECS", value="20", reason="as above, on the GPU", source=_ONE_GPU),
        _CACHE,
    ),
}
FABRIC_ALIASES = {"infiniband": "ib"}
_NOTES = {
    "efa": "No machine with EFA was at hand when this was written: validate before you rely on it.",
    "roce": "DeepEP calls RoCE compatible in theory; validate before you rely on it.",
    "single-gpu": "For correctness alone: ranks take turns on the GPU, so times mean nothing.",
}


@dataclass(frozen=True, kw_only=True)
class Effective:
    """A setting in force: its variable, value, where it came from, and what is wrong with it."""

    name: str
    value: str
    origin: str
    problem: str = ""


def _written(value: Any, field: str) -> str:
    """As one would write it in the environment."""
    if isinstance(value, bool):
        return str(int(value))
    return "tune" if field == "num_sms" and value == TUNE else str(value)


def effective(environ: Mapping[str, str]) -> list[Effective]:
    """Every setting of this package, the variables of others that it sets where they are unset, and names unknown."""
    found = []
    defaults = Settings()
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        value, origin, problem = _written(getattr(defaults, variable.field), variable.field), "default", ""
        if text:
            origin = "environment"
            try:
                value = _written(getattr(read({variable.name: text}), variable.field), variable.field)
            except ValueError:
                value, problem = text, f"not allowed: expected {variable.allowed}"
        found.append(Effective(name=variable.name, value=value, origin=origin, problem=problem))
    sets = environ.get(f"{PREFIX}SET_ENV", "").strip() != "0"
    for name, value in DEEPEP_DEFAULTS.items():
        if name in environ:
            found.append(Effective(name=name, value=environ[name], origin="environment"))
        elif sets:
            found.append(Effective(name=name, value=value, origin="set by this package when DeepEP V2 is used"))
        else:
            found.append(Effective(name=name, value="(unset)", origin=f"unset, and {PREFIX}SET_ENV=0"))
    for name, nearest in unknown(environ).items():
        problem = f"nothing reads it; did you mean {nearest}?"
        found.append(Effective(name=name, value=environ[name], origin="environment", problem=problem))
    return found


def main(argv: Sequence[str]) -> int:
    """Print lines or settings; the exit status, 1 if a setting is not allowed."""
    parser = argparse.ArgumentParser(
        prog="megatron-moe-v2 env",
        description='Lines to export for a fabric, with reasons as comments: eval "$(megatron-moe-v2 env nvlink)". '
        "With --show the settings in force, and where each came from.",
        epilog="Exit status: 0, 1 if a setting in force is not allowed or not known, 2 wrong usage.",
    )
    parser.add_argument(
        "fabric",
        nargs="?",
        type=named(FABRICS, FABRIC_ALIASES),
        choices=FABRICS,
        metavar="FABRIC",
        help=f"one of {', '.join(FABRICS)}",
    )
    parser.add_argument("--show", action="store_true", help="settings in force and their origin")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if bool(args.fabric) == args.show:
        parser.error("give either a FABRIC or --show")
    if args.show:
        found = effective(os.environ)
        print(_as_json({"settings": [dataclasses.asdict(one) for one in found]}) if args.json else _settings(found))
        return int(any(one.problem for one in found))
    exports, note = FABRICS[args.fabric], _NOTES.get(args.fabric, "")
    if args.json:
        lines = [dataclasses.asdict(one) for one in exports]
        print(_as_json({"fabric": args.fabric, "note": note, "exports": lines}))
    else:
        head = [f"# {args.fabric}: before the job, on every host."] + ([f"# {note}"] if note else [])
        body = [f"# {one.reason}\n#   ({one.source})\n{one.line()}" for one in exports]
        print("\n".join([*head, *body]))
    return 0


def _settings(found: Sequence[Effective]) -> str:
    width = max(len(one.name) for one in found)
    lines = [
        f"{one.name:<{width}}  {one.value:<10}  {one.origin}{'  !! ' + one.problem if one.problem else ''}"
        for one in found
    ]
    return "\n".join(lines)


def _as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1)
