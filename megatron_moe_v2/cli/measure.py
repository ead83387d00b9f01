"""What the benchmark runs, and the interleaved clock around it.

Legend: T own tokens, H hidden, K top-k, n received tokens, P rows by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication import DispatchHandle
from ..dispatcher import FlexTokenDispatcher
from ..fused_a2a import fused_combine, fused_dispatch
from .plain_alltoall import PlainDispatcher
from .traffic import Clock, Traffic, counted
from .verify import Inputs, Oracle

__all__ = ["LAYOUTS", "PHASES", "PLAIN", "PLAIN_KEPT", "Measurement", "Subject", "measure", "subjects"]

LAYOUTS = ("token-bare", "token", "expert")
PHASES = ("dispatch", "combine", "forward+backward")
PLAIN, PLAIN_KEPT = "plain", "plain-kept"

Sample = tuple[float, float, int]  # seconds, seconds in collectives, bytes sent


@dataclass(frozen=True, kw_only=True, eq=False)
class _BareDispatched:
    """Token layout as it arrives: ``[n, H]``, weights ``[n, K]``, local expert or -1 ``[n, K]``."""

    tokens: Tensor
    weights: Tensor
    local_idx: Tensor
    handle: DispatchHandle


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A dispatcher under test.

    Attributes:
        name: one of :data:`LAYOUTS`, :data:`PLAIN`, :data:`PLAIN_KEPT`, or of :mod:`beside`.
        dispatch: ``(x, topk_idx, topk_weights)`` to something with ``tokens`` and ``weights``.
        combine: ``(rows, dispatched)`` to ``[T, H]``.
        visible: its traffic goes through ``torch.distributed``, where it is counted.
        per_token: rows are received tokens; else copies by expert.
        step: forward and backward without autograd, where there is none: the combined tokens and both gradients.
    """

    name: str
    dispatch: Callable[[Tensor, Tensor, Tensor], Any]
    combine: Callable[[Tensor, Any], Tensor]
    visible: bool
    per_token: bool = False
    step: Callable[[Inputs], tuple[Tensor, Tensor, Tensor]] | None = None

    def wrong_dispatch(self, dispatched: Any, oracle: Oracle) -> int:
        if self.per_token:
            return oracle.wrong_tokens(dispatched.tokens, dispatched.local_idx, dispatched.weights)
        counts = (dispatched.routing if self.name in (PLAIN, PLAIN_KEPT) else dispatched).tokens_per_expert
        return oracle.wrong_copies(dispatched.tokens, counts, dispatched.weights)

    def wrong_sums(self, combined: Tensor, values: Tensor, oracle: Oracle) -> int:
        return oracle.wrong_sums(combined, values, per_copy=not self.per_token)


def subjects(names: Sequence[str], num_experts: int, group: dist.ProcessGroup, *, visible: bool) -> list[Subject]:
    """The named dispatchers over ``group``; ``visible`` says whether our buffer's traffic can be counted."""

    def bare_dispatch(x: Tensor, topk_idx: Tensor, weights: Tensor) -> _BareDispatched:
        tokens, local_idx, probs, _, handle = fused_dispatch(x, topk_idx, weights, num_experts, group)
        assert local_idx is not None
        return _BareDispatched(tokens=tokens, weights=probs, local_idx=local_idx, handle=handle)

    def bare_combine(rows: Tensor, dispatched: _BareDispatched) -> Tensor:
        return fused_combine(rows, group, dispatched.handle)[0]

    def flex(name: Literal["token", "expert"]) -> Subject:
        ours = FlexTokenDispatcher(num_experts=num_experts, group=group, layout=name)

        def combine(rows: Tensor, dispatched: Any) -> Tensor:
            return ours.combine(rows, dispatched, apply_weights=False)

        return Subject(name=name, dispatch=ours.dispatch, combine=combine, visible=visible)

    plain = PlainDispatcher(num_experts=num_experts, group=group)
    kept = PlainDispatcher(num_experts=num_experts, group=group, keep_buffers=True)
    every = {
        "token-bare": Subject(
            name="token-bare", dispatch=bare_dispatch, combine=bare_combine, visible=visible, per_token=True
        ),
        "token": flex("token"),
        "expert": flex("expert"),
        PLAIN: Subject(name=PLAIN, dispatch=plain.dispatch, combine=plain.combine, visible=True),
        PLAIN_KEPT: Subject(name=PLAIN_KEPT, dispatch=kept.dispatch, combine=kept.combine, visible=True),
    }
    return [every[name] for name in names]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One dispatcher, one phase, one size, over all ranks.

    Attributes:
        seconds: per iteration the slowest rank's.
        sent_bytes: per rank and call, mean over ranks; None where traffic cannot be counted.
        communication: share of the time that ranks spend inside collectives, waiting included; None likewise.
        wrong: values that differ from the oracle, over all ranks.
    """

    subject: str
    phase: str
    num_tokens: int
    seconds: list[float]
    sent_bytes: float | None
    communication: float | None
    wrong: int


def measure(
    subjects: Sequence[Subject],
    phases: Sequence[str],
    inputs: Inputs,
    oracle: Oracle,
    group: dist.ProcessGroup,
    *,
    iterations: int,
    warmup: int,
) -> list[Measurement]:
    """Run every subject once per iteration, in an order that rotates. Collective over the group.

    Outputs of the last warm-up iteration (there is always one) and of the last measured one go to the oracle.
    """
    clock = Clock(inputs.x.device)
    samples: dict[tuple[str, str], list[Sample]] = {(one.name, phase): [] for one in subjects for phase in phases}
    wrong = dict.fromkeys(samples, 0)
    warmup = max(warmup, 1)
    with counted(clock) as traffic:
        timer = _Timer(clock, traffic, group)
        for iteration in range(warmup + iterations):
            verify = iteration in (warmup - 1, warmup + iterations - 1)
            first = iteration % len(subjects)
            for subject in (*subjects[first:], *subjects[:first]):
                for phase, sample, errors in _run(subject, phases, inputs, oracle if verify else None, timer):
                    if iteration >= warmup:
                        samples[subject.name, phase].append(sample)
                    wrong[subject.name, phase] += errors
    return _gather(subjects, samples, wrong, len(inputs.x), group, inputs.x.device)


class _Timer:
    def __init__(self, clock: Clock, traffic: Traffic, group: dist.ProcessGroup) -> None:
        self.clock, self.traffic, self.group = clock, traffic, group

    def __call__(self, action: Callable[[], Any]) -> tuple[Any, Sample]:
        """The action's result, and what it took on this rank after all ranks were ready for it."""
        self.clock.wait()
        dist.barrier(self.group)
        self.traffic.reset()
        start = self.clock.mark()
        result = action()
        end = self.clock.mark()
        self.clock.wait()
        inside = sum(self.clock.between(*span) for span in self.traffic.spans)
        return result, (self.clock.between(start, end), inside, self.traffic.sent_bytes)


