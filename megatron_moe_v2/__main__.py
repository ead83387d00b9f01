"""``python -m megatron_moe_v2``: the same as the command ``megatron-moe-v2``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
