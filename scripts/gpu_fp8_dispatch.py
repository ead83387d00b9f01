"""Time and bytes of FP8 against bfloat16 dispatch, in one run.

    python scripts/gpu_fp8_dispatch.py                                       # one rank; prints Markdown
    python scripts/gpu_fp8_dispatch.py --shapes 8192x2048,4096x7168 --num-sms 24
    torchrun --standalone --nproc-per-node 2 scripts/gpu_fp8_dispatch.py     # two GPUs
    python scripts/gpu_fp8_dispatch.py --device cpu --shapes 64x256 --rounds 2   # that it runs at all

For each shape and layout, K 8 of 128 experts: the buffer's dispatch alone (bfloat16 rows, or a pair that is quantised
already), ``fused_dispatch`` (FP8: with the quantisation, and with the de-quantisation where rows are handed on in
bfloat16), and forward with backward of dispatch and combine. Milliseconds are medians of rank 0 between CUDA events,
rounds interleaved; bytes are what this rank's tokens carry to ranks, itself included, rows with scales.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_times import medians, milliseconds
from torch import Tensor

from megatron_moe_v2 import FlexTokenDispatcher, close_buffers, fused_combine, fused_dispatch, prepare_buffer
from megatron_moe_v2.fp8 import ScaleFormat, dequantize, quantize

NUM_TOPK, NUM_EXPERTS = 8, 128

WIRES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8, float32 scales, handed on": {"fp8": ScaleFormat(column_major=True), "dequantize": False},
    "FP8, packed scales, handed on": {"fp8": ScaleFormat(kind="ue8m0", column_major=True), "dequantize": False},
    "FP8, float32 scales, de-quantised": {"fp8": ScaleFormat()},
    "FP8, de-quantised, gradient in FP8": {"fp8": ScaleFormat(), "fp8_backward": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "token": {"layout": "token"},
    "expert, 128": {"layout": "expert", "expert_alignment": 128},
}


class Scene:
    """One shape: inputs with gradients, and what comes from above."""

    def __init__(self, tokens: int, hidden: int, device: str) -> None:
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        self.x = torch.randn(tokens, hidden, device=device, generator=draw).bfloat16()
        weights, self.idx = torch.rand(tokens, NUM_EXPERTS, device=device, generator=draw).topk(NUM_TOPK)
        self.weights = weights.softmax(-1)
        self.upstream = torch.randn(tokens, hidden, device=device, generator=draw).bfloat16()
        owners = self.idx // (NUM_EXPERTS // dist.get_world_size())
        self.copies = int(torch.zeros(tokens, dist.get_world_size(), device=device).scatter_(1, owners, 1.0).sum())

    def row_bytes(self, fp8: ScaleFormat | None) -> int:
        if fp8 is None:
            return 2 * self.x.shape[1]
        rows = quantize(self.x[:1], fp8)
        return rows.data.shape[1] + 4 * rows.scales.shape[1]

    def raw(self, entry: Any, layout: dict[str, Any], fp8: ScaleFormat | None = None, **_: Any) -> object:
        """The buffer's own dispatch, as ``fused_dispatch`` calls it."""
        if fp8 is None:
            x: Any = self.x
        elif fp8.kind in self.pairs:
            x = self.pairs[fp8.kind]
        else:
            x = self.pairs[fp8.kind] = quantize(self.x, ScaleFormat(kind=fp8.kind)).pair
        expand = layout["layout"] == "expert"
        more = {} if fp8 is None else {"use_tma_aligned_col_major_sf": fp8.column_major}
        return entry.buffer.dispatch(
            x,
            topk_idx=self.idx,
            topk_weights=self.weights,
            num_experts=NUM_EXPERTS,
            num_max_tokens_per_rank=entry.spec.num_max_tokens_per_rank,
            expert_alignment=layout.get("expert_alignment", 1),
            num_sms=entry.num_sms_for(NUM_EXPERTS, NUM_TOPK, expand),
            do_expand=expand,
            do_zero_padding=layout.get("expert_alignment", 1) > 1,
            **more,
        )

    pairs: dict[str, tuple[Tensor, Tensor]]

    def forward(self, layout: dict[str, Any], wire: dict[str, Any]) -> object:
        with torch.no_grad():
            return fused_dispatch(self.x, self.idx, self.weights, NUM_EXPERTS, None, **layout, **wire)

    def whole(self, layout: dict[str, Any], wire: dict[str, Any]) -> None:
        x = self.x.detach().requires_grad_()
        rows, _, _, _, handle = fused_dispatch(x, self.idx, self.weights, NUM_EXPERTS, None, **layout, **wire)
        y, _ = fused_combine(rows if isinstance(rows, Tensor) else rows.anchor, None, handle)
        y.backward(self.upstream)

    def grouped(self, layout: dict[str, Any], wire: dict[str, Any]) -> object:
        """With what a dispatcher does to group rows by expert."""
        dispatcher = FlexTokenDispatcher(num_experts=NUM_EXPERTS, **layout, **wire)
        with torch.no_grad():
            return dispatcher.dispatch(self.x, self.idx, self.weights).tokens


def measure(scene: Scene, entry: Any, device: str, rounds: int) -> None:
    scene.pairs = {}
    first = dist.get_rank() == 0
    for name, layout in LAYOUTS.items():
        phases = {
            "dispatch": {wire: partial(scene.raw, entry, layout, **options) for wire, options in WIRES.items()},
            "fused_dispatch": {wire: partial(scene.forward, layout, options) for wire, options in WIRES.items()},
            "grouped by expert": {wire: partial(scene.grouped, layout, options) for wire, options in WIRES.items()},
            "forward + backward": {wire: partial(scene.whole, layout, options) for wire, options in WIRES.items()},
        }
        measure = partial(milliseconds, device=device)
        times = {phase: medians(runs, rounds, measure) for phase, runs in phases.items()}
        if not first:
            continue
        tokens, hidden = scene.x.shape
        print(f"\n{tokens} x {hidden}, {name} layout\n")
        print(f"| wire | MB | of bf16 | {' | '.join(f'{phase}, ms' for phase in phases)} |")
        print("|---" * (3 + len(phases)) + "|")
        plain = scene.row_bytes(None)
        for wire, options in WIRES.items():
            row = scene.row_bytes(options.get("fp8"))
            columns = " | ".join(f"{times[phase][wire]:.3f}" for phase in phases)
            print(f"| {wire} | {row * scene.copies / 1e6:.1f} | {row / plain:.2f} | {columns} |", flush=True)


def error_of(scene: Scene) -> float:
    """Relative error that the quantisation of these tokens makes."""
    left = dequantize(quantize(scene.x))
    return float((left.float() - scene.x.float()).norm() / scene.x.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x2048,4096x7168", help="TOKENSxHIDDEN, with commas between")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-sms", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}.items():
        os.environ.setdefault(name, value)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    os.environ.setdefault("MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK", str(max(tokens for tokens, _ in shapes)))
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    for number, (tokens, hidden) in enumerate(shapes):
        entry = prepare_buffer(hidden=hidden, num_topk=NUM_TOPK, num_sms=options.num_sms)
        scene = Scene(tokens, hidden, options.device)
        if dist.get_rank() == 0:
            if number == 0:
                name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
                print(f"{name}, {dist.get_world_size()} ranks, torch {torch.__version__}; {entry.describe()}")
            print(f"\nquantisation of {tokens} x {hidden}: relative error {error_of(scene):.4f}")
        measure(scene, entry, options.device, options.rounds)
        close_buffers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
