"""``examples/rl_finetune.py`` as its readers run it, its parts by themselves, and the memory of repeated steps."""

from __future__ import annotations

import gc
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import RankPool
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 280
SMALL = shlex.split(
    "--hidden 32 --blocks 2 --heads 2 --kv-heads 1 --head-dim 16 --experts 8 --expert-ffn 32 "
    "--warmup-steps 40 --warmup-batch 32 --warmup-lr 1e-2 --prompts 4 --group 8 --device cpu --no-plots"
)
TIMES = ("rollout_s", "training_s", "memory_mib", "ranks")
Records = list[dict[str, Any]]


def finetune(ranks: int, out: Path, *flags: object, code: int = 0, **variables: str) -> tuple[Records, str]:
    """Run to the end; the log without times, and what was printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    line = [sys.executable, *torchrun, str(EXAMPLES / "rl_finetune.py"), *map(str, flags), "--out", str(out)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | variables
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    log = out / "log.jsonl"
    records = [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []
    return [{k: v for k, v in one.items() if k not in TIMES} for one in records], done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Six steps of the small model on two ranks, of which some found right answers."""
    records, _ = finetune(2, tmp_path_factory.mktemp("plain"), *SMALL, "--steps", 6)
    assert 0 < max(record["reward"] for record in records) < 1
    return records


VARIANTS: dict[str, tuple[str, ...]] = {
    "buffers rebuilt between the phases": ("--rebuild-buffers",),
    "the layouts swapped": ("--layout", "expert", "--decode-layout", "token"),
    "blocks recomputed": ("--recompute",),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "blocks recomputed" else []) for name in VARIANTS],
)
def test_one_seed_gives_one_curve(name: str, plain: Records, tmp_path: Path) -> None:
    records, printed = finetune(2, tmp_path, *SMALL, "--steps", 6, *VARIANTS[name])
    if name == "buffers rebuilt between the phases":
        assert records == plain
    assert [record["reward"] for record in records] == [record["reward"] for record in plain]
    for key in ("kl", "grad_norm", "logprob_gap"):
        got, want = ([record[key] for record in one] for one in (records, plain))
        assert got == pytest.approx(want, rel=1e-3, abs=1e-5)
    assert ("memory, last step: {" in printed) == (name == "buffers rebuilt between the phases")
    assert "reward: first 10 steps" in printed


@pytest.mark.slow
def test_resumed_run_goes_on(plain: Records, tmp_path: Path) -> None:
    finetune(2, tmp_path, *SMALL, "--steps", 6, "--stop-at", 3)
    records, printed = finetune(2, tmp_path, *SMALL, "--steps", 6, "--resume")
    assert "at step 3" in printed
    assert records == plain


def test_replay_leaves_no_other_experts_and_the_first_update_alike(plain: Records, tmp_path: Path) -> None:
    """After the first update of a rollout the router has moved, so only then replay changes what is run."""
    records, printed = finetune(2, tmp_path, *SMALL, "--steps", 6, "--routing-replay")
    assert "with replay it ran other experts in 0.000%" in printed
    assert [records[0][key] for key in ("reward", "logprob_gap")] == [
        plain[0][key] for key in ("reward", "logprob_gap")
    ]
    assert records[0]["disagreement"] > 0
    assert records != plain


def test_rollout_that_does_not_fit_is_refused_before_the_model_is_made(tmp_path: Path) -> None:
    variables = {"MCORE_DEEPEP_V2_DECODE_MAX_TOKENS_PER_RANK": "31"}
    _, printed = finetune(1, tmp_path, *SMALL, "--steps", 1, code=1, **variables)
    assert "set MCORE_DEEPEP_V2_DECODE_MAX_TOKENS_PER_RANK to at least 32" in printed
    assert "buffers:" not in printed


@pytest.mark.slow
def test_the_mean_reward_rises(tmp_path: Path) -> None:
    records, printed = finetune(2, tmp_path, "--device", "cpu", "--no-plots")
    first, last = (sum(record["reward"] for record in part) / 20 for part in (records[:20], records[-20:]))
    assert first < 0.6
    assert last > first + 0.25
    assert "rising=True" in printed


