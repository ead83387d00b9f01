"""A recomputed mixture-of-experts layer with its layout kept (``layout_cache``) against full recomputation.

    torchrun --standalone --nproc-per-node 2 scripts/recompute_bench.py      # two ranks, on a CPU too
    torchrun --standalone --nproc-per-node 2 scripts/recompute_bench.py --tokens 4096 --hidden 2048 --topk 8 \\
        --experts 128

Two things are timed, on the slowest rank, as medians of calls that take turns, so that both meet the same machine:
the dispatch that is recomputed, by itself, and forward and backward of the whole layer in a checkpoint. The experts are
one SwiGLU-free pair of matrix products over all rows of a rank; ``--ffn 0`` leaves them out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import parallel

from megatron_moe_v2 import FlexTokenDispatcher, RoutingLayout, close_buffers, prepare_buffer


def times(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call on the slowest rank. Collective over the group."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 3):
        for name, call in calls.items():
            dist.barrier()
            _wait(device)
            started = time.perf_counter()
            call()
            _wait(device)
            if turn >= 3:
                seen[name].append(1e3 * (time.perf_counter() - started))
    medians = torch.tensor([statistics.median(values) for values in seen.values()], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(calls, medians.tolist(), strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bench:
    """A layer of one layout and its inputs on this rank."""

    def __init__(self, args: argparse.Namespace, ranks: parallel.Ranks, layout: str, static: bool, reentrant: bool):
        self.reentrant = reentrant
        self.dispatcher = FlexTokenDispatcher(
            num_experts=args.experts,
            layout=layout,  # type: ignore[arg-type]
            static_shapes=static,
        )
        device, dtype = ranks.device, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(ranks.rank)
        options = {"device": device, "generator": generator}
        self.x = torch.randn(args.tokens, args.hidden, dtype=dtype, **options).requires_grad_()
        probs = torch.rand(args.tokens, args.experts, **options).softmax(-1)
        self.weights, self.idx = probs.topk(args.topk, dim=-1)
        self.up = torch.randn(args.hidden, args.ffn, dtype=dtype, **options).requires_grad_() if args.ffn else None

    def layer(self, x: Tensor, kept: RoutingLayout | None) -> Tensor:
        sent = self.dispatcher.dispatch(x, self.idx, self.weights, layout_cache=kept)
        rows = sent.tokens
        if self.up is not None:
            rows = torch.relu(rows @ self.up) @ self.up.T
        return self.dispatcher.combine(rows, sent)

    def step(self, kept: RoutingLayout | None) -> None:
        """Forward and backward, with the layer recomputed in backward."""
        y = checkpoint(self.layer, self.x, kept, use_reentrant=self.reentrant, preserve_rng_state=False)
        y.sum().backward()
        self.x.grad = None

    def stored(self) -> None:
        """Forward and backward without recomputation, for scale."""
        self.layer(self.x, None).sum().backward()
        self.x.grad = None

    def dispatches(self) -> dict[str, Callable[[], object]]:
        """The dispatch as it is recomputed in full, and with the layout of an earlier one."""
        kept = RoutingLayout()
        self.dispatcher.dispatch(self.x, self.idx, self.weights, layout_cache=kept)
        return {
            "full": lambda: self.dispatcher.dispatch(self.x, self.idx, self.weights),
            "kept": lambda: self.dispatcher.dispatch(self.x, self.idx, self.weights, layout_cache=kept),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="a rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=0, help="columns of the experts' matrix")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--reentrant", action="store_true")
    parser.add_argument("--static", action="store_true", help="static shapes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    ranks = parallel.start(args.device)
    entry = prepare_buffer(hidden=args.hidden, num_topk=args.topk, num_max_tokens_per_rank=args.tokens)
    if ranks.is_first:
        print(entry.describe())
        shapes = f"{args.tokens} tokens a rank, hidden {args.hidden}, top-{args.topk} of {args.experts}"
        print(f"{ranks.world} ranks, {shapes}, ffn {args.ffn}, {'static' if args.static else 'synchronised'} shapes")
    for layout in ("token", "expert"):
        bench = Bench(args, ranks, layout, args.static, args.reentrant)
        dispatch = times(bench.dispatches(), ranks.device, args.repeats)
        layer = times(
            {
                "full": lambda bench=bench: bench.step(None),  # type: ignore[misc]
                "kept": lambda bench=bench: bench.step(RoutingLayout()),  # type: ignore[misc]
                "stored": bench.stored,
            },
            ranks.device,
            args.repeats,
        )
        if ranks.is_first:
            for what, took in (("recomputed dispatch", dispatch), ("layer, forward and backward", layer)):
                ratio = took["full"] / took["kept"]
                print(f"{layout} layout, {what}: full {took['full']:.3f} ms, kept {took['kept']:.3f} ms, {ratio:.2f}x")
            print(f"{layout} layout, layer without recomputation: {layer['stored']:.3f} ms", flush=True)
    close_buffers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
