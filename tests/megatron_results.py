"""What the results of dispatch and combine must be to Megatron; functions for the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron_cases import Case, build_layer, differences, inputs, installed, megatron, run_layer
from megatron_dense import dense_output
from scene import buffers
from torch import Tensor


def against_dense(rank: int, world: int, layout: str, case: Case, extra_all_reduce: bool = False) -> list[str]:
    """The flex dispatcher's output against the dense oracle.

    Args:
        extra_all_reduce: sum the combined tokens over the tensor-parallel ranks once more.
    """
    from megatron.core import parallel_state

    megatron(case.tensor)
    with installed(layout), buffers(adversary=case.adversary, MAX_TOKENS_PER_RANK=case.ceiling()):
        layer = build_layer(case, "flex")
        if extra_all_reduce:
            combine = layer.token_dispatcher.token_combine

            def summed_again(*args: Any, **kwargs: Any) -> Tensor:
                combined: Tensor = combine(*args, **kwargs).clone()
                dist.all_reduce(combined, group=parallel_state.get_tensor_model_parallel_group())
                return combined

            layer.token_dispatcher.token_combine = summed_again
        x, _ = inputs(case, 0)
        y, _ = layer(x)
        return differences({"output": y.detach()}, {"output": dense_output(layer, x, tensor=case.tensor)}, case.dtype)


def without_gradients(rank: int, world: int, layout: str, case: Case) -> list[str]:
    """Evaluation in ``no_grad`` and ``inference_mode`` against the output of training, and training after both."""
    megatron(case.tensor)
    with installed(layout), buffers(MAX_TOKENS_PER_RANK=case.ceiling()):
        layer = build_layer(case, "flex")
        x, _ = inputs(case, 0)
        want = {"output": layer.train()(x)[0].detach()}
        lines = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got = layer.eval()(x)[0]
            lines += [f"{mode.__name__}: {line}" for line in differences({"output": got}, want, case.dtype)]
            if layer.token_dispatcher._comm_manager.handle is not None:
                lines.append(f"{mode.__name__}: a handle is left")
        layer.train()(x)[0].sum().backward()
    return lines


def contract(rank: int, world: int, layout: str, case: Case) -> list[str]:
    """What Megatron does to the results of dispatch and combine beyond reading them; what is not as it needs it."""
    megatron(case.tensor)
    want = run_layer(case, "alltoall")
    lines = []

    def require(fact: bool, text: str) -> None:
        if not fact:
            lines.append(text)

    with installed(layout), buffers(adversary=case.adversary, MAX_TOKENS_PER_RANK=case.ceiling()):
        layer = build_layer(case, "flex")
        dispatcher, manager = layer.token_dispatcher, layer.token_dispatcher._comm_manager
        flights = []
        for number in range(2):
            x, target = inputs(case, number)
            probs, routing_map = layer.route(x)
            hidden, probs = layer.preprocess(x, probs, routing_map)
            rows, row_probs = dispatcher.token_dispatch(hidden, probs)
            require(type(rows.grad_fn).__name__ == "FusedDispatchBackward", f"grad_fn of dispatch is {rows.grad_fn}")
            require(isinstance(rows.grad_fn._sequence_nr(), int), "no sequence number of dispatch")
            require(rows._base is None and rows.is_contiguous(), "the rows are a view")
            require(rows.untyped_storage().nbytes() == rows.numel() * rows.element_size(), "the rows share a storage")
            others = [row_probs, *([manager.dispatched_indices] if layout == "token" else [])]
            addresses = {one.untyped_storage().data_ptr() for one in [rows, *others]}
            require(len(addresses) == 1 + len(others), "rows, probabilities and indices share a storage")
            require(all(one.is_contiguous() for one in others), "probabilities or indices are not contiguous")
            require(row_probs.dtype == torch.float32, f"probabilities are {row_probs.dtype}")
            permuted, counts, permuted_probs = dispatcher.dispatch_postprocess(rows, row_probs)
            require(counts.device.type == "cpu" and counts.dtype == torch.int64, "counts are not int64 on the CPU")
            require(int(counts.sum()) == len(permuted) == len(permuted_probs), "counts are not those of the rows")
            output, _ = layer.experts(permuted, counts, permuted_probs)
            output = dispatcher.combine_preprocess(output)
            combined = dispatcher.token_combine(output)
            output.untyped_storage().resize_(0)
            require(type(combined.grad_fn).__name__ == "FusedCombineBackward", f"combine's is {combined.grad_fn}")
            require(isinstance(combined.grad_fn._sequence_nr(), int), "no sequence number of combine")
            require(combined._base is None and combined.is_contiguous(), "combine's result is a view")
            require(manager.handle is None and manager.dispatched_probs is None, "the manager keeps what it sent")
            combined += 1.0
            flights.append((x, target, dispatcher.combine_postprocess(combined)))
        for _, target, y in flights:
            (y * target).sum().backward()
    got = {f"output {number}": y.detach() - 1.0 for number, (_, _, y) in enumerate(flights)}
    got |= {f"x.grad {number}": x.grad for number, (x, _, _) in enumerate(flights)}
    got |= {f"{name}.grad": one.grad for name, one in layer.named_parameters() if one.grad is not None}
    return lines + differences(got, want, case.dtype)


def padded_counts(rank: int, world: int, case: Case) -> list[str]:
    """Rows and counts at the experts where GEMMs are quantised: padded to Megatron's number, the padding zero."""
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    megatron(case.tensor)
    lines = []
    with installed("expert"), buffers(adversary=case.adversary, MAX_TOKENS_PER_RANK=case.ceiling()):
        layer = build_layer(case, "flex")
        dispatcher, manager = layer.token_dispatcher, layer.token_dispatcher._comm_manager
        x, _ = inputs(case, 0)
        probs, routing_map = layer.route(x)
        rows, row_probs = dispatcher.token_dispatch(*layer.preprocess(x, probs, routing_map))
        real = manager.handle.ep_handle.num_unaligned_recv_tokens_per_expert.tolist()
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        wanted = get_align_size_for_quantization(layer.config)
        if counts.tolist() != [-(-count // wanted) * wanted for count in real] or counts.tolist() == real:
            lines.append(f"counts are {counts.tolist()} for {real} rows, to be padded to multiples of {wanted}")
        start = 0
        for count, padded in zip(real, counts.tolist(), strict=True):
            padding = slice(start + count, start + padded)
            if rows[padding].any() or row_probs[padding].any():
                lines.append("the padding is not zero")
            start += padded
        dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    return lines


def rows_sent(rank: int, world: int, layout: str, case: Case) -> tuple[int, int]:
    """Rows at the experts of all ranks, and selections that their routers left. Collective over the world."""
    megatron(case.tensor)
    with installed(layout), buffers(MAX_TOKENS_PER_RANK=case.ceiling()):
        layer = build_layer(case, "flex")
        x, _ = inputs(case, 0)
        probs, routing_map = layer.route(x)
        selected = int(routing_map.sum())
        rows, row_probs = layer.token_dispatcher.token_dispatch(*layer.preprocess(x, probs, routing_map))
        rows, _, _ = layer.token_dispatcher.dispatch_postprocess(rows, row_probs)
        sums = torch.tensor([len(rows), selected])
        dist.all_reduce(sums)
        layer.token_dispatcher.token_combine(layer.token_dispatcher.combine_preprocess(rows))
    return int(sums[0]), int(sums[1])
