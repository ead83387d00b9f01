"""``FlexTokenDispatcher`` against the dense oracle: both layouts, both kinds of router output, errors with a name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import Failure, RankPool
from scene import (
    BOTH_LAYOUTS,
    Layer,
    Scene,
    Step,
    buffers,
    close_to,
    expected,
    leaves,
    raised_by,
    scene_for,
)
from torch import Tensor

from megatron_moe_v2 import Dispatched, FlexTokenDispatcher

WAYS = BOTH_LAYOUTS | {"token aligned": {"layout": "token", "alignment": 4}}

SCENES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selections of none": {"routing": "masked", "topk": 3},
    "an expert twice in a row": {"routing": "duplicates"},
    "all tokens to one rank": {"routing": "one rank"},
    "single choice": {"topk": 1},
    "frozen tokens": {"frozen": ("x",)},
    "frozen weights": {"frozen": ("weights",)},
    "frozen experts": {"frozen": ("experts",)},
    "float32": {"dtype": torch.float32},
    "bfloat16 weights": {"dtype": torch.float32, "weights_dtype": torch.bfloat16},
}


def dispatcher_for(scene: Scene, **options: Any) -> FlexTokenDispatcher:
    return FlexTokenDispatcher(
        **{
            "num_experts": scene.num_experts,
            "layout": scene.layout,
            "expert_alignment": scene.alignment,
            **options,
        }
    )


def scenes_for(world: int, layout: str, adversary: int | None) -> dict[str, Scene]:
    options = WAYS[layout] | {"adversary": adversary}
    scenes = {name: dataclasses.replace(scene_for(world), **options, **case) for name, case in SCENES.items()}
    return {name: scene for name, scene in scenes.items() if scene.topk <= scene.num_experts}


def experts(dispatched: Dispatched, matrices: Tensor, biases: Tensor) -> Tensor:
    parts = dispatched.tokens.split(dispatched.padded_tokens_per_expert.tolist())
    return torch.cat([torch.tanh(part @ m + b) for part, m, b in zip(parts, matrices, biases, strict=True)])


def malformed(dispatched: Dispatched, scene: Scene) -> list[str]:
    """What of a dispatch's results is not as described."""
    padded, exact = dispatched.padded_tokens_per_expert, dispatched.tokens_per_expert.cpu()
    rows = int(padded.sum())
    starts = padded.cumsum(0) - padded
    real = torch.zeros(rows, dtype=torch.bool)
    for start, count in zip(starts.tolist(), exact.tolist(), strict=True):
        real[start : start + count] = True
    holds = {
        "rows": dispatched.tokens.shape == (rows, scene.hidden) and dispatched.weights.shape == (rows,),
        "padded counts": padded.dtype == torch.int64 and not (padded % scene.alignment).any(),
        "padding is minimal": bool(((padded - exact >= 0) & (padded - exact < scene.alignment)).all()),
        "padding rows": not dispatched.tokens[~real].any(),
        "padding weights": not dispatched.weights[~real].any(),
        "real weights": bool((dispatched.weights[real] > 0).all()),
        "shape": dispatched.tokens.is_contiguous(),
    }
    return [what for what, good in holds.items() if not good]


def model_steps(rank: int, world: int, scenes: list[Scene]) -> list[Step]:
    steps = []
    for scene in scenes:
        layer = Layer(scene)
        x, weights, matrices, biases = leaves(layer, rank)
        with buffers(adversary=scene.adversary):
            dispatcher = dispatcher_for(scene)
            assert dispatcher.num_local_experts == scene.local_experts
            dispatched = dispatcher.dispatch(x, layer.idx[rank], weights)
            assert malformed(dispatched, scene) == []
            y = dispatcher.combine(experts(dispatched, matrices, biases), dispatched)
            (y * layer.targets[rank]).sum().backward()
        steps.append(Step.of(y, x, weights, matrices, biases))
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", WAYS)
def test_results_and_gradients_are_the_oracle_s(ranks: RankPool, layout: str, adversary: int | None) -> None:
    scenes = scenes_for(ranks.world, layout, adversary)
    by_case = zip(*ranks.run(model_steps, list(scenes.values())), strict=True)
    wrong = [close_to(steps, scene, name) for (name, scene), steps in zip(scenes.items(), by_case, strict=True)]
    assert wrong == [[]] * len(scenes)