def _run(
    subject: Subject, phases: Sequence[str], inputs: Inputs, oracle: Oracle | None, timer: _Timer
) -> list[tuple[str, Sample, int]]:
    """Per phase its sample and, with an oracle, its wrong values."""
    done: list[tuple[str, Sample, int]] = []
    x, weights = inputs.x, inputs.weights
    if {"dispatch", "combine"} & set(phases):
        with torch.no_grad():
            dispatched, sample = timer(lambda: subject.dispatch(x, inputs.topk_idx, weights))
            done.append(("dispatch", sample, subject.wrong_dispatch(dispatched, oracle) if oracle else 0))
            combined, sample = timer(lambda: subject.combine(dispatched.tokens, dispatched))
            done.append(("combine", sample, subject.wrong_sums(combined, x, oracle) if oracle else 0))
            del dispatched, combined
    if "forward+backward" in phases:
        x.grad = weights.grad = None
        step = subject.step or functools.partial(_forward_backward, subject)
        (combined, grad_x, grad_weights), sample = timer(lambda: step(inputs))
        errors = 0
        if oracle is not None:
            errors = subject.wrong_sums(combined, x, oracle) + subject.wrong_sums(grad_x, inputs.grad, oracle)
            errors += oracle.wrong_weight_gradients(grad_weights)
        done.append(("forward+backward", sample, errors))
    return [one for one in done if one[0] in phases]


def _forward_backward(subject: Subject, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Identity experts; the loss is the combined tokens times ``inputs.grad``, plus half the squares of the weights."""
    dispatched = subject.dispatch(inputs.x, inputs.topk_idx, inputs.weights)
    combined = subject.combine(dispatched.tokens, dispatched)
    torch.autograd.backward([combined, dispatched.weights], [inputs.grad, dispatched.weights.detach()])
    assert inputs.x.grad is not None
    assert inputs.weights.grad is not None
    return combined.detach(), inputs.x.grad, inputs.weights.grad


def _gather(
    subjects: Sequence[Subject],
    samples: dict[tuple[str, str], list[Sample]],
    wrong: dict[tuple[str, str], int],
    num_tokens: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Measurement]:
    visible = {one.name: one.visible for one in subjects}
    mine = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    errors = torch.tensor(list(wrong.values()), device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    dist.all_reduce(errors, group=group)
    ranks = torch.stack(every).cpu()  # [rank, subject and phase, iteration, (seconds, inside, bytes)]
    return [
        Measurement(
            subject=subject,
            phase=phase,
            num_tokens=num_tokens,
            seconds=ranks[:, place, :, 0].amax(0).tolist(),
            sent_bytes=ranks[:, place, :, 2].mean().item() if visible[subject] else None,
            communication=(ranks[:, place, :, 1].sum() / ranks[:, place, :, 0].sum()).item()
            if visible[subject]
            else None,
            wrong=int(errors[place]),
        )
        for place, (subject, phase) in enumerate(samples)
    ]
