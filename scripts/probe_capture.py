"""Can DeepEP V2 be built inside a CUDA graph capture here, and does this package's way capture and replay?

    python scripts/probe_capture.py [--timeout 120]

Tries ``deep_ep.ElasticBuffer`` outside and inside a capture, direct and hybrid, each in a process of its own: some
fabrics tolerate the inside, others invalidate the capture or hang. Then builds by ``prepare_for_capture`` and captures
and replays a step; that alone decides the exit code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

M, H, K, E = 128, 1024, 4, 32


def join() -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29613", rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1, device="cuda"))  # DeepEP reads the communicator's pointer, 0 before
    torch.cuda.synchronize()


def raw(where: str, mode: str) -> None:
    """DeepEP's own constructor."""
    import deep_ep
    import torch
    import torch.distributed as dist

    join()

    def build() -> object:
        return deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=M,
            hidden=H,
            num_topk=K,
            allow_hybrid_mode=mode == "hybrid",
            explicitly_destroy=True,
        )

    if where == "outside":
        build()
        return
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        build()


def ours(mode: str) -> None:
    """Prepare, capture, replay, and compare with eager."""
    import torch
    import torch.distributed as dist

    from megatron_moe_v2 import FlexTokenDispatcher, capture, close_buffers, prepare_for_capture

    os.environ["MCORE_DEEPEP_V2_MODE"] = mode
    join()
    entry = prepare_for_capture(hidden=H, num_topk=K, num_experts=E, num_max_tokens_per_rank=M, layouts=("expert",))
    print(entry.describe())
    dispatcher = FlexTokenDispatcher(num_experts=E, layout="expert", num_max_tokens_per_rank=M, static_shapes=True)

    def step(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sent = dispatcher.dispatch(x, idx, weights)
        return dispatcher.combine(sent.tokens, sent)

    x = torch.randn(M, H, device="cuda").bfloat16()
    weights, idx = torch.rand(M, E, device="cuda").topk(K)
    replay = capture(step, x.clone(), idx.clone(), weights.clone())
    torch.testing.assert_close(replay(x * 2, idx, weights), step(x * 2, idx, weights), rtol=0, atol=0)
    close_buffers(release_graphs=True)
    dist.destroy_process_group()


def attempt(arguments: list[str], timeout: float) -> tuple[bool, str]:
    """Run this script with ``arguments`` in a process of its own; whether it came through, and how it ended."""
    environment = {"EP_DISABLE_GIN": "1", "NCCL_CUMEM_ENABLE": "1", **os.environ}
    command = [sys.executable, __file__, *arguments]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return False, f"hung for {timeout:.0f} s"
    if ended.returncode == 0:
        return True, "works"
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "Error" in line or "error" in line]
    said = lines[-1].strip() if lines else "no error text"
    return False, f"exit code {ended.returncode}: {said[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each attempt")
    parser.add_argument("--attempt", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attempt:
        kinds: dict[str, Callable[..., None]] = {"raw": raw, "ours": ours}
        kinds[args.attempt[0]](*args.attempt[1:])
        return
    for mode in ("direct", "hybrid"):
        for where in ("outside", "inside"):
            _, text = attempt(["--attempt", "raw", where, mode], args.timeout)
            print(f"ElasticBuffer, {mode}, {where} a capture: {text}", flush=True)
    through = True
    for mode in ("direct", "hybrid"):
        works, text = attempt(["--attempt", "ours", mode], args.timeout)
        print(f"prepared before, {mode}, step captured and replayed: {text}", flush=True)
        through &= works
    sys.exit(0 if through else 1)


if __name__ == "__main__":
    main()