@pytest.mark.parametrize("layout", WAYS)
def test_any_number_of_tokens(ranks2: RankPool, layout: str) -> None:
    counts = [(0, 6), (6, 0), (1, 12), (0, 0)]
    scenes = [dataclasses.replace(scene_for(2, adversary=3, tokens=tokens), **WAYS[layout]) for tokens in counts]
    by_case = zip(*ranks2.run(model_steps, scenes), strict=True)
    wrong = [close_to(steps, scene, str(scene.tokens)) for steps, scene in zip(by_case, scenes, strict=True)]
    assert wrong == [[]] * len(scenes)


@st.composite
def drawn_scenes(draw: st.DrawFn) -> Scene:
    local = draw(st.integers(1, 3))
    return Scene(
        tokens=(draw(st.integers(0, 6)), draw(st.integers(0, 6))),
        local_experts=local,
        topk=draw(st.integers(1, 2 * local)),
        routing=draw(st.sampled_from(["random", "masked", "duplicates", "one rank"])),
        adversary=draw(st.sampled_from([None, 1, 2])),
        seed=draw(st.integers(0, 1000)),
    )


def test_all_ways_give_the_same_model(ranks2: RankPool) -> None:
    """Closer to each other than the tolerance against the oracle: the sums differ in order alone."""

    @settings(max_examples=25)
    @given(scene=drawn_scenes())
    def law(scene: Scene) -> None:
        scenes = [dataclasses.replace(scene, **way) for way in WAYS.values()]
        outcomes = ranks2.run(model_steps, scenes)
        assert close_to([steps[0] for steps in outcomes], scenes[0]) == []
        for steps in outcomes:
            for other in steps[1:]:
                for name, value in vars(steps[0]).items():
                    assert torch.allclose(getattr(other, name), value, rtol=1e-13, atol=1e-13), name

    law()


# A dense router.


def dense_step(rank: int, world: int, scene: Scene, extra: int) -> Step:
    """Probabilities over all experts and a mask; ``extra`` more experts are masked in than top-k keeps."""
    layer = Layer(scene)
    x, _, matrices, biases = leaves(layer, rank)
    probs, mask = dense_router(layer, rank, extra)
    probs.requires_grad_()
    with buffers(adversary=scene.adversary):
        dispatcher = dispatcher_for(scene, num_topk=scene.topk)
        dispatched = dispatcher.dispatch_dense(x, probs, mask)
        y = dispatcher.combine(experts(dispatched, matrices, biases), dispatched)
        (y * layer.targets[rank]).sum().backward()
    assert probs.grad is not None
    chosen = layer.idx[rank].clamp_min(0)
    probs_grad = torch.where(layer.idx[rank] >= 0, probs.grad.gather(1, chosen), 0.0)
    rest = probs.grad.scatter(1, chosen, torch.where(layer.idx[rank] >= 0, 0.0, probs.grad.gather(1, chosen)))
    assert not rest.any(), "no gradient for what was not selected"
    return dataclasses.replace(Step.of(y, x, x, matrices, biases), weights=probs_grad)


