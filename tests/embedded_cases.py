"""Runs in the ranks: one case of dispatch, cached dispatch and combine on the embedded buffer against the oracle.

A case describes the inputs of all ranks; each rank draws them all from the case's seed, so that it knows what it must
receive without asking. Checks note what is wrong and go on, because a rank that stopped would leave the others waiting.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from embedded_inputs import CEILING, Case, World
from oracle import Key
from torch import Tensor

from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer

__all__ = ["POISON", "Findings", "buffer_of", "check_cases", "same_bits"]

POISON = -(2**30)
WIDEST = 64  # hidden size that test buffers are built for, in bf16 elements: fp64 of 16 fits


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    dense = [each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (got, want)]
    return torch.equal(*dense)


@dataclass
class Findings:
    """What was wrong, a line each."""

    rank: int
    label: str = ""
    lines: list[str] = field(default_factory=list)

    def true(self, what: str, holds: object, note: object = "") -> None:
        if not holds:
            self.lines.append(f"[{self.label}] rank {self.rank}: {what} {note}".rstrip())

    def equal(self, what: str, got: object, want: object) -> None:
        self.true(what, got == want and type(got) is type(want), f"got {got!r}, expected {want!r}")

    def bits(self, what: str, got: Tensor | None, want: Tensor) -> None:
        if got is None:
            self.true(what, False, "is None")
        else:
            self.true(what, same_bits(got, want), f"got {_brief(got)}, expected {_brief(want)}")

    def poisoned(self, what: str, got: Tensor) -> None:
        bad = got.float().isnan() if got.is_floating_point() else got == POISON
        self.true(f"{what} is not poisoned", bool(bad.all()), _brief(got))


def _brief(value: Tensor) -> str:
    return f"{tuple(value.shape)} {value.dtype} {value.flatten()[:8].tolist()}"


def buffer_of(**options: Any) -> Any:
    """An embedded buffer of the default group with room for every case. Collective over it.

    Untyped, because what its methods return depends on their arguments.
    """
    sizes: dict[str, Any] = {"num_max_tokens_per_rank": CEILING, "hidden": WIDEST, "num_topk": 8}
    group = dist.group.WORLD
    assert group is not None
    return EmbeddedElasticBuffer(group, **(sizes | options))


class _Run:
    """One case on one rank."""

    def __init__(self, case: Case, rank: int, world: int, buffer: Any, findings: Findings) -> None:
        self.case, self.rank, self.buffer, self.found = case, rank, buffer, findings
        self.world = World(case, world)
        self.oracle = self.world.oracle
        self.sorted = case.adversary is None or case.deterministic
        self.received = self.oracle.received(rank)
        self.rows = len(self.received) if case.sync else self.oracle.worst_tokens()
        self.slots = len(self.oracle.slots(rank)) if case.sync else self.oracle.worst_slots()

    def __call__(self) -> None:
        case, rank = self.case, self.rank
        x: Any = self.world.x[rank]
        if case.scales is not None:
            x = (self.world.x[rank].float().to(torch.float8_e4m3fn), self.world.scales[rank])
        options: dict[str, Any] = {"do_expand": case.expand, "do_zero_padding": case.zero_padding}
        topk_idx = self.oracle.topk_idx[rank]
        got, recv_idx, recv_weights, handle, event = self.buffer.dispatch(
            x,
            topk_idx,
            self.world.weights[rank] if case.weights else None,
            num_experts=self.oracle.num_experts,
            num_max_tokens_per_rank=self.case.ceiling,
            expert_alignment=case.alignment,
            num_sms=12,
            do_cpu_sync=case.sync,
            use_tma_aligned_col_major_sf=case.tma,
            **options,
        )
        self.found.true("event", event.event is None)
        self.check_handle(handle)
        self.keys = self.check_metadata(handle)
        self.check_slot_numbers(handle)
        if case.scales is not None:
            fp8 = [tokens.float().to(torch.float8_e4m3fn) for tokens in self.world.x]
            self.check_rows("recv_x", got[0], fp8)
            self.check_rows("recv_sf", got[1], self.world.scales, padding=False)
            self.check_strides(got[1])
        else:
            self.check_rows("recv_x", got, self.world.x)
            self.found.true("recv_x contiguous", got.is_contiguous())
        self.check_indices(recv_idx)
        self.check_weights("recv_topk_weights", recv_weights, self.world.weights if case.weights else None)
        self.cached(handle, options)
        self.combine(handle, torch.bfloat16 if case.scales is not None else case.dtype, case.hidden, case.bias, True)
        self.combine(handle, torch.float32, 8, 0, False)

    # Where rows stand: filled by check_metadata from the handle, checked against the oracle there.

    def places(self) -> list[tuple[int, Key]]:
        """(row of the received tensor, its key); k of a token-layout key is the master lane."""
        if not self.case.expand:
            return [(i, (s, t, max(self.oracle.lanes(s, t, self.rank)))) for i, (s, t) in enumerate(self.keys)]
        return self.slot_keys

    def check_handle(self, handle: Any) -> None:
        case, oracle, rank, found = self.case, self.oracle, self.rank, self.found
        found.true("handle.do_expand", bool(handle.do_expand) is case.expand)
        found.equal("handle.num_experts", handle.num_experts, oracle.num_experts)
        found.equal("handle.expert_alignment", handle.expert_alignment, case.alignment)
        found.equal("handle.num_max_tokens_per_rank", handle.num_max_tokens_per_rank, self.case.ceiling)
        found.equal("handle.num_sms", handle.num_sms, 12)
        found.bits("handle.topk_idx", handle.topk_idx, oracle.topk_idx[rank])
        found.true("handle.topk_idx is a copy", handle.topk_idx is not oracle.topk_idx[rank])
        found.equal("handle.num_recv_tokens", handle.num_recv_tokens, self.rows)
        found.equal("handle.num_expanded_tokens", handle.num_expanded_tokens, self.slots)
        counts = oracle.aligned_counts(rank) if case.sync else []
        found.equal("handle.num_recv_tokens_per_expert_list", handle.num_recv_tokens_per_expert_list, counts)
        for name, want in (
            ("psum_num_recv_tokens_per_scaleup_rank", oracle.psum_ranks(rank)),
            ("psum_num_recv_tokens_per_expert", oracle.psum_experts(rank, expanded=case.expand)),
            ("num_unaligned_recv_tokens_per_expert", oracle.counts(rank)),
        ):
            found.bits(f"handle.{name}", getattr(handle, name), torch.tensor(want, dtype=torch.int32))
        found.equal("handle.token_metadata_at_forward", handle.token_metadata_at_forward, None)
        found.equal("handle.channel_linked_list", handle.channel_linked_list, None)

    def check_metadata(self, handle: Any) -> list[tuple[int, int]]:
        oracle, found, topk = self.oracle, self.found, self.case.topk
        table = handle.recv_src_metadata
        found.true("metadata dtype and shape", table.dtype == torch.int32 and table.shape == (self.rows, topk + 2))
        real = table[: len(self.received)].tolist()
        keys = [divmod(row[0], self.case.ceiling) for row in real]
        found.true("metadata names each received token once", sorted(keys) == self.received, keys)
        found.true("source ranks ascend", [k[0] for k in keys] == sorted(k[0] for k in keys), keys)
        if self.sorted and not (self.case.expand and self.case.adversary is not None):
            found.true("source tokens ascend", keys == self.received, keys)
        self.slot_keys: list[tuple[int, Key]] = []
        for (source, token), row in zip(keys, real, strict=True):
            lanes = oracle.lanes(source, token, self.rank)
            found.equal("metadata column 1", row[1], source * topk + lanes[-1])
            if self.case.expand:
                found.equal("metadata lanes", [k for k in range(topk) if row[2 + k] != -1], lanes)
                self.slot_keys += [(row[2 + k], (source, token, k)) for k in lanes]
        if self.case.expand:
            self.check_slots()
        if self.case.adversary is not None:
            found.poisoned("metadata past the received rows", table[len(self.received) :])
            if not self.case.expand:
                found.poisoned("slot columns of the token layout", table[:, 2:])
        return keys

    def check_slots(self) -> None:
        starts = self.oracle.starts(self.rank)
        for start, want in zip(starts, self.oracle.received_by_expert(self.rank), strict=True):
            inside = {slot: key for slot, key in self.slot_keys if key in want}
            self.found.equal("slots of an expert", sorted(inside), list(range(start, start + len(want))))
            if self.sorted:
                order = [inside[slot] for slot in sorted(inside)]
                self.found.true("order inside an expert", order == want, order)

    def check_slot_numbers(self, handle: Any) -> None:
        table, own = handle.dst_buffer_slot_idx, self.oracle.topk_idx[self.rank]
        self.found.true("dst_buffer_slot_idx", table.dtype == torch.int32 and table.shape == own.shape)
        for rank in range(self.world.size):
            numbers = []
            for token in range(len(own)):
                lanes = self.oracle.lanes(self.rank, token, rank)
                if lanes:
                    numbers.append(int(table[token, lanes[-1]]))
            first = self.rank * self.case.ceiling
            self.found.equal("slot numbers", sorted(numbers), list(range(first, first + len(numbers))))
        masters = sum(len(self.oracle.destinations(self.rank, token)) for token in range(len(own)))
        self.found.equal("slot numbers beside master lanes", int((table != -1).sum()), masters)

    def check_rows(self, what: str, got: Tensor, sent: Sequence[Tensor], padding: bool = True) -> None:
        """Rows of ``got`` are the rows of ``sent`` that the metadata promised, and the rest is as the case says."""
        count = self.slots if self.case.expand else self.rows
        self.found.equal(f"{what} shape", tuple(got.shape), (count, sent[0].shape[1]))
        if len(got) != count:
            return
        places = self.places()
        index = torch.tensor([row for row, _ in places], dtype=torch.int64)
        if places:
            want = torch.stack([_movable(sent[source])[token] for _, (source, token, _) in places])
            self.found.bits(what, _movable(got)[index], want)
        if self.case.expand and padding:
            self.check_gaps(what, got)
        if self.case.adversary is not None:
            filled = len(self.oracle.slots(self.rank)) if self.case.expand else len(self.received)
            self.found.poisoned(f"{what} tail", got[filled:])

    def check_gaps(self, what: str, got: Tensor) -> None:
        """Rows of the expert layout that pad an expert: zero when asked, poison under the adversary otherwise."""
        gaps = [slot for slot, key in enumerate(self.oracle.slots(self.rank)) if key is None]
        values = (got.float() if got.element_size() == 1 else got)[gaps]
        if self.case.zero_padding:
            self.found.true(f"{what} padding is zero", not bool(values.ne(0).any()))
        elif self.case.adversary is not None:
            self.found.poisoned(f"{what} padding", values)

    def check_strides(self, scales: Tensor) -> None:
        rows, width = scales.shape
        want = (1, -(-rows // 4) * 4) if self.case.tma else (width, 1)
        if rows:
            self.found.equal("recv_sf strides", scales.stride(), want)
        self.found.equal("recv_sf dtype", scales.dtype, self.case.scales)

    def check_indices(self, got: Tensor | None) -> None:
        if self.case.expand:
            self.found.true("recv_topk_idx is None in the expert layout", got is None)
            return
        assert got is not None
        want = [self.oracle.local_topk(source, token, self.rank) for source, token in self.keys]
        table = torch.tensor(want, dtype=torch.int64).view(-1, self.case.topk)
        self.found.equal("recv_topk_idx shape", tuple(got.shape), (self.rows, self.case.topk))
        self.found.bits("recv_topk_idx", got[: len(want)], table)
        if self.case.adversary is not None:
            self.found.poisoned("recv_topk_idx tail", got[len(want) :])

    def check_weights(self, what: str, got: Tensor | None, sent: Sequence[Tensor] | None) -> None:
        if sent is None:
            self.found.true(f"{what} is None", got is None)
        elif got is None:
            self.found.true(what, False, "is None")
        elif not self.case.expand:
            self.check_rows(what, got, sent)
        else:
            self.found.equal(f"{what} shape", tuple(got.shape), (self.slots,))
            places = self.places()
            want = torch.tensor([float(sent[s][t, k]) for _, (s, t, k) in places], dtype=self.world.weight_dtype)
            self.found.bits(what, got[torch.tensor([slot for slot, _ in places], dtype=torch.int64)], want)
            self.check_gaps(what, got)
            if self.case.adversary is not None:
                self.found.poisoned(f"{what} tail", got[len(self.oracle.slots(self.rank)) :])

    def cached(self, handle: Any, options: dict[str, Any]) -> None:
        """Other tokens, of another dtype and width, land where the first ones did."""
        before = {name: value.clone() for name, value in vars(handle).items() if isinstance(value, Tensor)}
        fresh = self.world.tokens(torch.float64 if self.case.dtype == torch.float64 else torch.float32, 24)
        weights = [torch.rand(w.shape, generator=self.world.draw).to(w.dtype) for w in self.world.weights]
        for given in (None, weights):
            got, recv_idx, recv_weights, again, _ = self.buffer.dispatch(
                fresh[self.rank],
                topk_weights=None if given is None else given[self.rank],
                num_sms=12,
                handle=handle,
                **options,
            )
            self.found.true("cached dispatch returns its handle", again is handle)
            self.check_rows("cached recv_x", got, fresh)
            self.check_indices(recv_idx)
            self.check_weights("cached recv_topk_weights", recv_weights, given)
        for name, value in before.items():
            self.found.true(f"cached dispatch leaves handle.{name}", same_bits(getattr(handle, name), value))

    def combine(self, handle: Any, dtype: torch.dtype, hidden: int, biases: int, weighted: bool) -> None:
        case, world, oracle, rank = self.case, self.world, self.oracle, self.rank
        outputs, returned = world.expert_rows(dtype, hidden), world.returned_weights()
        bias = [world.tokens(dtype, hidden) for _ in range(biases)]
        like = torch.empty(0, hidden, dtype=dtype)
        count = self.slots if case.expand else self.rows
        x = torch.full((count, hidden), torch.nan, dtype=dtype)
        shape = (count,) if case.expand else (count, case.topk)
        weights = torch.full(shape, torch.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        for row, (source, token, k) in self.places():
            x[row] = outputs[rank][(source, token, k) if case.expand else (source, token)]
            for lane in [k] if case.expand else oracle.lanes(source, token, rank):
                weights[row if case.expand else (row, lane)] = returned[rank][source, token, lane]
        mine = [each[rank] for each in bias]
        given: Any = None if not mine else mine[0] if len(mine) == 1 else tuple(mine)
        weighted = weighted and not (case.expand and not case.multiple_reduction)
        got, got_weights, event = self.buffer.combine(x, handle, topk_weights=weights if weighted else None, bias=given)
        self.found.true("event", event.event is None)
        if case.expand:
            want = oracle.combine_slots(rank, outputs, mine, like, multiple_reduction=case.multiple_reduction)
        else:
            want = oracle.combine_tokens(rank, outputs, mine, like)
        self.found.bits("combined_x", got, want)
        self.found.true("combined_x contiguous", got.is_contiguous())
        if weighted:
            exact = oracle.combine_weights(rank, lambda owner, key: returned[owner][key])
            self.found.bits("combined_topk_weights", got_weights, exact.to(weights.dtype))
        else:
            self.found.true("combined_topk_weights is None", got_weights is None)


def _movable(rows: Tensor) -> Tensor:
    """FP8 as bytes: the CPU cannot index it."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def check_cases(rank: int, world: int, cases: Sequence[Case]) -> list[str]:
    """Run all cases, one buffer for each set of buffer options; what was wrong, a line each."""
    found = Findings(rank)
    buffers: dict[tuple[object, ...], Any] = {}
    for case in cases:
        options = {
            "allow_multiple_reduction": case.multiple_reduction,
            "deterministic": case.deterministic,
            "adversary": case.adversary,
        }
        found.label = str(case)
        key = tuple(options.values())
        if key not in buffers:
            buffers[key] = buffer_of(**options)
        try:
            _Run(case, rank, world, buffers[key], found)()
        except Exception:
            found.true("raised", False, traceback.format_exc(limit=-4))
            break
    return found.lines
