"""What each rank does in the GPU tests of faults, life cycle and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import E, H, K, M, join_nccl

Seen = dict[str, tuple[str, str, float]]


def _attempt(seen: Seen, case: str, action: Callable[[], Any]) -> None:
    """Note type, text and seconds of what ``action`` raises."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        seen[case] = (type(error).__name__, str(error), time.monotonic() - start)
    else:
        seen[case] = ("nothing", "", time.monotonic() - start)


def _batch(tokens: int, hidden: int = H) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weights, idx = torch.rand(tokens, E, device="cuda").topk(K)
    return x, idx, weights


def _works() -> None:
    from megatron_moe_v2 import fused_combine, fused_dispatch

    x, idx, weights = _batch(64)
    recv_x, _, _, _, handle = fused_dispatch(x, idx, weights, E, None)
    fused_combine(recv_x, None, handle)
    torch.cuda.synchronize()


def disagreements(rank: int, world: int) -> Seen:
    """Ranks that ask for different things, one after another in the same processes."""
    os.environ["MCORE_DEEPEP_V2_BACKEND"] = "deepep_v2"
    join_nccl(rank, world)
    from megatron_moe_v2 import close_buffers, prepare_buffer

    seen: Seen = {}
    odd = rank == 1
    _attempt(seen, "ceilings", lambda: prepare_buffer(hidden=H, num_topk=K, num_max_tokens_per_rank=64 if odd else M))
    for case, name, value in (
        ("modes", "MODE", "hybrid"),
        ("SM counts", "NUM_SMS", "10"),
        ("backends", "BACKEND", "embedded"),
    ):
        variable = f"MCORE_DEEPEP_V2_{name}"
        before = os.environ[variable]
        os.environ[variable] = value if odd else before
        _attempt(seen, case, lambda: prepare_buffer(hidden=H, num_topk=K))
        os.environ[variable] = before
    _attempt(seen, "then", _works)
    close_buffers()
    dist.destroy_process_group()
    return seen


def one_cannot_import(rank: int, world: int) -> Seen:
    if rank == 1:
        sys.modules["deep_ep"] = None  # type: ignore[assignment]
    join_nccl(rank, world)
    from megatron_moe_v2 import prepare_buffer

    seen: Seen = {}
    _attempt(seen, "import", lambda: prepare_buffer(hidden=H, num_topk=K))
    return seen


