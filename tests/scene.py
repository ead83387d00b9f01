"""One mixture-of-experts layer over all ranks: inputs drawn from a seed, a step in the ranks, and what it must give.

Legend: T_r tokens of rank r, H hidden, K top-k, E experts, L local experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from oracle import moe
from torch import Tensor

from megatron_moe_v2 import fused_combine, fused_dispatch
from megatron_moe_v2.buffers import embedded
from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer
from megatron_moe_v2.fused_a2a import Layout
from megatron_moe_v2.pool import pool
from megatron_moe_v2.settings import PREFIX

__all__ = [
    "BOTH_LAYOUTS",
    "CEILING",
    "Call",
    "Layer",
    "Recorder",
    "Scene",
    "Step",
    "buffers",
    "close_to",
    "combine_of",
    "dispatch_of",
    "environment",
    "expected",
    "layer_forward",
    "leaves",
    "raised_by",
    "replaced",
    "run_experts",
    "scene_for",
    "train_step",
    "train_steps",
]

CEILING = 12

BOTH_LAYOUTS: dict[str, dict[str, Any]] = {
    "token": {"layout": "token"},
    "expert": {"layout": "expert"},
    "expert aligned": {"layout": "expert", "alignment": 4},
}
"""The ways to lay out what is received, by readable name."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A layer, its inputs and its buffer.

    Attributes:
        tokens: T_r per rank.
        routing: ``random``, ``masked`` (some selections are none), ``duplicates`` (an expert twice in a row) or
            ``one rank`` (all to the last rank's experts).
        weights_dtype: of the routing weights, None for the dtype of the tokens.
        frozen: what needs no gradient, some of ``x``, ``weights``, ``experts``.
        silent: ranks whose loss is zero times their output.
        adversary: seed of the buffer's adversary.
    """

    tokens: tuple[int, ...] = (5, 3)
    layout: Layout = "token"
    alignment: int = 1
    hidden: int = 6
    topk: int = 2
    local_experts: int = 2
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None
    routing: str = "random"
    frozen: tuple[str, ...] = ()
    silent: tuple[int, ...] = ()
    adversary: int | None = None
    seed: int = 0

    @property
    def num_experts(self) -> int:
        return self.local_experts * len(self.tokens)

    def __str__(self) -> str:
        plain = Scene()
        return ", ".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)) or "plain"


def scene_for(world: int, layout: str = "token", **options: Any) -> Scene:
    """A scene of ``world`` ranks in one of :data:`BOTH_LAYOUTS`."""
    return Scene(**{"tokens": (5, 3, 7, 4)[:world], **BOTH_LAYOUTS[layout], **options})


class Layer:
    """All ranks' tensors of a scene; the same in every process.

    Attributes:
        x, idx, weights: per rank [T_r, H], [T_r, K], [T_r, K].
        matrices, biases: [E, H, H], [E, H]; expert e gives ``tanh(rows @ matrix + bias)``.
        targets: per rank [T_r, H]; the loss is the sum of ``y * targets`` over all ranks.
    """

    def __init__(self, scene: Scene) -> None:
        draw = torch.Generator().manual_seed(scene.seed * 31 + len(scene.tokens))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(scene.dtype)

        self.scene = scene
        self.idx = [_routing(scene, count, draw) for count in scene.tokens]
        self.x = [normal(count, scene.hidden) for count in scene.tokens]
        weights_dtype = scene.weights_dtype or scene.dtype
        self.weights = [(normal(count, scene.topk).abs() + 0.1).to(weights_dtype) for count in scene.tokens]
        self.matrices = normal(scene.num_experts, scene.hidden, scene.hidden)
        self.biases = normal(scene.num_experts, scene.hidden)
        self.targets = [normal(count, scene.hidden) * (r not in scene.silent) for r, count in enumerate(scene.tokens)]

    def local(self, rank: int) -> slice:
        """The experts of a rank."""
        return slice(rank * self.scene.local_experts, (rank + 1) * self.scene.local_experts)


def _routing(scene: Scene, count: int, draw: torch.Generator) -> Tensor:
    scores = torch.rand(count, scene.num_experts, generator=draw)
    if scene.routing == "one rank":
        scores[:, : -scene.local_experts] = -1.0
    idx = scores.topk(scene.topk, dim=1).indices if scene.topk <= scene.num_experts else scores.argsort(dim=1)
    if scene.routing == "masked":
        idx[torch.rand(idx.shape, generator=draw) < 0.4] = -1
        idx[1::4] = -3  # any negative number means none
    if scene.routing == "duplicates":
        idx[::2] = idx[::2, :1].clone()
    return idx


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank has after forward and backward; a gradient is None where none was asked for."""

    y: Tensor
    x: Tensor | None
    weights: Tensor | None
    matrices: Tensor | None
    biases: Tensor | None

    @classmethod
    def of(cls, y: Tensor, x: Tensor, weights: Tensor, matrices: Tensor, biases: Tensor) -> Step:
        return cls(y=y.detach(), x=x.grad, weights=weights.grad, matrices=matrices.grad, biases=biases.grad)


def leaves(layer: Layer, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, weights, matrices and biases of a rank, with gradients as the scene says."""
    frozen = layer.scene.frozen
    return (
        layer.x[rank].clone().requires_grad_("x" not in frozen),
        layer.weights[rank].clone().requires_grad_("weights" not in frozen),
        layer.matrices[layer.local(rank)].clone().requires_grad_("experts" not in frozen),
        layer.biases[layer.local(rank)].clone().requires_grad_("experts" not in frozen),
    )


def run_experts(
    recv_x: Tensor, recv_idx: Tensor | None, recv_weights: Tensor, rows: Sequence[int], matrices: Tensor, biases: Tensor
) -> Tensor:
    """The weighted experts on what a dispatch gave; ``rows`` is the padded count per expert of the expert layout."""
    if recv_idx is None:
        parts, weights = recv_x.split(list(rows)), recv_weights.split(list(rows))
        outputs = [
            torch.tanh(part @ matrix + bias) * weight[:, None].to(recv_x.dtype)
            for part, weight, matrix, bias in zip(parts, weights, matrices, biases, strict=True)
        ]
        return torch.cat(outputs)
    total = torch.zeros_like(recv_x)
    for expert, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        gate = torch.where(recv_idx == expert, recv_weights, 0.0).sum(1, keepdim=True).to(recv_x.dtype)
        total = total + gate * torch.tanh(recv_x @ matrix + bias)
    return total


def dispatch_of(layer: Layer, rank: int, x: Tensor, weights: Tensor, **options: Any) -> Any:
    """``fused_dispatch`` of a rank's tokens over the default group, as the scene says."""
    scene = layer.scene
    layout: dict[str, Any] = {"layout": scene.layout, "expert_alignment": scene.alignment}
    return fused_dispatch(x, layer.idx[rank], weights, scene.num_experts, None, **layout, **options)


def layer_forward(
    layer: Layer, rank: int, x: Tensor, weights: Tensor, matrices: Tensor, biases: Tensor, **flags: bool
) -> Tensor:
    """Dispatch, experts, combine over the default group."""
    recv_x, recv_idx, recv_weights, _, handle = dispatch_of(layer, rank, x, weights, **flags)
    padded = handle.padded_tokens_per_expert.tolist()
    rows = run_experts(recv_x, recv_idx, recv_weights, padded, matrices, biases)
    return combine_of(rows, handle, **flags)


def combine_of(rows: Tensor, handle: Any, **flags: Any) -> Tensor:
    """The result of ``fused_combine`` over the default group."""
    return fused_combine(rows, None, handle, **flags)[0]


def train_step(rank: int, world: int, scene: Scene) -> Step:
    """One forward and backward of the loss in a rank."""
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(adversary=scene.adversary):
        y = layer_forward(layer, rank, x, weights, matrices, biases)
        (y * layer.targets[rank]).sum().backward()
    return Step.of(y, x, weights, matrices, biases)


def train_steps(rank: int, world: int, scenes: Sequence[Scene]) -> list[Step]:
    """:func:`train_step` of each scene."""
    return [train_step(rank, world, scene) for scene in scenes]


def expected(scene: Scene) -> list[Step]:
    """Per rank what :func:`train_step` must return, in float64, from the dense layer in this process."""
    layer = Layer(scene)
    x = [part.double().requires_grad_() for part in layer.x]
    weights = [part.double().requires_grad_() for part in layer.weights]
    matrices, biases = layer.matrices.double().requires_grad_(), layer.biases.double().requires_grad_()
    y = moe(x, layer.idx, weights, lambda e, rows: torch.tanh(rows @ matrices[e] + biases[e]))
    loss = torch.stack([(out * v.double()).sum() for out, v in zip(y, layer.targets, strict=True)]).sum()
    everything = [*x, *weights, matrices, biases]
    for leaf, grad in zip(everything, torch.autograd.grad(loss, everything, materialize_grads=True), strict=True):
        leaf.grad = grad
    assert matrices.grad is not None
    assert biases.grad is not None
    steps = []
    for rank in range(len(scene.tokens)):
        experts = layer.local(rank)
        step = Step(
            y=y[rank].detach(),
            x=None if "x" in scene.frozen else x[rank].grad,
            weights=None if "weights" in scene.frozen else weights[rank].grad,
            matrices=None if "experts" in scene.frozen else matrices.grad[experts],
            biases=None if "experts" in scene.frozen else biases.grad[experts],
        )
        steps.append(step)
    return steps


_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close_to(got: Sequence[Step], scene: Scene, what: str = "", want: Sequence[Step] | None = None) -> list[str]:
    """What differs from ``want`` or :func:`expected` by more than the scene's dtypes allow, a line each."""
    lines, want = [], expected(scene) if want is None else want
    tolerance = max(_TOLERANCES[scene.dtype], _TOLERANCES[scene.weights_dtype or scene.dtype])
    for rank, (one, other) in enumerate(zip(got, want, strict=True)):
        for name, value in vars(other).items():
            have = getattr(one, name)
            if value is None or have is None:
                if (value is None) != (have is None):
                    lines.append(f"{what} rank {rank}: {name} is {have}, expected {value}")
                continue
            if have.shape != value.shape:
                lines.append(f"{what} rank {rank}: {name} has shape {have.shape}, expected {value.shape}")
                continue
            scale = max(1.0, float(value.abs().max()) if value.numel() else 0.0)
            worst = float((have.double() - value).abs().max()) if value.numel() else 0.0
            if not worst <= tolerance * scale:
                lines.append(f"{what} rank {rank}: {name} is off by {worst:.3g} of {scale:.3g}")
    return lines


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a buffer's method, as it was made."""

    operation: str
    rows: int
    arguments: dict[str, Any]


class Recorder(EmbeddedElasticBuffer):
    """An embedded buffer that notes every dispatch and combine.

    Attributes:
        calls: so far.
        fail: raise this at the next call, once, on this rank alone and before anything is exchanged.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[Call] = []
        self.fail: Exception | None = None

    def _note(self, operation: str, x: Tensor, arguments: dict[str, Any]) -> None:
        self.calls.append(Call(operation=operation, rows=len(x), arguments=arguments))
        failure, self.fail = self.fail, None
        if failure is not None:
            raise failure

    def dispatch(self, x: Any, **arguments: Any) -> Any:  # type: ignore[override]
        self._note("dispatch", x, arguments)
        return super().dispatch(x, **arguments)

    def combine(self, x: Tensor, handle: Any, **arguments: Any) -> Any:  # type: ignore[override]
        self._note("combine", x, {"handle": handle, **arguments})
        return super().combine(x, handle, **arguments)


STREAM_FLAGS = [
    {"async_finish": wait, "allocate_on_comm_stream": comm} for wait in (False, True) for comm in (False, True)
]
"""The four ways to wait and to allocate."""


@contextmanager
def buffers(
    *, adversary: int | None = None, kind: type[EmbeddedElasticBuffer] = EmbeddedElasticBuffer, **variables: object
) -> Iterator[list[EmbeddedElasticBuffer]]:
    """No buffer before and none after; inside, built ones have the adversary and are of ``kind``. Local.

    Args:
        variables: environment inside, names without the prefix; the ceiling is :data:`CEILING` if not given.

    Yields:
        The buffers built so far.
    """
    pool.close(abort=True)
    built: list[EmbeddedElasticBuffer] = []

    class Built(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, adversary=adversary, **options)
            built.append(self)

    with environment(**{"MAX_TOKENS_PER_RANK": CEILING, **variables}):
        try:
            with replaced(embedded, "EmbeddedElasticBuffer", Built):
                yield built
        finally:
            pool.close(abort=True)


@contextmanager
def environment(**variables: object) -> Iterator[None]:
    """Variables of the package set for a while, by their names without the prefix; None unsets."""
    kept = {PREFIX + name: os.environ.get(PREFIX + name) for name in variables}
    _set({PREFIX + name: None if value is None else str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        _set(kept)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def raised_by(action: Callable[[], Any]) -> Any:
    """The failure that ``action`` ends in, as text for the parent; None if it returns."""
    from launch import Failure

    try:
        action()
    except Exception as error:
        return Failure.of(error)
    return None