def dense_router(layer: Layer, rank: int, extra: int) -> tuple[Tensor, Tensor]:
    idx, weights, total = layer.idx[rank], layer.weights[rank], layer.scene.num_experts
    probs = torch.full((len(idx), total), 0.01, dtype=weights.dtype)
    mask = torch.zeros(len(idx), total, dtype=torch.bool)
    for token, row in enumerate(idx.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                probs[token, expert], mask[token, expert] = weights[token, k], True
        if min(row) >= 0:
            for expert in [e for e in range(total) if e not in row][:extra]:
                mask[token, expert] = True
    return probs, mask


@pytest.mark.parametrize("extra", [0, 1], ids=["", "more selected than top-k"])
@pytest.mark.parametrize("routing", ["random", "masked"])
@pytest.mark.parametrize("layout", WAYS)
def test_dense_router_with_a_mask(ranks2: RankPool, layout: str, routing: str, extra: int) -> None:
    scene = dataclasses.replace(scene_for(2, routing=routing, adversary=3), **WAYS[layout])
    assert close_to(ranks2.run(dense_step, scene, extra), scene) == []


# Shapes, and several at once.


def with_leading_dims(rank: int, world: int, scene: Scene) -> tuple[bool, torch.Size, torch.Size]:
    layer = Layer(scene)
    x, idx, weights = (part[rank].view(2, 3, -1) for part in (layer.x, layer.idx, layer.weights))
    probs, mask = (part.view(2, 3, -1) for part in dense_router(layer, rank, 0))
    with buffers():
        dispatcher = dispatcher_for(scene, num_topk=scene.topk)
        results = []
        for dispatched in (dispatcher.dispatch(x, idx, weights), dispatcher.dispatch_dense(x, probs, mask)):
            assert dispatched.tokens.dim() == 2
            results.append(dispatcher.combine(dispatched.tokens, dispatched))
        for none in (
            dispatcher.dispatch(x[:0], idx[:0], weights[:0]),
            dispatcher.dispatch_dense(x[:0], probs[:0], mask[:0]),
        ):
            empty = dispatcher.combine(none.tokens, none)
    close = torch.allclose(results[0], x * weights.sum(-1, keepdim=True)) and torch.allclose(*results)
    return close, results[0].shape, empty.shape


@pytest.mark.parametrize("layout", WAYS)
def test_leading_dimensions_come_back(ranks2: RankPool, layout: str) -> None:
    scene = dataclasses.replace(scene_for(2, tokens=(6, 6)), **WAYS[layout])
    for close, shape, empty in ranks2.run(with_leading_dims, scene):
        assert close
        assert shape == (2, 3, scene.hidden)
        assert empty == (0, 3, scene.hidden)


def in_flight(rank: int, world: int, scenes: list[Scene]) -> list[Step]:
    """All dispatches before the first combine, combined in reverse; one dispatcher."""
    layers = [Layer(scene) for scene in scenes]
    own = [leaves(layer, rank) for layer in layers]
    losses = []
    with buffers(adversary=scenes[0].adversary):
        dispatcher = dispatcher_for(scenes[0])
        sent = [dispatcher.dispatch(o[0], layer.idx[rank], o[1]) for layer, o in zip(layers, own, strict=True)]
        outputs: list[Tensor | None] = [None] * len(scenes)
        for number in reversed(range(len(scenes))):
            y = dispatcher.combine(experts(sent[number], *own[number][2:]), sent[number])
            losses.append((y * layers[number].targets[rank]).sum())
            outputs[number] = y
        torch.stack(losses).sum().backward()
    return [Step.of(y, *o) for y, o in zip(outputs, own, strict=True) if y is not None]


@pytest.mark.parametrize("layout", WAYS)
def test_several_dispatches_in_flight(ranks2: RankPool, layout: str) -> None:
    counts = [(5, 3), (0, 7), (8, 8)]
    scenes = [
        dataclasses.replace(scene_for(2, tokens=tokens, adversary=5, seed=n), **WAYS[layout])
        for n, tokens in enumerate(counts)
    ]
    by_scene = zip(*ranks2.run(in_flight, scenes), strict=True)
    wrong = [close_to(steps, scene, str(scene.tokens)) for steps, scene in zip(by_scene, scenes, strict=True)]
    assert wrong == [[]] * len(scenes)


def weighted_by_the_experts(rank: int, world: int, scene: Scene) -> Step:
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(adversary=scene.adversary):
        dispatcher = dispatcher_for(scene)
        dispatched = dispatcher.dispatch(x, layer.idx[rank], weights)
        rows = experts(dispatched, matrices, biases) * dispatched.weights[:, None]
        y = dispatcher.combine(rows, dispatched, apply_weights=False)
        (y * layer.targets[rank]).sum().backward()
    return Step.of(y, x, weights, matrices, biases)


@pytest.mark.parametrize("layout", WAYS)
def test_experts_may_apply_the_weights(ranks2: RankPool, layout: str) -> None:
    scene = dataclasses.replace(scene_for(2, adversary=3), **WAYS[layout])
    assert close_to(ranks2.run(weighted_by_the_experts, scene), scene) == []


def compiled(rank: int, world: int, scene: Scene) -> bool:
    """Whether a compiled step equals the eager one."""
    layer, steps = Layer(scene), []

    def step(dispatcher: FlexTokenDispatcher, x: Tensor, weights: Tensor, matrices: Tensor, biases: Tensor) -> Tensor:
        dispatched = dispatcher.dispatch(x * 1.5, layer.idx[rank], weights)
        return dispatcher.combine(experts(dispatched, matrices, biases), dispatched).sin()

    for function in (step, torch.compile(step, backend="eager")):
        own = leaves(layer, rank)
        with buffers():
            y = function(dispatcher_for(scene), *own)
            y.backward(layer.targets[rank])
        steps.append([y, *(leaf.grad for leaf in own)])
    torch._dynamo.reset()
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_compiled_equals_eager(ranks2: RankPool, layout: str) -> None:
    assert ranks2.run(compiled, scene_for(2, layout), timeout=120) == [True, True]


def rounded_once(rank: int, world: int, scene: Scene) -> Tensor:
    """Combine in bfloat16 of rows of very different size."""
    layer = Layer(scene)
    with buffers():
        dispatcher = dispatcher_for(scene)
        dispatched = dispatcher.dispatch(layer.x[rank], layer.idx[rank], layer.weights[rank])
        return dispatcher.combine(dispatched.tokens, dispatched, apply_weights=False)


@pytest.mark.parametrize("layout", WAYS)
def test_bfloat16_rows_of_a_rank_are_rounded_once(ranks1: RankPool, layout: str) -> None:
    """All experts on one rank: K times the row, added in float32; rounding after each addition would show."""
    scene = dataclasses.replace(
        scene_for(1, tokens=(12,), topk=7, local_experts=7, dtype=torch.bfloat16, hidden=64), **WAYS[layout]
    )
    (y,) = ranks1.run(rounded_once, scene)
    assert torch.equal(y, (layer_x(scene).float() * 7).bfloat16())


def layer_x(scene: Scene) -> Tensor:
    return Layer(scene).x[0]


# Errors.

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "experts do not divide": ("InputError", {"num_experts": 3}),
    "no experts": ("InputError", {"num_experts": 0}),
    "unknown layout": ("InputError", {"layout": "rows"}),
    "alignment 0": ("InputError", {"expert_alignment": 0}),
}


