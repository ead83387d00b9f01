"""The command ``megatron-moe-v2``: each subcommand is a module with ``main(argv) -> int``, imported when called."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..names import named, squashed

__all__ = ["main"]

COMMANDS = {
    "doctor": "find out what is wrong on this machine, or between the ranks of a job",
    "env": "lines to export for a fabric, and the settings in force",
    "plan": "ceiling, buffer, traffic and limits of a model on a cluster, without a GPU",
    "bench": "measure dispatch and combine against the plain all-to-all dispatcher",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; ``argv`` defaults to the process's own arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-moe-v2",
        usage="megatron-moe-v2 [--help] [--version] COMMAND ...",
        epilog="\n".join(["commands:", *(f"  {name:<8}{text}" for name, text in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Mixture-of-experts dispatch and combine on DeepEP V2.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-moe-v2 {__version__}")
    add = parser.add_argument
    add("command", type=named(COMMANDS), choices=COMMANDS, metavar="COMMAND", help="see below; help COMMAND says more")
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = io.StringIO()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and squashed(arguments[0]) == "help":  # --help too, whose dashes do not count
        arguments = [*arguments[1:2], "--help"]
    command = parser.parse_args(arguments[:1]).command
    try:
        status = int(importlib.import_module(f".{command}", __name__).main(arguments[1:]))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # a reader that has seen enough, head for one
            if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
                raise
            print(f"megatron-moe-v2: the output cannot be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        return 1
    return status
