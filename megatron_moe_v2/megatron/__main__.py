"""``python -m megatron_moe_v2.megatron [options] script.py ...``: run a script, or ``-m`` a module, with it installed.

Also by a launcher: ``torchrun ... -m megatron_moe_v2.megatron --layout expert pretrain_gpt.py ...``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from .patch import install


def main(arguments: Sequence[str] | None = None) -> None:
    """Install, then become the script: its ``sys.argv``, its folder first in ``sys.path``, ``__main__`` its name."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_moe_v2.megatron",
        description="Run a Megatron script with its flex token dispatcher on this package.",
    )
    parser.add_argument("--layout", choices=("token", "expert"), default="token", help="of what is received")
    parser.add_argument("--max-tokens-per-rank", type=int, metavar="N", help="ceiling of a rank's tokens in one call")
    parser.add_argument("--nvtx", action="store_true", help="NVTX ranges around dispatch and combine")
    parser.add_argument("-m", action="store_true", dest="module", help="the script is a module's name")
    parser.add_argument("script", help="path of a script, or with -m a module's name")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    options = parser.parse_args(arguments)
    install(options.layout, max_tokens_per_rank=options.max_tokens_per_rank, nvtx=options.nvtx)
    if options.module:
        sys.argv = [options.script, *options.rest]
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    sys.argv = [options.script, *options.rest]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
