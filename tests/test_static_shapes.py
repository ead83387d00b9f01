"""Static shapes: the results of the synchronised path, whatever stands in rows that nobody sent; and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import RankPool
from scene import CEILING, Layer, Recorder, Scene, Step, buffers, close_to, leaves, raised_by, scene_for
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_moe_v2 import FlexTokenDispatcher, RoutingLayout, fused_combine, fused_dispatch, prepare_buffer
from megatron_moe_v2.pool import pool

LAYOUTS = {"token": 1, "token aligned": 4, "expert": 1, "expert aligned": 4}
COUNTS: dict[str, dict[str, Any]] = {
    "plenty": {"tokens": (5, 7, 3, 6)},
    "one empty": {"tokens": (6, 0, 4, 5)},
    "all to one": {"tokens": (CEILING, 5, 0, 7), "routing": "one rank"},
    "some masked": {"tokens": (8, 3, 5, 1), "routing": "masked"},
}


def dispatcher_for(scene: Scene, layout: str, static: bool, **options: Any) -> FlexTokenDispatcher:
    return FlexTokenDispatcher(
        num_experts=scene.num_experts,
        layout=layout.split()[0],  # type: ignore[arg-type]
        expert_alignment=LAYOUTS[layout],
        static_shapes=static,
        **options,
    )


def experts(tokens: Tensor, counts: Tensor, matrices: Tensor, biases: Tensor) -> Tensor:
    """Each expert on its rows; the rows beyond are not read, and come out as NaN."""
    each = counts.tolist()
    *parts, rest = tokens.split([*each, len(tokens) - sum(each)])
    rows = [torch.tanh(part @ m + b) for part, m, b in zip(parts, matrices, biases, strict=True)]
    return torch.cat([*rows, torch.full_like(rest, float("nan"))])


def static_step(rank: int, world: int, scene: Scene, layout: str, static: bool) -> tuple[Step, list[int]]:
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(adversary=scene.adversary):
        dispatcher = dispatcher_for(scene, layout, static)
        sent = dispatcher.dispatch(x, layer.idx[rank], weights)
        rows = experts(sent.tokens, sent.padded_tokens_per_expert, matrices, biases)
        y = dispatcher.combine(rows, sent)
        (y * layer.targets[rank]).sum().backward()
    assert sent.tokens_per_expert.dtype == (torch.int32 if static or layout == "expert aligned" else torch.int64)
    return Step.of(y, x, weights, matrices, biases), list(sent.tokens.shape)


@pytest.mark.parametrize("adversary", [None, 5], ids=["", "adversary"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4])
def test_static_and_synchronised_paths_agree(
    world: int, layout: str, adversary: int | None, request: pytest.FixtureRequest
) -> None:
    ranks: RankPool = request.getfixturevalue(f"ranks{world}")
    shapes = set()
    for name, options in COUNTS.items():
        options = {**options, "tokens": options["tokens"][:world]}
        scene = scene_for(world, topk=3, adversary=adversary, **options)
        for static in (False, True):
            outcomes = ranks.run(static_step, scene, layout, static)
            assert close_to([step for step, _ in outcomes], scene, f"{name}, static {static}") == []
            if static:
                shapes |= {tuple(shape) for _, shape in outcomes}
    assert len(shapes) == 1, "static shapes depend on the spec alone"


def functions(rank: int, world: int, scene: Scene) -> tuple[bool, bool, Tensor, Tensor, tuple[int, int]]:
    """The token layout of the functions: what is told of rows that nobody sent, and the identity's result."""
    layer = Layer(scene)
    with buffers(adversary=scene.adversary):
        x, weights, *_ = leaves(layer, rank)
        recv_x, recv_idx, _, counts, handle = fused_dispatch(
            x, layer.idx[rank], weights, scene.num_experts, None, static_shapes=True
        )
        assert recv_idx is not None
        received = int(handle.ep_handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        y, _ = fused_combine(recv_x, None, handle)
        times = torch.tensor(
            [len({int(e) // scene.local_experts for e in row if e >= 0}) for row in layer.idx[rank]], dtype=x.dtype
        )
    told = bool((recv_idx[received:] == -1).all()), bool((recv_idx[:received] >= 0).any(1).all())
    assert counts.sum() == (recv_idx >= 0).sum()
    return *told, y.detach(), x.detach() * times[:, None], (len(recv_x), received)


@pytest.mark.parametrize("adversary", [None, 5], ids=["", "adversary"])
def test_rows_that_nobody_sent_have_no_expert(ranks2: RankPool, adversary: int | None) -> None:
    scene = scene_for(2, topk=3, adversary=adversary)
    for none_beyond, some_before, y, wanted, (rows, received) in ranks2.run(functions, scene):
        assert (none_beyond, some_before, rows) == (True, True, 2 * CEILING)
        assert received < rows
        torch.testing.assert_close(y, wanted)


def two_ceilings(rank: int, world: int) -> list[int]:
    """Rows of the static shapes of a training and a decode buffer, and how many were built."""
    with buffers(DECODE_MAX_TOKENS_PER_RANK=4) as built:
        prepare_buffer(hidden=8, num_topk=2, num_max_tokens_per_rank="decode")
        prepare_buffer(hidden=8, num_topk=2)
        rows = []
        for ceiling in (None, "decode"):
            dispatcher = FlexTokenDispatcher(
                num_experts=4, layout="expert", static_shapes=True, num_max_tokens_per_rank=ceiling
            )
            rows.append(
                len(dispatcher.dispatch(torch.ones(3, 8), torch.arange(2).expand(3, 2), torch.ones(3, 2)).tokens)
            )
        return [*rows, len(built), pool.pinned.max_tokens_per_rank]  # type: ignore[union-attr]


def test_a_decode_buffer_stands_beside_the_training_one(ranks2: RankPool) -> None:
    for seen in ranks2.run(two_ceilings):
        assert seen == [2 * CEILING * 2, 2 * 4 * 2, 2, CEILING]


# Recomputation with the layout kept.


def recomputed_step(
    rank: int, world: int, scene: Scene, layout: str, static: bool, reentrant: bool, wait: bool
) -> tuple[Step, list[str]]:
    """Forward and backward with the layer in a checkpoint, and what the buffer was asked for."""
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(kind=Recorder, adversary=scene.adversary) as built:
        kept = RoutingLayout()
        dispatcher = dispatcher_for(scene, layout, static)

        def through(x: Tensor, weights: Tensor) -> Tensor:
            if wait:
                sent = dispatcher.dispatch(x, layer.idx[rank], weights, layout_cache=kept)
                rows = experts(sent.tokens, sent.padded_tokens_per_expert, matrices, biases)
                return dispatcher.combine(rows, sent)
            pending = fused_dispatch(
                x, layer.idx[rank], weights, scene.num_experts, None, layout="expert", layout_cache=kept, wait=False
            )
            recv_x, _, recv_weights, _, handle = pending.wait()
            rows = experts(recv_x, handle.padded_tokens_per_expert, matrices, biases)
            return fused_combine(rows * recv_weights[:, None], None, handle)[0]

        y = checkpoint(through, x, weights, use_reentrant=reentrant)
        (y * layer.targets[rank]).sum().backward()
        calls = [
            call.operation + (" with a handle" if call.arguments.get("handle") is not None else "")
            for call in built[0].calls  # type: ignore[attr-defined]
            if call.operation == "dispatch"
        ]
    return Step.of(y, x, weights, matrices, biases), calls


@pytest.mark.parametrize("adversary", [None, 5], ids=["", "adversary"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recomputed_dispatch_repeats_the_kept_layout(ranks2: RankPool, layout: str, adversary: int | None) -> None:
    scene = scene_for(2, topk=3, adversary=adversary)
    again = ["dispatch", "dispatch with a handle", "dispatch with a handle"]  # forward, recomputed, combine's backward
    for static in (False, True):
        for reentrant in (True, False):
            outcomes = ranks2.run(recomputed_step, scene, layout, static, reentrant, True)
            assert close_to([step for step, _ in outcomes], scene, f"{static}, {reentrant}") == []
            assert [calls for _, calls in outcomes] == [again] * 2


def test_a_recomputed_pending_dispatch_repeats_the_kept_layout(ranks2: RankPool) -> None:
    scene = scene_for(2, topk=3, adversary=5)
    outcomes = ranks2.run(recomputed_step, scene, "expert", False, False, False)
    assert close_to([step for step, _ in outcomes], scene) == []


def misused(rank: int, world: int, check: int) -> dict[str, Any]:
    """A kept layout with another router's decision on rank 1, with other rows, with another layout."""
    seen: dict[str, Any] = {}
    with buffers(CHECK=check):
        dispatcher = FlexTokenDispatcher(num_experts=4, layout="expert", name="layer 7")
        other = FlexTokenDispatcher(num_experts=4, layout="token")
        idx = torch.tensor([[0, 1], [2, 3], [1, 2]])
        kept = RoutingLayout()
        x, weights = torch.ones(3, 8), torch.ones(3, 2)
        dispatcher.dispatch(x, idx, weights, layout_cache=kept)
        changed = idx.clone()
        if rank == 1:
            changed[1, 1] = 0
        seen["same"] = raised_by(lambda: dispatcher.dispatch(x, idx.to(torch.uint8), weights, layout_cache=kept))
        if check:
            seen["router"] = raised_by(lambda: dispatcher.dispatch(x, changed, weights, layout_cache=kept))
        rows = 2 if rank == 1 else 3
        seen["rows"] = raised_by(lambda: dispatcher.dispatch(x[:rows], idx[:rows], weights[:rows], layout_cache=kept))
        seen["layout"] = raised_by(lambda: other.dispatch(x, idx, weights, layout_cache=kept))
    return seen


@pytest.mark.parametrize("check", [0, 1])
def test_a_kept_layout_that_does_not_fit_raises_on_every_rank(ranks2: RankPool, check: int) -> None:
    for seen in ranks2.run(misused, check):
        assert seen["same"] is None
        assert seen["rows"].type_name == "HandleError"
        assert "got [2, 2], expected [3, 2]" in seen["rows"].text
        assert seen["layout"].type_name == "HandleError"
        if check:
            assert seen["router"].type_name == "InputError"
            assert "layer 7" in seen["router"].text
            assert "first for token 1: got [2, 0], expected [2, 3]" in seen["router"].text
