"""What the autograd functions ask of a buffer, what they return and what they refuse."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from launch import Failure, RankPool
from scene import (
    BOTH_LAYOUTS,
    CEILING,
    STREAM_FLAGS,
    Call,
    Layer,
    Recorder,
    Scene,
    buffers,
    combine_of,
    dispatch_of,
    layer_forward,
    leaves,
    raised_by,
    replaced,
    run_experts,
    scene_for,
)
from torch import Tensor

from megatron_moe_v2 import fused_combine, fused_dispatch, prepare_buffer
from megatron_moe_v2.buffers import embedded
from megatron_moe_v2.buffers.contract import EventHandle
from megatron_moe_v2.pool import BufferPool

# What the buffer is asked.


def recorded(rank: int, world: int, scene: Scene, flags: dict[str, bool], steps: int = 1) -> list[Call]:
    """The four calls of each step, without tensors; backward neither looks up a buffer nor builds one."""
    layer = Layer(scene)
    with buffers(adversary=scene.adversary, kind=Recorder) as built:
        prepare_buffer(hidden=scene.hidden, num_topk=scene.topk, num_sms=14)
        for _ in range(steps):
            x, weights, matrices, biases = leaves(layer, rank)
            recv_x, recv_idx, recv_weights, _, handle = dispatch_of(layer, rank, x, weights, **flags)
            padded = handle.padded_tokens_per_expert.tolist()
            rows = run_experts(recv_x, recv_idx, recv_weights, padded, matrices, biases)
            y = combine_of(rows, handle, **flags)
            with replaced(BufferPool, "obtain", None), replaced(embedded, "EmbeddedElasticBuffer", None):
                y.sum().backward()
        (recorder,) = built
        assert isinstance(recorder, Recorder)
        return [dataclasses.replace(call, arguments=_plain(call.arguments)) for call in recorder.calls]


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Scalars as they are, the handle as its scalars, all else by class name."""
    plain: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "handle":
            plain["handle"] = {k: v for k, v in vars(value).items() if isinstance(v, int)}
        else:
            plain[name] = value if value is None or isinstance(value, int) else type(value).__name__
    return plain


@pytest.mark.parametrize("flags", STREAM_FLAGS, ids=lambda f: ", ".join(k for k, v in f.items() if v) or "neither")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_every_call_follows_the_contract(ranks2: RankPool, layout: str, flags: dict[str, bool]) -> None:
    scene = scene_for(2, layout)
    for calls in ranks2.run(recorded, scene, flags):
        assert [call.operation for call in calls] == ["dispatch", "combine", "dispatch", "combine"]
        dispatch, combine, cached, back = (call.arguments for call in calls)
        facts = {
            "num_experts": scene.num_experts,
            "num_max_tokens_per_rank": CEILING,
            "expert_alignment": scene.alignment,
            "do_expand": scene.layout == "expert",
            "num_sms": 14,
        }
        padding = {"do_zero_padding": scene.alignment > 1}
        for arguments in (dispatch, cached):
            assert arguments | facts | padding == arguments
            assert not arguments.get("do_cpu_sync") or arguments is dispatch
        for arguments in (combine, cached, back):
            assert arguments["handle"] | facts == arguments["handle"]
            assert arguments["num_sms"] == 14
        assert "handle" not in dispatch
        assert not {"topk_idx", "topk_weights"} & {name for name, value in cached.items() if value is not None}
        for arguments in (dispatch, combine, cached, back):
            event = arguments.get("previous_event")
            assert event == (EventHandle.__name__ if flags["allocate_on_comm_stream"] else None)
            assert bool(arguments.get("async_with_compute_stream")) == bool(flags["async_finish"])
            assert bool(arguments.get("allocate_on_comm_stream")) == bool(flags["allocate_on_comm_stream"])


@pytest.mark.parametrize("flags", STREAM_FLAGS, ids=lambda f: ", ".join(k for k, v in f.items() if v) or "neither")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_a_call_made_again_is_made_alike(ranks2: RankPool, layout: str, flags: dict[str, bool]) -> None:
    for calls in ranks2.run(recorded, scene_for(2, layout), flags, 3):
        assert calls[:4] == calls[4:8] == calls[8:]