def construction_errors(rank: int, world: int) -> dict[str, Failure | None]:
    good: dict[str, Any] = {"num_experts": 4}
    return {
        name: raised_by(lambda o=options: FlexTokenDispatcher(**{**good, **o})) for name, (_, options) in BAD.items()
    }


def test_bad_construction_is_typed(ranks2: RankPool) -> None:
    for failures in ranks2.run(construction_errors):
        assert {name: f.type_name for name, f in failures.items()} == {name: kind for name, (kind, _) in BAD.items()}


class _NoProduct(Tensor):
    """Rows for whose product with the weights there is no memory."""

    def __mul__(self, other: Any) -> Any:
        raise torch.OutOfMemoryError("made up")


def call_errors(rank: int, world: int, scene: Scene, bad_rank: int) -> dict[str, Failure | None]:
    """What each wrong call of one rank raises here, and whether a good call works after it."""
    layer, failures = Layer(scene), {}
    x, idx, weights = layer.x[rank], layer.idx[rank], layer.weights[rank]
    probs, mask = dense_router(layer, rank, 0)
    bad = rank == bad_rank
    with buffers():
        dispatcher = dispatcher_for(scene, num_topk=2, name="layer 3")
        unsized = dispatcher_for(scene, name="layer 4")

        def good() -> Dispatched:
            return dispatcher.dispatch(x, idx, weights)

        dispatched = good()
        rows = dispatched.tokens
        more = torch.cat([rows, rows[:1] if bad else rows[:0]])
        calls = {
            "too many rows": lambda: dispatcher.dispatch(
                *(part.repeat(9, 1) if bad else part for part in (x, idx, weights))
            ),
            "integer tokens": lambda: dispatcher.dispatch(x.long() if bad else x, idx, weights),
            "fewer weights": lambda: dispatcher.dispatch(x, idx, weights[:, :1] if bad else weights),
            "mask of another shape": lambda: dispatcher.dispatch_dense(x, probs, mask[:, :1] if bad else mask),
            "integer probabilities": lambda: dispatcher.dispatch_dense(x, probs.long() if bad else probs, mask),
            "sparse tokens": lambda: dispatcher.dispatch(
                torch.ones(1, 2, 3).to_sparse() if bad else x[None], idx[None], weights[None]
            ),
            "no memory for the weighting": lambda: dispatcher.combine(
                rows.as_subclass(_NoProduct) if bad else rows, dispatched
            ),
            "rows of combine": lambda: dispatcher.combine(more, dispatched),
            "rows of combine, weights applied": lambda: dispatcher.combine(more, dispatched, apply_weights=False),
            "no top-k": lambda: unsized.dispatch_dense(x, probs, mask),
        }
        for name, call in calls.items():
            failures[name] = raised_by(call)
            again = good()
            assert torch.equal(
                dispatcher.combine(again.tokens, again), dispatcher.combine(dispatched.tokens, dispatched)
            )
    return failures


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_errors_reach_all_ranks_and_carry_the_name(ranks2: RankPool, layout: str, bad_rank: int) -> None:
    scene = scene_for(2, layout)
    kinds = {
        "too many rows": ("CapacityError", "layer 3"),
        "integer tokens": ("InputError", "layer 3"),
        "fewer weights": ("InputError", "layer 3"),
        "mask of another shape": ("InputError", "layer 3"),
        "integer probabilities": ("InputError", "layer 3"),
        "sparse tokens": ("InputError", "layer 3"),
        "no memory for the weighting": ("InputError", "layer 3"),
        "rows of combine": ("MoEError", "layer 3"),
        "rows of combine, weights applied": ("MoEError", "layer 3"),
        "no top-k": ("InputError", "layer 4"),
    }
    for failures in ranks2.run(call_errors, scene, bad_rank):
        for what, (kind, name) in kinds.items():
            failure = failures[what]
            assert failure is not None, what
            assert failure.isa(kind), (what, failure)
            assert failure.text.startswith(f"{name}: "), (what, failure.text)


