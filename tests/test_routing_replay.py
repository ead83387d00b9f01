"""The experts of a rollout, repeated in training: what comes back, what is counted, what is refused, and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from oracle import moe
from torch import Tensor

from megatron_moe_v2 import FlexTokenDispatcher, InputError, RoutingReplay, close_buffers

LAYERS, SEQUENCES, POSITIONS, TOPK, EXPERTS = 2, 3, 4, 2, 8


def routing(seed: int = 0) -> Tensor:
    """int64 ``[LAYERS, SEQUENCES, POSITIONS, TOPK]``, no expert twice in a row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(LAYERS, SEQUENCES, POSITIONS, EXPERTS, generator=generator).topk(TOPK, dim=-1).indices


def empty_replay() -> RoutingReplay:
    return RoutingReplay(num_layers=LAYERS, num_sequences=SEQUENCES, num_positions=POSITIONS, num_topk=TOPK)


def recorded(chosen: Tensor) -> RoutingReplay:
    replay = empty_replay()
    for layer in range(LAYERS):
        replay.record(layer, chosen[layer])
    return replay


def token_by_token(replay: RoutingReplay, chosen: Tensor) -> None:
    position = torch.zeros(1, dtype=torch.int64)
    for place in range(POSITIONS):
        position.fill_(place)
        for layer in range(LAYERS):
            replay.record(layer, chosen[layer, :, place], position)


def prefill_then_tokens(replay: RoutingReplay, chosen: Tensor) -> None:
    for layer in range(LAYERS):
        replay.record(layer, chosen[layer, :, :2].flatten(0, 1))
        for place in range(2, POSITIONS):
            replay.record(layer, chosen[layer, None, :, place].to(torch.int32), place)


@pytest.mark.parametrize("how", [token_by_token, prefill_then_tokens])
def test_sequences_come_back_as_they_were_decoded(how: Callable[[RoutingReplay, Tensor], None]) -> None:
    replay, chosen = empty_replay(), routing()
    with torch.inference_mode():
        how(replay, chosen)
    for layer in range(LAYERS):
        own = routing(1)[layer]
        assert torch.equal(replay.replay(layer, own), chosen[layer])
        assert torch.equal(replay.replay(layer, own.flatten(0, 1)), chosen[layer].flatten(0, 1))
        assert torch.equal(replay.replay(layer, own[1:], sequences=slice(1, None)), chosen[layer, 1:])


def test_a_new_rollout_does_not_change_what_was_replayed() -> None:
    replay = recorded(routing())
    got = replay.replay(0, routing()[0])
    replay.clear()
    replay.record(0, routing(1)[0])
    assert torch.equal(got, routing()[0])


def test_disagreement_is_of_sets_and_leaves_out_what_selects_nothing() -> None:
    chosen = routing()
    replay, own = recorded(chosen), chosen.flip(-1).clone()
    assert replay.disagreement() == 0
    replay.compare(0, own[0])
    assert replay.counts.tolist() == [0, SEQUENCES * POSITIONS * TOPK]
    unused = next(e for e in range(EXPERTS) if e not in chosen[1, 0, 0])
    own[1, 0, 0, 0] = unused
    own[1, 1, 1, 1] = -1
    replay.compare(1, own[1])
    assert replay.counts.tolist() == [1, 2 * SEQUENCES * POSITIONS * TOPK - 1]
    assert replay.disagreement() == 1 / (2 * SEQUENCES * POSITIONS * TOPK - 1)
    replay.clear()
    assert replay.counts.tolist() == [0, 0]


def test_selections_of_nothing_are_recorded() -> None:
    chosen = routing()
    chosen[0, 0, 0] = -3
    assert torch.equal(recorded(chosen).replay(0, routing()[0]), chosen[0].clamp_min(-1))