def copied_and_recorded(rank: int, world: int) -> list[str]:
    """In which order the copies of strided inputs and the event of the call's beginning come."""
    order: list[str] = []
    contiguous, capture = Tensor.contiguous, embedded.EmbeddedElasticBuffer.capture

    def copied(self: Tensor, *args: Any) -> Tensor:
        order.append("copy")
        return contiguous(self, *args)

    def recorded_now(*_: Any) -> Any:
        order.append("event")
        return capture()

    strided = torch.ones(8, 3).t(), torch.zeros(1, 3, dtype=torch.int64).t(), torch.ones(1, 3).t()
    event = staticmethod(recorded_now)
    with buffers(), replaced(Tensor, "contiguous", copied), replaced(embedded.EmbeddedElasticBuffer, "capture", event):
        for _ in range(2):
            recv, *_, handle = fused_dispatch(*strided, 4, None, allocate_on_comm_stream=True)
            order.append("dispatched")
        fused_combine(recv, None, handle, allocate_on_comm_stream=True)
    return order


def test_what_is_copied_for_a_call_is_copied_before_its_event(ranks1: RankPool) -> None:
    """DeepEP's stream waits for that event alone."""
    (order,) = ranks1.run(copied_and_recorded)
    launches = [part.split("event")[0] for part in " ".join(order).split("dispatched")]
    assert " ".join(order).count("event") == 3
    assert [part.count("copy") >= least for part, least in zip(launches, (3, 3, 1), strict=True)] == [True] * 3


def ceilings(rank: int, world: int, scene: Scene) -> list[tuple[str, int, int]]:
    """Operation, rows and ceiling of every call over steps of 0, 1 and ceiling rows, in turn on each rank."""
    seen = []
    with buffers(kind=Recorder) as built:
        for counts in [(0, 5), (1, 0), (CEILING, 1), (5, CEILING), (0, 0)]:
            step = dataclasses.replace(scene, tokens=counts)
            layer = Layer(step)
            x, weights, matrices, biases = leaves(layer, rank)
            layer_forward(layer, rank, x, weights, matrices, biases).sum().backward()
        (recorder,) = built
        assert isinstance(recorder, Recorder)
        for call in recorder.calls:
            holder = call.arguments.get("handle")
            ceiling = call.arguments.get("num_max_tokens_per_rank")
            seen.append((call.operation, call.rows, ceiling or vars(holder)["num_max_tokens_per_rank"]))
    return seen


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_the_pinned_ceiling_is_in_every_call(ranks2: RankPool, layout: str) -> None:
    for seen in ranks2.run(ceilings, scene_for(2, layout)):
        assert len(seen) == 20
        assert {ceiling for _, _, ceiling in seen} == {CEILING}
        assert {0, 1, CEILING} <= {rows for operation, rows, _ in seen if operation == "dispatch"}


class Stream(str):
    """A name that stands in for a CUDA stream."""

    def record_event(self) -> None:
        return None


class Streams:
    """Stands in for the current stream of ``torch.cuda``."""

    def __init__(self) -> None:
        self.current = Stream("the caller's")

    def set(self, stream: str) -> None:
        self.current = Stream(stream)