# The parts.


def import_examples() -> None:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))


def test_rewards_are_for_right_and_ended_answers() -> None:
    import_examples()
    from rl_task import Sums

    task = Sums(digits=1)
    pairs = torch.tensor([[7, 5], [1, 2], [1, 2], [1, 2], [9, 9]])
    written = [b"12\n", b"3\nx", b"3\n\n", b"03\n", b"183"]
    answers = torch.tensor([list(one) for one in written])
    assert task.rewards(pairs, answers).tolist() == [1, 1, 1, 0, 0]
    assert task.written(answers).sum(1).tolist() == [3, 2, 2, 3, 3]
    assert [bytes(row.tolist()) for row in task.prompts(pairs[:2])] == [b"7+5=", b"1+2="]
    assert Sums(digits=2).prompts(torch.tensor([[7, 50]])).tolist() == [list(b"07+50=")]


def test_advantages_compare_within_a_group() -> None:
    import_examples()
    from rl_grpo import advantages

    got = advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), 4)
    torch.testing.assert_close(got[:4], torch.tensor([3.0, -1, -1, -1]) / 3**0.5, rtol=1e-3, atol=0)
    assert got[4:].tolist() == [0, 0, 0, 0]


def test_the_objective_at_the_rollout_s_weights_is_the_policy_gradient() -> None:
    import_examples()
    from rl_grpo import grpo_terms

    rollout = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    now, written = rollout.clone().requires_grad_(), torch.tensor([[True, True], [True, False]])
    options = {"global_bytes": 3, "clip": 0.2, "kl_weight": 0.1}
    terms = grpo_terms(now, rollout, rollout, torch.tensor([2.0, -1.0]), written, **options)
    terms.loss.backward()
    assert now.grad is not None
    torch.testing.assert_close(now.grad, torch.tensor([[-2.0, -2.0], [1.0, 0.0]]) / 3)
    assert (float(terms.kl), float(terms.gap)) == (0.0, 0.0)
    far = grpo_terms(now.detach() + 1, rollout, rollout, torch.tensor([2.0, -1.0]), written, **options)
    e = torch.tensor(1.0).exp()
    kl = 3 * (1 / e + 1 - 1)
    torch.testing.assert_close(far.loss.float(), (0.1 * kl - 2 * 1.2 * 2 + e) / 3)


def decoded_and_trained(rank: int, world: int, decode_layout: str) -> tuple[float, float, int]:
    """The sampler's log-probabilities against the training forward's, and selections that differ."""
    import_examples()
    from moe_model import ModelConfig, MoELanguageModel
    from rl_grpo import answer_logprobs
    from rl_rollout import Sampler, gumbel_noise

    from megatron_moe_v2 import RoutingReplay, close_buffers, prepare_buffer

    config = ModelConfig(hidden=16, blocks=2, heads=2, kv_heads=1, head_dim=8, experts=4, top_k=2, expert_ffn=8)
    device = torch.device("cpu")
    model = MoELanguageModel(
        config,
        rank=rank,
        seed=1,
        compute_dtype=torch.float32,
        device=device,
        decode_layout=decode_layout,  # type: ignore[arg-type]
    )
    count, first, end = 5, (0, 3)[rank], (3, 5)[rank]
    prepare_buffer(hidden=16, num_topk=2, num_max_tokens_per_rank=64)
    replay = RoutingReplay(num_layers=2, num_sequences=end - first, num_positions=6, num_topk=2)
    sampler = Sampler(model, sequences=end - first, prompt_len=4, answer_len=3, replay=replay)
    sampler.capture()
    prompts = torch.randint(256, (count, 4), generator=torch.Generator().manual_seed(2))[first:end]
    rollout = sampler.sample(prompts, gumbel_noise(count, 3, 256, first, end, 7))
    logits, _ = model(rollout.tokens[:, :-1], one_window=rank == 0, choose=replay.replay)
    now = answer_logprobs(logits, rollout.tokens, 3)
    now.sum().backward()
    assert torch.equal(rollout.tokens[:, :4], prompts)
    assert not torch.equal(rollout.tokens[0, 4:], rollout.tokens[1, 4:])
    close_buffers()
    return float((now - rollout.logprobs).abs().max()), float(-now.mean()), int(replay.counts[0])