def misuse(rank: int, world: int) -> Seen:
    """Wrong calls that leave the buffer usable."""
    join_nccl(rank, world)
    import deep_ep

    from megatron_moe_v2 import close_buffers, fused_combine, fused_dispatch, prepare_buffer
    from megatron_moe_v2.buffers.deepep_v2 import GuardedElasticBuffer
    from megatron_moe_v2.pool import pool

    seen: Seen = {}

    def capture(action: Callable[[], Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
            action()
        graph.replay()
        torch.cuda.synchronize()

    _attempt(seen, "capture before prepare", lambda: capture(lambda: prepare_buffer(hidden=H, num_topk=K)))
    entry = prepare_buffer(hidden=H, num_topk=K)
    x, idx, weights = _batch(64)
    arguments = {"num_experts": E, "num_max_tokens_per_rank": M, "expert_alignment": 1, "num_sms": 8}

    def static() -> None:
        recv_x, _, _, handle, _ = entry.buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, do_cpu_sync=False, **arguments
        )
        entry.buffer.combine(recv_x, handle, num_sms=8)

    static()
    torch.cuda.synchronize()
    dist.barrier()
    _attempt(seen, "capture after prepare", lambda: capture(static))
    _attempt(seen, "capture of a synchronising dispatch", lambda: capture(_works))
    _works()
    seen["constructions"] = (str(pool.constructions), "", 0.0)
    overlap = deep_ep.EventOverlap(deep_ep.EventHandle())
    _attempt(
        seen,
        "event of the wrong kind",
        lambda: entry.buffer.dispatch(
            x, topk_idx=idx, previous_event=overlap, allocate_on_comm_stream=True, **arguments
        ),
    )
    _attempt(seen, "float32", lambda: fused_dispatch(x.float(), idx, weights, E, None))
    stream = torch.cuda.current_stream()
    kept = GuardedElasticBuffer._check_experts
    GuardedElasticBuffer._check_experts = lambda *_: None  # type: ignore[method-assign]
    _attempt(seen, "refused by DeepEP", lambda: fused_dispatch(x, idx, weights, E * world + 1, None, True, True))
    GuardedElasticBuffer._check_experts = kept  # type: ignore[method-assign]
    seen["stream"] = (str(torch.cuda.current_stream() == stream), "", 0.0)
    _attempt(seen, "next dispatch", _works)
    recv_x, _, _, _, handle = fused_dispatch(x, idx, weights, E, None)
    close_buffers()
    _attempt(seen, "combine after close", lambda: fused_combine(recv_x, None, handle))
    prepare_buffer(hidden=H, num_topk=K)
    dist.destroy_process_group()
    _attempt(seen, "close after the group", close_buffers)
    return seen


def too_many_rows(rank: int, world: int) -> Seen:
    """One rank's call is refused; the other waits for it in vain until its host time-out."""
    join_nccl(rank, world)
    from megatron_moe_v2 import fused_dispatch

    _works()
    seen: Seen = {}
    x, idx, weights = _batch(M + 1 if rank == 1 else M)
    _attempt(seen, "rows", lambda: fused_dispatch(x, idx, weights, E, None))
    if rank == 1:
        time.sleep(25)  # the one that fails stays, so that it is its word that the other one reads
    return seen


def killed(rank: int, world: int) -> Seen:
    """Rank 1 dies between two steps."""
    join_nccl(rank, world)
    _works()
    time.sleep(3)
    if rank == 1:
        os._exit(1)
    seen: Seen = {}
    _attempt(seen, "killed", _works)
    return seen


def cycles(rank: int, world: int, count: int, raw: bool) -> list[int]:
    """Free device bytes after each of ``count`` builds and closes, ours or DeepEP's own."""
    join_nccl(rank, world)
    import deep_ep

    from megatron_moe_v2 import close_buffers, prepare_buffer

    dist.all_reduce(torch.zeros(1, device="cuda"))
    free = []
    for _ in range(count):
        if raw:
            deep_ep.ElasticBuffer(
                dist.group.WORLD,
                num_max_tokens_per_rank=M,
                hidden=H,
                num_topk=K,
                allow_hybrid_mode=False,
                num_allocated_qps=17,
                explicitly_destroy=True,
            ).destroy()
        else:
            prepare_buffer(hidden=H, num_topk=K)
            close_buffers()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    dist.destroy_process_group()
    return free


def training_memory(rank: int, world: int, steps: int, tokens: int, hidden: int) -> list[tuple[int, int, float, float]]:
    """Per step: allocated and reserved device bytes, the process's resident megabytes, and seconds.

    Asynchronous and allocating on the communication stream, with as many rows as the router happens to send.
    """
    os.environ["MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK"] = str(tokens)
    join_nccl(rank, world)
    from megatron_moe_v2 import FlexTokenDispatcher, close_buffers

    dispatcher = FlexTokenDispatcher(num_experts=E, layout="expert", async_finish=True, allocate_on_comm_stream=True)
    experts = torch.randn(E // world, hidden, hidden // 4, device="cuda").bfloat16().requires_grad_()
    seen = []
    for step in range(steps):
        torch.manual_seed(step * world + rank)
        x, idx, weights = _batch(int(torch.randint(0, tokens + 1, ())), hidden)
        start = time.perf_counter()
        sent = dispatcher.dispatch(x.requires_grad_(), idx, weights.requires_grad_())
        parts = sent.tokens.split(sent.padded_tokens_per_expert.tolist())
        rows = torch.cat([part @ expert @ expert.T for part, expert in zip(parts, experts, strict=True)])
        dispatcher.combine(rows, sent).float().square().sum().backward()
        experts.grad = None
        del sent, parts, rows, x
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * 4096 / 2**20
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident, seconds))
    close_buffers()
    dist.destroy_process_group()
    return seen