def streams(rank: int, world: int, scene: Scene) -> list[tuple[str, str, Any]]:
    """Where a call raised, what, and the stream that is current after it."""
    layer, seen, now = Layer(scene), [], Streams()

    class Switching(Recorder):
        """Leaves its own stream current when a call fails, as DeepEP does."""

        def _note(self, operation: str, x: Tensor, arguments: dict[str, Any]) -> None:
            if self.fail is not None:
                now.set("the buffer's")
            super()._note(operation, x, arguments)

    def dispatch() -> Any:
        return dispatch_of(layer, rank, x, weights, allocate_on_comm_stream=True)

    def note(what: str, action: Callable[[], Any]) -> None:
        now.set("the caller's")
        failure = raised_by(action)
        seen.append((what, failure.type_name if failure else "nothing", now.current))

    with (
        buffers(kind=Switching) as built,
        replaced(torch.cuda, "is_initialized", lambda: True),
        replaced(torch.cuda, "current_stream", lambda: now.current),
        replaced(torch.cuda, "set_stream", now.set),
        replaced(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        x, weights, *_ = leaves(layer, rank)
        recv_x, *_, handle = dispatch()
        y, _ = fused_combine(recv_x, None, handle, allocate_on_comm_stream=True)
        (recorder,) = built
        assert isinstance(recorder, Recorder)
        for failure in (None, ValueError("as a broken kernel")):
            for what, action in {
                "dispatch": dispatch,
                "combine": lambda: fused_combine(recv_x, None, handle, allocate_on_comm_stream=True),
                "backward": lambda: y.sum().backward(retain_graph=True),
            }.items():
                recorder.fail = failure
                note(what, action)
    return seen


def test_the_current_stream_is_restored_after_an_exception(ranks2: RankPool) -> None:
    for seen in ranks2.run(streams, scene_for(2)):
        assert seen == [
            (what, raised, "the caller's")
            for raised in ("nothing", "ValueError")
            for what in ("dispatch", "combine", "backward")
        ]


# What they return.


def outputs(rank: int, world: int, scene: Scene) -> list[str]:
    """What is not as a caller that frees, adds in place and reorders needs it."""
    layer, wrong = Layer(scene), []

    def true(what: str, holds: object) -> None:
        if not holds:
            wrong.append(f"rank {rank}: {what}")

    with buffers(adversary=scene.adversary):
        x, weights, *_ = leaves(layer, rank)
        recv_x, recv_idx, recv_weights, counts, handle = dispatch_of(layer, rank, x, weights)
        rows = recv_x * 2.0
        y, nothing = fused_combine(rows, None, handle)
        true("fused_combine returns None beside y", nothing is None)
        for name, tensor, node in (
            ("recv_x", recv_x, "FusedDispatchBackward"),
            ("recv_weights", recv_weights, "FusedDispatchBackward"),
            ("y", y, "FusedCombineBackward"),
        ):
            true(f"{name} comes from {tensor.grad_fn}", tensor.grad_fn is not None and tensor.grad_fn.name() == node)
            true(f"{name} is contiguous", tensor.is_contiguous())
            true(f"{name} is a view", not tensor._is_view())
            size = tensor.numel() * tensor.element_size()
            true(f"{name} owns its storage", tensor.untyped_storage().nbytes() == size and not tensor.storage_offset())
        true("one node for both results", recv_x.grad_fn is recv_weights.grad_fn)
        true("no gradient for counts", not counts.requires_grad)
        true("no gradient for indices", recv_idx is None or not recv_idx.requires_grad)
        inputs = {tensor.data_ptr() for tensor in (x, weights, layer.idx[rank], rows) if tensor.numel()}
        results = [tensor for tensor in (recv_x, recv_idx, recv_weights, counts, y) if tensor is not None]
        true("results share memory", not inputs & {tensor.data_ptr() for tensor in results})
        y += 1.0
        y.mul_(3.0)
        for spent in (recv_x, rows, x):
            spent.untyped_storage().resize_(0)
        y.sum().backward()
        chosen = [[expert for expert in row if expert >= 0] for row in layer.idx[rank].tolist()]
        homes = [{expert // scene.local_experts for expert in row} for row in chosen]
        sent = torch.tensor([len(row) for row in (chosen if scene.layout == "expert" else homes)])
        assert x.grad is not None
        true("gradient of x", torch.equal(x.grad, 6.0 * sent[:, None].double().expand(-1, scene.hidden)))
    return wrong


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_outputs_are_fresh_and_may_be_changed_or_freed(ranks: RankPool, layout: str, adversary: int | None) -> None:
    scene = scene_for(ranks.world, layout, routing="masked", adversary=adversary)
    assert ranks.run(outputs, scene) == [[]] * ranks.world


def strided(rank: int, world: int, scene: Scene) -> bool:
    """Whether inputs and gradients of odd strides give what contiguous ones give."""
    results = []
    for odd in (False, True):
        layer = Layer(scene)
        x, weights, matrices, biases = leaves(layer, rank)
        given = (x.t().contiguous().t(), weights.repeat_interleave(2, 1)[:, ::2]) if odd else (x, weights)
        with buffers():
            if odd:
                layer.idx[rank] = layer.idx[rank].int().t().contiguous().t()
            y = layer_forward(layer, rank, *given, matrices, biases)
            y.backward(layer.targets[rank].t().contiguous().t() if odd else layer.targets[rank])
        results.append([y, x.grad, weights.grad, matrices.grad, biases.grad])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_strides_and_index_dtype_do_not_matter(ranks2: RankPool, layout: str) -> None:
    assert ranks2.run(strided, scene_for(2, layout)) == [True, True]


def elsewhere_by_default(rank: int, world: int, layout_of_rows: str, alignment: int) -> list[str]:
    """Devices of what comes out under another default device."""
    with buffers(), torch.device("meta" if rank else "cpu"):
        x, weights = torch.ones(3, 8, device="cpu").requires_grad_(), torch.ones(3, 2, device="cpu").requires_grad_()
        idx = torch.arange(6, device="cpu").view(3, 2)
        sent = fused_dispatch(x, idx, weights, 12, None, layout=layout_of_rows, expert_alignment=alignment)
        recv, _, recv_weights, counts, handle = sent
        y, _ = fused_combine(recv, None, handle)
        (y.sum() + recv_weights.sum()).backward()
        assert x.grad is not None
        assert weights.grad is not None
        return [str(one.device) for one in (recv, counts, handle.padded_tokens_per_expert, y, x.grad, weights.grad)]


@pytest.mark.parametrize(("layout_of_rows", "alignment"), [("token", 1), ("expert", 1), ("expert", 8)])
def test_the_default_device_does_not_matter(ranks2: RankPool, layout_of_rows: str, alignment: int) -> None:
    for devices in ranks2.run(elsewhere_by_default, layout_of_rows, alignment):
        assert set(devices) == {"cpu"}


def compiled(rank: int, world: int, scene: Scene) -> tuple[bool, int, Failure | None, list[str]]:
    """Whether a compiled step equals the eager one, how many graphs it has, the error in one graph, and warnings."""
    import torch._dynamo.testing

    layer, results = Layer(scene), []
    counter = torch._dynamo.testing.CompileCounter()

    def step(x: Tensor, weights: Tensor, matrices: Tensor, biases: Tensor) -> Tensor:
        return layer_forward(layer, rank, x * 1.5, weights, matrices, biases).sin()

    with buffers(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for function in (step, torch.compile(step, backend=counter)):
            inputs = leaves(layer, rank)
            y = function(*inputs)
            y.backward(layer.targets[rank])
            results.append([y, *(leaf.grad for leaf in inputs)])
        whole = raised_by(lambda: torch.compile(step, backend="eager", fullgraph=True)(*leaves(layer, rank)))
    torch._dynamo.reset()
    equal = all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True))
    return equal, counter.frame_count, whole, [str(each.message) for each in caught]


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_a_clean_graph_break_under_compile(ranks2: RankPool, layout: str) -> None:
    for equal, graphs, whole, caught in ranks2.run(compiled, scene_for(2, layout), timeout=120):
        assert equal
        assert graphs >= 2
        assert whole is not None
        assert whole.isa("Unsupported")
        assert caught == []


# What is refused.


def inference(rank: int, world: int, scene: Scene) -> tuple[bool, Failure, bool]:
    """Inside inference_mode all works; its handle is refused for training, and a combine without gradients is not."""
    layer = Layer(scene)
    with buffers():
        with torch.inference_mode():
            recv_x, *_, handle = dispatch_of(layer, rank, layer.x[rank], layer.weights[rank])
            y, _ = fused_combine(recv_x, None, handle)
        rows = torch.ones(handle.num_rows, scene.hidden, dtype=scene.dtype)
        again, _ = fused_combine(rows, None, handle)
        failure = raised_by(lambda: fused_combine(rows.clone().requires_grad_(), None, handle))
        after, _ = fused_combine(rows, None, handle)
        return y.shape == layer.x[rank].shape, failure, torch.equal(again, after)


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_a_handle_of_inference_mode_is_refused_for_training(ranks2: RankPool, layout: str) -> None:
    for fine, failure, after in ranks2.run(inference, scene_for(2, layout)):
        assert fine
        assert after
        assert failure.isa("HandleError")
        assert "inference_mode" in failure.text
        assert "train" in failure.text


def second_derivative(rank: int, world: int, scene: Scene) -> list[Failure | None]:
    layer, failures = Layer(scene), []
    with buffers():
        for number in range(2):
            x, weights, matrices, biases = leaves(layer, rank)
            y = layer_forward(layer, rank, x, weights, matrices, biases)
            of = (x, weights)[number]
            loss = y.pow(2).sum() if number else (y + x.pow(3) if y.shape == x.shape else y).sum()
            failures.append(raised_by(partial(torch.autograd.grad, loss, of, create_graph=True)))
    return failures


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_second_derivatives_raise(ranks2: RankPool, layout: str) -> None:
    for failures in ranks2.run(second_derivative, scene_for(2, layout)):
        for failure in failures:
            assert failure is not None
            assert failure.isa("InputError")
            assert "second derivative" in failure.text
