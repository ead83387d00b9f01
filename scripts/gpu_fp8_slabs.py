"""Bandwidth of the FP8 and slab kernels, each beside a plain copy measured in the same run.

    python scripts/gpu_fp8_slabs.py                        # prints Markdown
    python scripts/gpu_fp8_slabs.py --groups 16,32,64      # other sizes of a quantising program

Quantisation and de-quantisation of [8192, 7168]; repack and un-repack of 64 local experts x 512 rows x 7168. Bytes are
those that must be read and written, scales included; times are those of the kernels alone (torch.profiler) with a cold
second-level cache: some take the host longer to launch than the GPU to run. Share is of the copy's bytes a second; the
copy moves the slabs' bytes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import triton
from gpu_times import kernels_of

from megatron_moe_v2 import fp8, slabs
from megatron_moe_v2.buffers import kernels_fp8

FORMATS = [fp8.ScaleFormat(kind=kind, column_major=order) for kind in ("float32", "ue8m0") for order in (False, True)]


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def name_of(fmt: fp8.ScaleFormat) -> str:
    return f"{fmt.kind}, {'column' if fmt.column_major else 'row'}-major"


def kernel_ms(function: Callable[[], object], rounds: int = 20) -> float:
    """Milliseconds in the kernels of one call, its data not in the second-level cache."""
    cache = torch.empty(2**26, dtype=torch.int32, device="cuda")
    function()

    def run() -> None:
        for _ in range(rounds):
            cache.bitwise_not_()  # a kernel that nothing else here uses
            function()

    return sum(sum(times) for name, times in kernels_of(run).items() if "bitwise_not" not in name) / rounds


class Table:
    """Prints a line for each function; the first is the copy that the others are compared with."""

    def __init__(self) -> None:
        self.copy = 0.0
        print("| | µs | GB/s | of a copy |\n|---|---|---|---|")

    def line(self, name: str, moved: int, function: Callable[[], object]) -> None:
        milliseconds = kernel_ms(function)
        speed = moved / milliseconds / 1e6
        self.copy = self.copy or speed
        print(f"| {name} | {milliseconds * 1e3:.1f} | {speed:.0f} | {speed / self.copy:.2f} |", flush=True)


def quantisation(table: Table, groups: list[int]) -> None:
    x = torch.randn(8192, 7168, device="cuda").bfloat16()
    spoiled = x.clone()
    spoiled[:, 5] = torch.inf
    for fmt in FORMATS:
        rows = fp8.quantize(x, fmt)
        moved = nbytes(x, *rows.pair)
        table.line(f"quantise to {name_of(fmt)}", moved, lambda fmt=fmt: fp8.quantize(x, fmt))
        table.line(f"de-quantise from {name_of(fmt)}", moved, lambda rows=rows: fp8.dequantize(rows))
    shape = kernels_fp8.shape_of_program
    for fmt in FORMATS if groups else []:
        for size, warps, together in itertools.product(groups, (1, 2, 4), (4, 8) if fmt.column_major else (1,)):
            kernels_fp8.shape_of_program = lambda *_, shape=(size, together, warps): shape
            note = f"{size} groups, {warps} warps, {together} rows"
            table.line(f"quantise to {name_of(fmt)}, {note}", moved, lambda fmt=fmt: fp8.quantize(x, fmt))
    kernels_fp8.shape_of_program = shape
    table.line("quantise with an infinity in each row", moved, lambda: fp8.quantize(spoiled))


def slab_kernels(table: Table) -> None:
    experts, rows_each, hidden = 64, 512, 7168
    num_rows = experts * rows_each
    counts = torch.full((experts,), rows_each, dtype=torch.int32, device="cuda")
    segments = slabs.ExpertSegments(psum=counts.cumsum(0).int(), counts=counts, num_rows=num_rows, alignment=128)
    flag = slabs.OverflowFlag("cuda")
    rows = torch.randn(num_rows, hidden, device="cuda").bfloat16()
    weights = torch.rand(num_rows, device="cuda")
    slab, _ = slabs.repack(rows, segments, max_rows=rows_each, overflow=flag)
    both = nbytes(rows, slab)
    target = torch.empty_like(rows)
    table.line("copy", both, lambda: target.copy_(rows))
    table.line("repack", both, lambda: slabs.repack(rows, segments, max_rows=rows_each, overflow=flag))
    table.line("un-repack", both, lambda: slabs.unrepack(slab, segments))
    table.line("un-repack, weighted", both, lambda: slabs.unrepack(slab, segments, weights))
    leaves = slab.detach().requires_grad_(), weights.requires_grad_()
    back = slabs.unrepack(leaves[0], segments, leaves[1])
    table.line(
        "backward of weighted un-repack",
        both + nbytes(slab),
        lambda: torch.autograd.grad(back, leaves, rows, retain_graph=True),
    )
    for fmt in FORMATS:
        pair = fp8.quantize(rows, fmt)
        moved = 2 * nbytes(*pair.pair)
        packed, _ = slabs.repack(pair, segments, max_rows=rows_each, overflow=flag)
        table.line(
            f"repack FP8, {name_of(fmt)}",
            moved,
            lambda pair=pair: slabs.repack(pair, segments, max_rows=rows_each, overflow=flag),
        )
        table.line(f"un-repack FP8, {name_of(fmt)}", moved, lambda packed=packed: slabs.unrepack(packed, segments))
    table.line("row experts", num_rows * 4, lambda: slabs.row_experts(segments))
    flag.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="", help="sizes of a quantising program, in groups of 128, to compare")
    groups = [int(size) for size in parser.parse_args().groups.split(",") if size]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}\n")
    table = Table()
    slab_kernels(table)
    quantisation(table, groups)


if __name__ == "__main__":
    main()
