"""What each rank does in the tests of FP8 dispatch: on the CPU over the embedded buffer, on GPUs over the real one.

Every function takes its place, from which alone the device comes, and returns what was wrong, a line each. Experts are
elementwise, so that a row's result depends on nothing but the row.

Legend: T_r tokens of rank r, H hidden, W stored width, K top-k, E experts, L local experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from scene import buffers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_moe_v2 import FlexTokenDispatcher, RoutingLayout, close_buffers, fused_combine, fused_dispatch
from megatron_moe_v2.fp8 import QuantizedRows, ScaleFormat, dequantize, quantize

FORMATS = {
    f"{kind} {'columns' if columns else 'rows'}": ScaleFormat(kind=kind, column_major=columns)
    for kind in ("float32", "ue8m0")
    for columns in (False, True)
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "token": {"layout": "token"},
    "expert": {"layout": "expert"},
    "expert aligned": {"layout": "expert", "expert_alignment": 4},
}
OF_THE_DISPATCHER = {**LAYOUTS, "token aligned": {"layout": "token", "expert_alignment": 4}}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a case runs.

    Attributes:
        device: ``cpu`` with the embedded buffer, ``cuda`` with the backend that the environment names.
        hidden: H.
        ceiling: M.
        dtype: of the tokens.
        adversary: seed of the embedded buffer's adversary.
        topk, local_experts: K and L.
        kinds: of the scales; real buffers compile for each.
    """

    device: str = "cpu"
    hidden: int = 200
    ceiling: int = 12
    dtype: torch.dtype = torch.bfloat16
    adversary: int | None = None
    topk: int = 3
    local_experts: int = 2
    kinds: tuple[str, ...] = ("float32", "ue8m0")

    @property
    def formats(self) -> dict[str, ScaleFormat]:
        return {name: fmt for name, fmt in FORMATS.items() if fmt.kind in self.kinds}

    @contextmanager
    def set_up(self, rank: int, world: int) -> Iterator[None]:
        """Inside, the default group and an empty pool; the group is there already on the CPU."""
        if self.device == "cpu":
            with buffers(adversary=self.adversary, MAX_TOKENS_PER_RANK=self.ceiling):
                yield
            return
        from gpu_cases import join_nccl

        os.environ["MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK"] = str(self.ceiling)
        join_nccl(rank, world)
        yield
        close_buffers(release_graphs=True)
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All ranks' tensors, equal in every process; ``name`` says what is special.

    Attributes:
        x: per rank ``[T_r, H]``.
        idx, weights: per rank ``[T_r, K]``; some selections are none.
        upstream: per rank ``[T_r, H]``, gradient of the combine's result.
        scale, bias: ``[E, H]`` of the experts.
    """

    name: str
    x: list[Tensor]
    idx: list[Tensor]
    weights: list[Tensor]
    upstream: list[Tensor]
    scale: Tensor
    bias: Tensor


def inputs(place: Place, world: int) -> list[Inputs]:
    shares = {"ragged": (5, 12, 7, 1), "a rank without tokens": (7, 0, 3, 12), "nothing for one rank": (4, 6, 12, 5)}
    made = []
    for number, (name, twelfths) in enumerate(shares.items()):
        draw = torch.Generator().manual_seed(number)
        experts = place.local_experts * world
        x, idx, weights, upstream = [], [], [], []
        for share in twelfths[:world]:
            tokens = place.ceiling * share // 12
            rows = (
                torch.randn(tokens, place.hidden, generator=draw) * torch.rand(tokens, 1, generator=draw).mul(9).exp2()
            )
            x.append(rows.to(place.dtype).to(place.device))
            scores = torch.rand(tokens, experts, generator=draw)
            if name.startswith("nothing") and world > 1:
                scores[:, : place.local_experts] = -1.0
            count = min(place.topk, experts)
            if name.startswith("nothing") and world > 1:
                count = min(count, experts - place.local_experts)
            chosen = scores.topk(count, dim=1).indices
            chosen = chosen.masked_fill(torch.rand(chosen.shape, generator=draw) < 0.25, -1)
            chosen[2::5] = -1
            idx.append(chosen.to(place.device))
            weights.append(torch.rand(chosen.shape, generator=draw).add(0.1).to(place.device))
            upstream.append(torch.randn(rows.shape, generator=draw).to(place.dtype).to(place.device))
        stacked = torch.randn(2, experts, place.hidden, generator=draw).mul(0.1).to(place.dtype).to(place.device)
        made.append(
            Inputs(name=name, x=x, idx=idx, weights=weights, upstream=upstream, scale=stacked[0], bias=stacked[1])
        )
    return made


# What travels.


def received(rank: int, world: int, place: Place) -> list[str]:
    """Every layout, scale format and way to size: bytes and scales are the sender's."""
    wrong: list[str] = []
    with place.set_up(rank, world):
        for given in inputs(place, world):
            for layout, options in LAYOUTS.items():
                for name, fmt in place.formats.items():
                    sent = [quantize(x, fmt) for x in given.x]
                    for static in (False, True):
                        for wait in (static, True):
                            got: Any = fused_dispatch(
                                given.x[rank],
                                given.idx[rank],
                                given.weights[rank],
                                len(given.scale),
                                None,
                                **options,
                                static_shapes=static,
                                fp8=fmt,
                                dequantize=False,
                                wait=wait,
                            )
                            got = got if wait else got.wait()
                            case = f"{given.name}, {layout}, {name}, static {static}, wait {wait}"
                            found = _not_the_sender_s(got, sent, given, rank, place)
                            wrong += [f"{case}: {line}" for line in found]
    return wrong