def unusable(rank: int, world: int, scene: Scene, bad_rank: int, name: str) -> list[Failure | None]:
    """What a call raises that is wrong before its shapes can be read."""
    layer, bad = Layer(scene), rank == bad_rank
    x, idx, weights = layer.x[rank], layer.idx[rank], layer.weights[rank]
    calls: dict[str, tuple[Any, Any, Any]] = {
        "no selections": (x, idx[:, :0], weights[:, :0]),
        "a number for x": (torch.tensor(1.0), idx, weights),
        "no x": (None, idx, weights),
        "other leading dimensions": (x[:-1], idx, weights),
    }
    with buffers():
        dispatcher = dispatcher_for(scene, name="layer 3")
        dispatcher.dispatch(x, idx, weights)
        failure = raised_by(lambda: dispatcher.dispatch(*(calls[name] if bad else (x, idx, weights))))
        again = dispatcher.dispatch(x, idx, weights)
        dispatcher.combine(again.tokens, again)
    return [failure]


@pytest.mark.parametrize("name", ["no selections", "a number for x", "no x", "other leading dimensions"])
def test_unusable_shapes_raise_on_all_ranks(ranks2: RankPool, name: str) -> None:
    for (failure,) in ranks2.run(unusable, scene_for(2), 1, name, timeout=15):
        assert failure is not None
        assert failure.isa("InputError")
        assert failure.text.startswith("layer 3: ")


def test_the_oracle_itself_is_not_trivial() -> None:
    """Every gradient that the tests above compare is far from zero."""
    for step in expected(scene_for(2)):
        for value in vars(step).values():
            assert float(value.abs().max()) > 0.01