@pytest.mark.parametrize("decode_layout", ["token", "expert"])
def test_decoding_token_by_token_is_the_training_forward(ranks2: RankPool, decode_layout: str) -> None:
    for gap, nats, differing in ranks2.run(decoded_and_trained, decode_layout):
        assert gap < 1e-4
        assert nats > 1
        assert differing == 0


def one_layer(rank: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A dispatcher and a token batch of this rank."""
    from megatron_moe_v2 import FlexTokenDispatcher

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6, 8, generator=generator).requires_grad_()
    probs = torch.rand(6, 4, generator=generator).softmax(-1).requires_grad_()
    weights, idx = probs.topk(2, dim=-1)
    return FlexTokenDispatcher(num_experts=4, layout="expert"), x, idx, weights.detach().requires_grad_()


def loss_of(parts: Any, mode: str) -> torch.Tensor:
    """A step through the layer, recomputed or not; the loss, after backward."""
    from megatron_moe_v2 import RoutingLayout

    dispatcher, x, idx, weights = parts
    kept = RoutingLayout() if "kept" in mode else None

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sent = dispatcher.dispatch(x, idx, weights, layout_cache=kept)
        y: torch.Tensor = dispatcher.combine(torch.tanh(sent.tokens), sent)
        return y

    y = layer(x, weights) if mode == "none" else checkpoint(layer, x, weights, use_reentrant="non" not in mode)
    loss = y.square().sum()
    loss.backward()
    x.grad = weights.grad = None
    return loss.detach()


def growth(rank: int, world: int, mode: str, steps: int) -> tuple[dict[str, int], float]:
    """Objects by type, and elements of tensors a step, that ``steps`` more steps leave behind."""
    parts = one_layer(rank)

    def counted() -> tuple[Counter[str], int]:
        gc.collect()
        objects = gc.get_objects()
        tensors = [one for one in objects if type(one) is torch.Tensor]
        return Counter(type(one).__name__ for one in objects), sum(one.numel() for one in tensors)

    def some(count: int) -> None:
        for _ in range(count):
            loss_of(parts, mode)

    counted()  # fills caches, as the first steps do
    some(5)
    before, elements = counted()
    some(steps)
    after, more = counted()
    grown = {name: count - before[name] for name, count in after.items() if count - before[name] >= steps // 2}
    return grown, (more - elements) / steps


@pytest.mark.parametrize("mode", ["none", "reentrant", "reentrant, kept", "non-reentrant", "non-reentrant, kept"])
def test_repeated_steps_leave_nothing_behind(ranks2: RankPool, mode: str) -> None:
    for grown, elements in ranks2.run(growth, mode, 200):
        assert grown == {}
        assert elements < 8, "a row a step"


def slept(rank: int, world: int, cycles: int) -> tuple[list[float], int]:
    """The loss before each of ``cycles`` closes of the buffers, and the objects that these leave behind."""
    from megatron_moe_v2 import close_buffers, prepare_buffer

    parts, losses, counts = one_layer(rank), [], []
    for _ in range(cycles):
        prepare_buffer(hidden=8, num_topk=2, num_max_tokens_per_rank=8)
        prepare_buffer(hidden=8, num_topk=2, num_max_tokens_per_rank="decode")
        losses.append(float(loss_of(parts, "none")))
        close_buffers()
        gc.collect()
        counts.append(len(gc.get_objects()))
    return losses, counts[-1] - counts[4]


def test_buffers_may_sleep_and_wake_fifty_times(ranks2: RankPool) -> None:
    for losses, left in ranks2.run(slept, 50):
        assert len(set(losses)) == 1
        assert left < 45, "an object a cycle"