def _not_the_sender_s(got: Any, sent: list[QuantizedRows], given: Inputs, rank: int, place: Place) -> Iterator[str]:
    rows, local_idx, weights, _, handle = got
    ep, fmt = handle.ep_handle, sent[0].format
    if not isinstance(rows, QuantizedRows) or rows.format != fmt or rows.hidden != place.hidden:
        yield f"is {rows}"
        return
    if rows.anchor is None or rows.anchor.dtype != place.dtype or rows.anchor.any():
        yield f"anchor is {rows.anchor}"
    if fmt.column_major and len(rows.data) > 1 and rows.scales.shape[1] > 1:
        columns = (1, -(-len(rows.data) // 4) * 4)
        if rows.scales.stride() != columns:
            yield f"scales have strides {rows.scales.stride()}, expected {columns}"
    local = slice(rank * place.local_experts, (rank + 1) * place.local_experts)
    for_me = [((idx >= local.start) & (idx < local.stop)) for idx in given.idx]
    wanted = {(source, token) for source, mine in enumerate(for_me) for token in mine.any(1).nonzero()[:, 0].tolist()}
    n = int(ep.psum_num_recv_tokens_per_scaleup_rank[-1])
    keys = [divmod(key, place.ceiling) for key in ep.recv_src_metadata[:n, 0].tolist()]
    if len(keys) != len(wanted) or set(keys) != wanted:
        yield f"tokens of {sorted(keys)}, expected {sorted(wanted)}"
        return
    starts = [sum(map(len, given.x[:source])) for source in range(len(given.x))]
    from_row = torch.tensor([starts[source] + token for source, token in keys], dtype=torch.int64)
    mine = torch.cat(for_me).cpu()[from_row]
    if ep.do_expand:
        to_row = ep.recv_src_metadata[:n, 2:].cpu()[mine].long()
        from_row = from_row[:, None].expand(mine.shape)[mine]
    else:
        to_row = torch.arange(n)
    for what, kind in (("data", torch.uint8), ("scales", torch.int32)):
        one = getattr(rows, what).view(kind).cpu()[to_row]
        other = torch.cat([getattr(pair, what).view(kind).cpu() for pair in sent])[from_row]
        if not torch.equal(one, other):
            yield f"{what} of {(one != other).any(1).sum()} rows"
    all_weights = torch.cat(given.weights).cpu()
    if ep.do_expand:
        lane = mine.nonzero()[:, 1]
        same = torch.equal(weights.cpu()[to_row], all_weights[from_row, lane])
    else:
        same = torch.equal(weights.cpu()[to_row][mine], all_weights[from_row][mine])
    if not same:
        yield "weights"
    if ep.do_expand and ep.expert_alignment > 1:
        counts = ep.num_unaligned_recv_tokens_per_expert.tolist()
        start = 0
        for count in counts:
            end = start + -(-count // ep.expert_alignment) * ep.expert_alignment
            gap = slice(start + count, end)
            if rows.data[gap].view(torch.uint8).any() or rows.scales[gap].contiguous().view(torch.int32).any():
                yield f"padding rows {gap} are not zero"
            start = end
    if local_idx is not None and bool((local_idx[n:] >= 0).any()):
        yield "rows that nobody sent have experts"


# Gradients.


class FromRows(torch.autograd.Function):
    """The experts' own de-quantisation: the anchor is the differentiable input, and gets the rows' gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: QuantizedRows) -> Tensor:
        return dequantize(rows, anchor.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None  # anchor, rows


class RoundedGradient(torch.autograd.Function):
    """Identity; its gradient is what is left of it after FP8."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, fmt: ScaleFormat) -> Tensor:
        ctx.fmt = fmt
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return dequantize(quantize(grads[0].contiguous(), ctx.fmt), grads[0].dtype), None


def experts(rows: Any, counts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Each expert on its rows; those beyond the counts are not read and come out as NaN."""
    if isinstance(rows, QuantizedRows):
        assert rows.anchor is not None
        assert not rows.anchor.any(), "the anchor is zeros"
        rows = FromRows.apply(rows.anchor, rows)
    each = counts.cpu().long()
    total = int(each.sum())
    which = torch.arange(len(each)).repeat_interleave(each).to(rows.device)
    out = torch.tanh(rows[:total] * scale[which] + bias[which])
    return torch.cat([out, torch.full_like(rows[total:], float("nan"))])


Results = dict[str, Tensor | None]


def step(
    given: Inputs,
    rank: int,
    place: Place,
    how: str,
    *,
    fmt: ScaleFormat | None,
    rounded: ScaleFormat | None = None,
    recompute: str = "",
    **options: Any,
) -> Results:
    """Forward and backward of a layer with FP8 of ``fmt``, or without on what quantising to ``rounded`` leaves.

    Args:
        how: ``functions`` (expert layout without waiting at once), or one of :data:`OF_THE_DISPATCHER`.
        recompute: ``""``, ``reentrant``, ``again`` or ``kept``: with the layout kept.
    """
    local = slice(rank * place.local_experts, (rank + 1) * place.local_experts)
    x = given.x[rank] if rounded is None else dequantize(quantize(given.x[rank], rounded), place.dtype)
    leaves = [x.clone(), given.weights[rank].clone(), given.scale[local].clone(), given.bias[local].clone()]
    x, weights, scale, bias = (leaf.requires_grad_() for leaf in leaves)
    round_gradient = options.pop("round_gradient", False)
    fp8 = {"fp8": fmt, **options} if fmt is not None else {k: v for k, v in options.items() if k == "static_shapes"}
    kept = RoutingLayout() if recompute == "kept" else None

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        if how == "functions":
            pending: Any = fused_dispatch(
                x,
                given.idx[rank],
                weights,
                len(given.scale),
                None,
                layout="expert",
                wait=False,
                layout_cache=kept,
                **fp8,
            )
            rows, _, row_weights, _, handle = pending.wait()
            out = experts(rows, handle.padded_tokens_per_expert, scale, bias) * row_weights[:, None].to(place.dtype)
            y = fused_combine(out, None, handle, wait=False).wait()[0]
        else:
            dispatcher = FlexTokenDispatcher(num_experts=len(given.scale), **OF_THE_DISPATCHER[how], **fp8)
            sent = dispatcher.dispatch(x, given.idx[rank], weights, layout_cache=kept)
            y = dispatcher.combine(experts(sent.tokens, sent.padded_tokens_per_expert, scale, bias), sent)
        if round_gradient:
            assert rounded is not None
            rounded_y: Tensor = RoundedGradient.apply(y, rounded)
            return rounded_y
        return y

    y: Tensor = (
        checkpoint(layer, x, weights, use_reentrant=recompute == "reentrant") if recompute else layer(x, weights)
    )
    y.backward(given.upstream[rank])
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "scale": scale.grad, "bias": bias.grad}


def differences(got: Results, wanted: Results) -> Iterator[str]:
    """Tokens' and weights' results bit by bit; sums over rows, whose order is free, nearly."""
    for name, other in wanted.items():
        one = got[name]
        assert one is not None
        assert other is not None
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{name} is {one.dtype} {list(one.shape)}, expected {other.dtype} {list(other.shape)}"
        elif name in ("scale", "bias"):
            if not (one.float() - other.float()).norm() <= 2e-2 * max(float(other.float().norm()), 1.0):
                yield f"gradient of {name} is off"
        elif not torch.equal(one, other):
            yield f"{name} differs by {float((one.float() - other.float()).abs().max()):.3g}"


def gradients(rank: int, world: int, place: Place) -> list[str]:
    """Every way to dispatch in FP8 against the bfloat16 path on what the quantisation leaves."""
    wrong: list[str] = []
    with place.set_up(rank, world):
        for given in inputs(place, world):
            for how in ("functions", *OF_THE_DISPATCHER):
                for kind in place.kinds:
                    for static in (False, True):
                        rounded = ScaleFormat(kind=kind)  # type: ignore[arg-type]
                        wanted = step(given, rank, place, how, fmt=None, rounded=rounded, static_shapes=static)
                        for columns in (False, True):
                            fmt = ScaleFormat(kind=kind, column_major=columns)  # type: ignore[arg-type]
                            opened = columns == static  # both with both
                            got = step(given, rank, place, how, fmt=fmt, dequantize=opened, static_shapes=static)
                            case = f"{given.name}, {how}, {fmt}, static {static}, dequantize {opened}"
                            wrong += [f"{case}: {line}" for line in differences(got, wanted)]
    return wrong


def gradients_in_fp8(rank: int, world: int, place: Place) -> list[str]:
    """The gradient of the combine in FP8 too."""
    wrong: list[str] = []
    with place.set_up(rank, world):
        for given in inputs(place, world):
            for how in ("functions", *OF_THE_DISPATCHER):
                for fmt in list(place.formats.values())[::3] or place.formats.values():
                    wanted = step(given, rank, place, how, fmt=None, rounded=fmt, round_gradient=True)
                    got = step(given, rank, place, how, fmt=fmt, fp8_backward=True)
                    wrong += [f"{given.name}, {how}, {fmt}: {line}" for line in differences(got, wanted)]
    return wrong


def recomputed(rank: int, world: int, place: Place) -> list[str]:
    """The layer in a checkpoint, with and without the layout kept."""
    wrong: list[str] = []
    with place.set_up(rank, world):
        for given in inputs(place, world):
            for how in ("functions", "token", "expert aligned"):
                for static in (False, True):
                    for recompute in ("reentrant", "again", "kept"):
                        fmt = ScaleFormat(kind=place.kinds[0], column_major=True)  # type: ignore[arg-type]
                        wanted = step(given, rank, place, how, fmt=None, rounded=fmt, static_shapes=static)
                        got = step(
                            given,
                            rank,
                            place,
                            how,
                            fmt=fmt,
                            static_shapes=static,
                            recompute=recompute,
                            dequantize=static,
                        )
                        case = f"{given.name}, {how}, static {static}, {recompute}"
                        wrong += [f"{case}: {line}" for line in differences(got, wanted)]
    return wrong


# Captured in a CUDA graph.


def captured(rank: int, world: int, place: Place) -> list[str]:
    """Static shapes under a CUDA graph capture, replayed with other tokens; on the CPU the same calls as they are."""
    wrong: list[str] = []
    with place.set_up(rank, world), torch.inference_mode():
        first, second = inputs(place, world)[0], inputs(place, world)[0]
        local = slice(rank * place.local_experts, (rank + 1) * place.local_experts)
        scale = first.scale[local]
        for how in OF_THE_DISPATCHER:
            for fmt in place.formats.values():
                dispatcher = FlexTokenDispatcher(
                    num_experts=len(first.scale), static_shapes=True, fp8=fmt, **OF_THE_DISPATCHER[how]
                )

                def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
                    sent = dispatcher.dispatch(x, idx, weights)  # noqa: B023
                    return dispatcher.combine(sent.tokens * scale[0], sent)  # noqa: B023

                held = [first.x[rank].clone(), first.idx[rank].clone(), first.weights[rank].clone()]
                replay, out = _graph_of(layer, held, place)
                fresh = [second.x[rank].flip(1) * 3, second.idx[rank].flip(0), second.weights[rank].flip(0)]
                for one, other in zip(held, fresh, strict=True):
                    one.copy_(other)
                replay()
                if not torch.equal(out(), layer(*fresh)):
                    wrong.append(f"{how}, {fmt}: the replay differs from eager")
    return wrong


def _graph_of(layer: Any, held: list[Tensor], place: Place) -> tuple[Any, Any]:
    """A replay and a reader of its result."""
    if place.device == "cpu":
        return lambda: None, lambda: layer(*held)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(*held)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(*held)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay, lambda: y
