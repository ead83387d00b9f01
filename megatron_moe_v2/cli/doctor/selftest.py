"""A small round trip with gradients on whatever is here, counted value by value, in children with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from .findings import FAIL, OK, Finding, one_line

__all__ = ["round_trip", "run", "selftest_check"]

_MARK = "selftest-result: "
_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import run; run(sys.argv[2])"

TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS = 128, 1024, 4, 8
_DIGITS, _BASE = 3, 32


def selftest_check(device: str, timeout: float) -> Iterator[Finding]:
    """Run :func:`run` in a child. Under a launcher the child takes this rank's place; rank 0's knows the result."""
    command = [sys.executable, "-c", _START.format(module=__name__), json.dumps(sys.path), device]
    environ = dict(os.environ)
    environ.setdefault("OMP_NUM_THREADS", "1")
    child = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = False
    try:
        output, noise = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(child.pid, signal.SIGKILL)
        output, noise = child.communicate()
    result = next((line for line in output.splitlines() if line.startswith(_MARK)), None)
    facts = json.loads(result.removeprefix(_MARK)) if result else None
    yield _judge(facts, child.returncode, timeout if late else None, noise)


def _judge(facts: dict[str, Any] | None, code: int, late: float | None, noise: str) -> Finding:
    needed = "every payload, sum and gradient exact"
    if late is not None:
        return Finding(
            id="selftest",
            group="selftest",
            status=FAIL,
            found=f"not finished within {late:g} s",
            needed=needed,
            fix="On a GPU the first run compiles: run it again, compiled kernels are kept. Else the ranks do not meet.",
        )
    if code != 0:
        lines = [line for line in noise.splitlines() if "Error" in line] or noise.splitlines() or ["it wrote nothing"]
        return Finding(
            id="selftest",
            group="selftest",
            status=FAIL,
            found=f"ended with status {code}: {one_line(lines[-1], 600)}",
            needed=needed,
            fix="Do what the message says.",
        )
    if facts is None:
        return Finding(id="selftest", group="selftest", status=OK, found="this rank took part; rank 0 has the result")
    good = facts["exact"] == facts["payloads"] and not facts["wrong_sums"] and not facts["wrong_gradients"]
    return Finding(
        id="selftest",
        group="selftest",
        status=OK if good else FAIL,
        found=f"{facts['ranks']} ranks on {facts['device']}, {facts['kind']}: per-expert payloads exact "
        f"{facts['exact']}/{facts['payloads']}, wrong sums {facts['wrong_sums']}, "
        f"wrong gradients {facts['wrong_gradients']}",
        needed=needed,
        fix=""
        if good
        else "Run it with MCORE_DEEPEP_V2_BACKEND=embedded: if that is exact, DeepEP or its setup is wrong.",
    )


def run(device: str) -> None:
    """The child: under a launcher this rank's part, else as many local ranks as there are GPUs, or two on the CPU."""
    import torch

    from .. import local_ranks

    if local_ranks.launched() is not None:
        with local_ranks.joined(device) as place:
            _rank(place)
        return
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise SystemExit("RuntimeError: --device cuda, and torch sees no GPU")
    ranks = min(gpus, 8) or 2
    local_ranks.spawn(_rank, ranks, "cuda" if gpus else "cpu")


def _rank(device: Any) -> None:
    """One rank's part; rank 0 prints the result. Collective over the default group."""
    import torch.distributed as dist

    facts = round_trip(device)
    if dist.get_rank() == 0:
        print(f"{_MARK}{json.dumps(facts)}", flush=True)
    dist.barrier()


def round_trip(device: Any) -> dict[str, Any]:
    """Both layouts, forward and backward: what was exact, over all ranks. Collective over the default group."""
    import torch
    import torch.distributed as dist

    from ...pool import close_buffers
    from ...prepare import prepare_buffer
    from ..measure import subjects
    from ..verify import Oracle, make_inputs

    group = dist.group.WORLD
    assert group is not None
    num_experts = LOCAL_EXPERTS * group.size()
    inputs = make_inputs(
        TOKENS, HIDDEN, num_experts, TOPK, dtype=torch.bfloat16, device=device, seed=1000 + group.rank()
    )
    numbers = group.rank() * TOKENS + torch.arange(TOKENS, device=device)
    with torch.no_grad():  # a row's first elements say which token it is, in digits that sum exactly in bfloat16
        for digit in range(_DIGITS):
            inputs.x[:, digit] = (numbers // _BASE**digit % _BASE).to(inputs.x.dtype)
    oracle = Oracle(inputs, num_experts, group)
    entry = prepare_buffer(group, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=TOKENS)
    kind = entry.buffer.__class__.__name__ if entry.backend.name == "embedded" else entry.backend.class_name
    counts = torch.zeros(4, dtype=torch.int64, device=device)  # exact, payloads, wrong sums, wrong gradients
    for subject in subjects(["token", "expert"], num_experts, group, visible=False):
        inputs.x.grad = inputs.weights.grad = None
        sent = subject.dispatch(inputs.x, inputs.topk_idx, inputs.weights)
        for expert, rows in enumerate(sent.tokens.detach().split(sent.tokens_per_expert.tolist())):
            wanted = oracle.x[(oracle.topk_idx == oracle.first_expert + expert).any(1)]
            counts[0] += torch.equal(_in_order(rows), _in_order(wanted))
            counts[1] += 1
        combined = subject.combine(sent.tokens, sent)
        torch.autograd.backward([combined, sent.weights], [inputs.grad, sent.weights.detach()])
        assert inputs.x.grad is not None
        assert inputs.weights.grad is not None
        counts[2] += subject.wrong_sums(combined.detach(), inputs.x, oracle)
        counts[3] += subject.wrong_sums(inputs.x.grad, inputs.grad, oracle)
        counts[3] += oracle.wrong_weight_gradients(inputs.weights.grad)
    dist.all_reduce(counts, group=group)
    close_buffers()
    names = ("exact", "payloads", "wrong_sums", "wrong_gradients")
    facts: dict[str, Any] = dict(zip(names, counts.tolist(), strict=True))
    return facts | {"ranks": group.size(), "device": str(device.type), "kind": kind}


def _in_order(rows: Any) -> Any:
    """Rows by the token number in their first elements."""
    key = sum(rows[:, digit].long() * _BASE**digit for digit in range(_DIGITS))
    return rows[key.argsort()]