REFUSED: dict[str, tuple[Callable[[RoutingReplay], object], str]] = {
    "fewer tokens": (lambda r: r.replay(0, routing()[0, 1:]), "got 8, expected 12, 3 sequences of 4 positions"),
    "fewer positions": (lambda r: r.replay(0, routing()[0, :, 1:]), "got 9, expected 12"),
    "other top-k": (lambda r: r.replay(0, routing()[0, ..., :1]), "expected integer [..., 2]"),
    "no such layer": (lambda r: r.compare(LAYERS, routing()[0]), "got 2, expected 0 to 1"),
    "not whole sequences": (lambda r: r.record(0, routing()[0].flatten(0, 1)[:4]), "a multiple of the 3 sequences"),
    "beyond the last position": (lambda r: r.record(0, routing()[0, :, :2], 3), "got 2 from 3, expected within 4"),
    "too many positions": (
        lambda r: r.record(0, routing()[0].repeat(1, 2, 1), torch.zeros(1, dtype=torch.int64)),
        "got 8, expected within 4",
    ),
    "indices as floats": (lambda r: r.record(0, routing()[0].float()), "torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    action, text = REFUSED[name]
    with pytest.raises(InputError) as raised:
        action(recorded(routing()))
    assert text in str(raised.value)


def test_replay_before_everything_was_recorded_names_what_is_missing() -> None:
    replay, chosen = empty_replay(), routing()
    with pytest.raises(InputError, match="layer 0, sequence 0, position 0 was not recorded"):
        replay.replay(0, chosen[0])
    replay.record(0, chosen[0])
    replay.record(1, chosen[1, :, :3])
    with pytest.raises(InputError, match="layer 1, sequence 0, position 3 was not recorded"):
        replay.replay(0, chosen[0])
    replay.record(1, chosen[1, :, 3], 3)
    replay.replay(1, chosen[1])
    replay.clear()
    with pytest.raises(InputError, match="was not recorded"):
        replay.compare(1, chosen[1])


@pytest.mark.parametrize("name", ["num_layers", "num_positions", "num_topk", "num_sequences"])
def test_numbers_that_cannot_be(name: str) -> None:
    numbers = {"num_layers": 1, "num_sequences": 1, "num_positions": 1, "num_topk": 1, name: -1}
    with pytest.raises(InputError, match=name):
        RoutingReplay(**numbers)


def replayed_step(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A layer of tanh experts that trains with a rollout's experts, all ranks' tokens alike in shape, on this rank."""
    generator = torch.Generator().manual_seed(3)
    x, gate, matrices = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((world, SEQUENCES * POSITIONS, 6), (6, EXPERTS), (EXPERTS, 6, 6))
    )
    mine, gate = x[rank].requires_grad_(), gate.requires_grad_()
    chosen = routing(10 + rank)
    replay = recorded(chosen)
    probs = (mine @ gate).softmax(-1)
    topk_idx = replay.replay(0, probs.topk(TOPK, dim=-1).indices)
    dispatcher = FlexTokenDispatcher(num_experts=EXPERTS)
    sent = dispatcher.dispatch(mine, topk_idx, probs.gather(-1, topk_idx))
    local = matrices[rank * dispatcher.num_local_experts :]
    parts = sent.tokens.split(sent.padded_tokens_per_expert.tolist())
    y = dispatcher.combine(torch.cat([torch.tanh(p @ m) for p, m in zip(parts, local, strict=False)]), sent)
    y.square().sum().backward()
    got_x, got_gate = mine.grad, gate.grad
    assert got_x is not None
    assert got_gate is not None

    alone, weight = x[rank].detach().clone().requires_grad_(), gate.detach().clone().requires_grad_()
    idx = chosen[0].flatten(0, 1)
    dense = (alone @ weight).softmax(-1).gather(-1, idx)
    (want,) = moe([alone], [idx], [dense], lambda e, rows: torch.tanh(rows @ matrices[e]))
    want.square().sum().backward()
    assert alone.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(y.detach(), want.detach())
    return got_x, alone.grad, got_gate, weight.grad, replay.counts


def test_gradients_flow_through_the_weights_at_the_recorded_experts(ranks2: RankPool) -> None:
    for got_x, want_x, got_gate, want_gate, counts in ranks2.run(replayed_step):
        torch.testing.assert_close(got_x, want_x)
        torch.testing.assert_close(got_gate, want_gate)
        assert want_gate.abs().max() > 0
        assert 0 < counts[0] < counts[1]


def unrecorded_on_one(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 forgot to record; rank 0 goes on to the layer's dispatch."""
    dispatcher = FlexTokenDispatcher(num_experts=EXPERTS)
    x, own = torch.zeros(SEQUENCES * POSITIONS, 16), routing()[0].flatten(0, 1)
    dispatcher.dispatch(x, own, torch.ones(own.shape))
    replay = RoutingReplay(
        num_layers=1, num_sequences=SEQUENCES, num_positions=POSITIONS, num_topk=TOPK, group=dist.group.WORLD
    )
    if rank == 0:
        replay.record(0, own)
    started = time.monotonic()
    try:
        dispatcher.dispatch(x, replay.replay(0, own), torch.ones(own.shape))
    except InputError as error:
        text = str(error)
    close_buffers()
    return text, time.monotonic() - started


def test_with_a_group_every_rank_hears_of_an_error(ranks2: RankPool) -> None:
    for text, seconds in ranks2.run(unrecorded_on_one):
        assert "the routing of layer 0, sequence 0, position 0 was not recorded" in text
        assert seconds < 3
