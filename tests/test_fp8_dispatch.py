"""FP8 dispatch over the embedded buffer: bytes, gradients, errors; and the arithmetic of buffers and channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_fp8_cases as cases
import pytest
import torch
import torch.distributed as dist
from gpu_fp8_cases import FORMATS, Place
from launch import RankPool
from scene import buffers, raised_by, replaced
from test_pretrain import SMALL, losses, train
from torch import Tensor

from megatron_moe_v2 import EmbeddedElasticBuffer, FlexTokenDispatcher, fused_combine, fused_dispatch
from megatron_moe_v2.buffers import Backend, deepep_v2
from megatron_moe_v2.buffers.channels import Token, cached_num_sms, channels_per_sm, sms_of_both
from megatron_moe_v2.buffers.contract import buffer_bytes
from megatron_moe_v2.errors import HandleError, InputError, LimitError
from megatron_moe_v2.fp8 import QuantizedRows, ScaleFormat, dequantize, quantize
from megatron_moe_v2.fp8_wire import buffer_hidden, dispatch_bytes
from megatron_moe_v2.pool import pool

both_adversaries = pytest.mark.parametrize("adversary", [None, 7], ids=["", "adversary"])
two_and_four = pytest.mark.parametrize("ranks", [2, 4], indirect=True)


@two_and_four
@both_adversaries
def test_bytes_and_scales_are_the_sender_s(ranks: RankPool, adversary: int | None) -> None:
    for wrong in ranks.run(cases.received, Place(adversary=adversary), timeout=120.0):
        assert wrong == []


@two_and_four
@both_adversaries
def test_gradients_are_the_bf16_path_s_on_the_quantised_values(ranks: RankPool, adversary: int | None) -> None:
    dtype = torch.bfloat16 if adversary or ranks.world == 4 else torch.float32
    for wrong in ranks.run(cases.gradients, Place(adversary=adversary, dtype=dtype), timeout=120.0):
        assert wrong == []


@both_adversaries
def test_gradient_of_the_combine_in_fp8(ranks2: RankPool, adversary: int | None) -> None:
    for wrong in ranks2.run(cases.gradients_in_fp8, Place(adversary=adversary), timeout=120.0):
        assert wrong == []


@both_adversaries
def test_recomputation(ranks2: RankPool, adversary: int | None) -> None:
    for wrong in ranks2.run(cases.recomputed, Place(adversary=adversary), timeout=120.0):
        assert wrong == []


def test_one_rank(ranks1: RankPool) -> None:
    place = Place(hidden=128, topk=2)
    for job in (cases.received, cases.gradients, cases.gradients_in_fp8, cases.captured):
        assert ranks1.run(job, place, timeout=120.0) == [[]]


def buffers_are_shared(rank: int, world: int, hidden: int) -> int:
    """How many buffers an FP8 and a bfloat16 dispatch of one width build."""
    with buffers() as built:
        x, idx, weights = torch.ones(2, hidden).bfloat16(), torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 2)
        for fp8 in (None, ScaleFormat(), ScaleFormat(kind="ue8m0")):
            fused_dispatch(x, idx, weights, 4, None, fp8=fp8)
        return len(built)


@pytest.mark.parametrize(("hidden", "count"), [(256, 1), (200, 2)])
def test_fp8_and_bf16_layers_share_a_buffer_where_nothing_is_padded(ranks2: RankPool, hidden: int, count: int) -> None:
    assert ranks2.run(buffers_are_shared, hidden) == [count, count]


# Errors, on every rank.

IDX, WEIGHTS = torch.tensor([[0, 1], [3, 2], [1, -1]]), torch.ones(3, 2)


def dispatch(x: Tensor | None = None, **options: Any) -> Any:
    x = torch.ones(3, 256).bfloat16() if x is None else x
    return fused_dispatch(x, IDX, WEIGHTS, 4, None, **{"fp8": ScaleFormat(), **options})


KINDS = ("float32 rows", "ue8m0 rows")


def float16_on_one_rank(rank: int) -> Any:
    return dispatch(torch.ones(3, 256).to(torch.float16 if rank else torch.bfloat16))


def combine_of_wrong_dtype(rank: int) -> Any:
    *_, handle = dispatch(fp8_backward=True)
    rows = torch.zeros(handle.num_rows, 256, dtype=torch.float16 if rank else torch.bfloat16)
    return fused_combine(rows, None, handle)


def on_v1(rank: int) -> Any:
    entry = pool.obtain(dist.group.WORLD, hidden=256, num_topk=2)
    v1 = Backend(name="deepep_v1", class_name="LegacyElasticBuffer", reason="a test")
    with replaced(entry, "backend", v1):
        return dispatch()


def fp32_on_v2(rank: int) -> Any:
    entry = pool.obtain(dist.group.WORLD, hidden=256, num_topk=2)
    v2 = Backend(name="deepep_v2", class_name="ElasticBuffer", reason="a test")
    with replaced(entry, "backend", v2):
        return dispatch(torch.ones(3, 256))


def cached_with_other_rows(rank: int) -> Any:
    from megatron_moe_v2 import RoutingLayout

    kept = RoutingLayout()
    dispatch(layout_cache=kept)
    return fused_dispatch(
        torch.ones(2, 256).bfloat16(), IDX[:2], WEIGHTS[:2], 4, None, fp8=ScaleFormat(), layout_cache=kept
    )


MISTAKES: dict[str, tuple[Callable[[int], Any], type | str, str]] = {
    "float16 tokens on one rank": (float16_on_one_rank, InputError, "x of an FP8 dispatch"),
    "float64 tokens": (lambda rank: dispatch(torch.ones(3, 256).double()), InputError, "x of an FP8 dispatch"),
    "no channels": (lambda rank: dispatch(torch.ones(3, 0).bfloat16()), InputError, "hidden of an FP8 dispatch"),
    "a format by name": (lambda rank: dispatch(fp8="e4m3"), InputError, "expected a ScaleFormat"),
    "dequantize=False without fp8": (lambda rank: dispatch(fp8=None, dequantize=False), InputError, "without fp8"),
    "fp8_backward without fp8": (lambda rank: dispatch(fp8=None, fp8_backward=True), InputError, "without fp8"),
    "dequantize by number": (lambda rank: dispatch(dequantize=1), InputError, "True or False"),
    "fp8 on one rank": (lambda rank: dispatch(fp8=ScaleFormat() if rank else None), "RankMismatchError", ""),
    "kinds of scales differ": (lambda rank: dispatch(fp8=FORMATS[KINDS[rank]]), "RankMismatchError", ""),
    "combine of float16 with fp8_backward": (combine_of_wrong_dtype, InputError, "fp8_backward"),
    "V1": (on_v1, LimitError, "DeepEP V1"),
    "float32 tokens on V2": (fp32_on_v2, LimitError, "DeepEP V2"),
    "a kept layout of other rows": (cached_with_other_rows, HandleError, "token_indices"),
}  # fmt: skip


def mistakes(rank: int, world: int, check: int) -> dict[str, Any]:
    with buffers(CHECK=check):
        dispatch()  # there is a buffer, over which ranks tell each other
        return {name: raised_by(lambda: mistake(rank)) for name, (mistake, _, _) in MISTAKES.items()}  # noqa: B023


@pytest.mark.parametrize("check", [0, 1])
def test_mistakes_raise_on_every_rank(ranks2: RankPool, check: int) -> None:
    for seen in ranks2.run(mistakes, check, timeout=120.0):
        for name, (_, kind, text) in MISTAKES.items():
            assert seen[name] is not None, name
            assert seen[name].isa(kind), (name, seen[name])
            assert text in seen[name].text, (name, seen[name])


def bad_pairs(rank: int, world: int) -> dict[str, Any]:
    """What the embedded buffer answers to pairs that do not fit, and to a buffer that is too small."""
    tokens = quantize(torch.ones(3, 256).bfloat16())
    roomy = EmbeddedElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=256, num_topk=2)
    small = EmbeddedElasticBuffer(dist.group.WORLD, num_bytes=2 * 1024 * 1024)

    def call(buffer: EmbeddedElasticBuffer, pair: tuple[Tensor, Tensor], ceiling: int = 8) -> Any:
        return raised_by(lambda: buffer.dispatch(pair, topk_idx=IDX, num_experts=4, num_max_tokens_per_rank=ceiling))

    return {
        "rows": call(roomy, (tokens.data, tokens.scales[:2])),
        "dimensions": call(roomy, (tokens.data, tokens.scales[:, 0])),
        "eight bytes": call(roomy, (tokens.data, tokens.scales.double())),
        "room": call(small, tokens.pair, 8192),
    }


def test_pairs_that_do_not_fit(ranks2: RankPool) -> None:
    for seen in ranks2.run(bad_pairs):
        assert {name: failure.type_name for name, failure in seen.items()} == {
            "rows": "InputError",
            "dimensions": "InputError",
            "eight bytes": "InputError",
            "room": "LimitError",
        }


@pytest.mark.parametrize(
    "scales",
    [torch.ones(2, 2), torch.ones(3), torch.ones(3, 2).double(), torch.ones(3, 2).bfloat16(), None],
    ids=["rows", "one dimension", "float64", "bfloat16", "none"],
)
def test_scales_that_v2_would_assert_on(scales: Any) -> None:
    tokens = torch.zeros(3, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(InputError, match="scales of FP8 tokens"):
        deepep_v2.check_scales(scales, tokens)
    for right in (torch.ones(3, 2), torch.ones(2, 3).t(), torch.ones(3, 1, dtype=torch.int32)):
        deepep_v2.check_scales(right, tokens)


def wrong_reader(rank: int, world: int) -> list[Any]:
    with buffers():
        rows = dispatch(dequantize=False)[0]
        return [
            raised_by(lambda: rows.require(ScaleFormat(kind="ue8m0"))),
            raised_by(
                lambda: QuantizedRows(data=rows.data, scales=rows.scales, format=FORMATS["ue8m0 rows"], hidden=256)
            ),
            raised_by(lambda: QuantizedRows(data=rows.data, scales=rows.scales[:, :1], format=rows.format, hidden=256)),
            raised_by(
                lambda: QuantizedRows(
                    data=rows.data, scales=rows.scales, format=rows.format, hidden=256, anchor=torch.zeros(1, 256)
                )
            ),
        ]


def test_a_reader_that_wants_another_format_is_told(ranks2: RankPool) -> None:
    for seen in ranks2.run(wrong_reader):
        assert [failure.type_name for failure in seen] == ["InputError"] * 4


def of_the_dispatcher(rank: int, world: int) -> list[Any]:
    return [
        raised_by(lambda: FlexTokenDispatcher(num_experts=4, fp8=True)),  # type: ignore[arg-type]
        raised_by(lambda: FlexTokenDispatcher(num_experts=4, dequantize=False)),
    ]


def test_the_dispatcher_checks_its_options(ranks1: RankPool) -> None:
    assert [failure.type_name for failure in ranks1.run(of_the_dispatcher)[0]] == ["InputError"] * 2


def the_documented_trick(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """``dequantize(rows) + rows.anchor`` is the de-quantised tensor with its gradient."""
    with buffers():
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
        rows, _, _, _, handle = dispatch(x, dequantize=False)
        y, _ = fused_combine(dequantize(rows) + rows.anchor, None, handle)
        y.float().square().sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad


def test_the_anchor_adds_nothing_but_the_gradient(ranks1: RankPool) -> None:
    ((y, grad),) = ranks1.run(the_documented_trick)
    assert torch.equal(grad, 2 * y)


def the_page_s_expert(rank: int, world: int, code: str) -> list[bool]:
    """Gradients of the page's FP8 expert are those of a plain product with the de-quantised rows."""
    draw = torch.Generator().manual_seed(rank)
    results = []
    for fmt in FORMATS.values():
        tokens = torch.randn(3, 256, generator=draw).bfloat16()
        matrix = torch.randn(256, 256, generator=draw).div(16).bfloat16()
        seen = []
        for ours in (True, False):
            x, weight = tokens.clone().requires_grad_(), matrix.clone().requires_grad_()
            with buffers():
                dispatcher = FlexTokenDispatcher(num_experts=2, layout="expert", fp8=fmt, dequantize=False)

                def gemm(pair: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
                    return dequantize(QuantizedRows(data=pair[0], scales=pair[1], format=fmt, hidden=256)) @ weight  # noqa: B023

                if ours:
                    names = {"FlexTokenDispatcher": lambda **_: dispatcher, "ScaleFormat": type(fmt), "x": x}  # noqa: B023
                    names |= {"topk_idx": IDX.clamp_max(1), "topk_weights": WEIGHTS, "weight": weight, "gemm": gemm}
                    exec(code, names)
                    y, sent = names["y"], names["sent"]
                else:
                    sent = dispatcher.dispatch(x, IDX.clamp_max(1), WEIGHTS)
                    y = (dequantize(sent.tokens) + sent.tokens.anchor) @ weight
                out = dispatcher.combine(y, sent)  # type: ignore[arg-type]
                out.float().square().sum().backward()
            assert x.grad is not None
            assert weight.grad is not None
            seen.append((out.detach(), x.grad, weight.grad))
        results.append(all(torch.equal(one, other) for one, other in zip(*seen, strict=True)))
    return results


def test_the_page_s_expert(ranks1: RankPool) -> None:
    page = (Path(__file__).parent.parent / "docs" / "fp8.md").read_text()
    (code,) = [part.split("```")[0] for part in page.split("```python")[1:] if "class Experts" in part]
    assert ranks1.run(the_page_s_expert, code) == [[True] * len(FORMATS)]


# Arithmetic.


def test_a_buffer_for_bf16_rows_of_the_stored_width_carries_fp8() -> None:
    for hidden, topk, ranks in itertools.product(
        (1, 64, 80, 127, 128, 129, 143, 144, 200, *range(256, 8193, 128)), (1, 2, 8, 32), (1, 2, 8, 16, 64)
    ):
        width = buffer_hidden(hidden)
        room = buffer_bytes(num_ranks=ranks, num_max_tokens_per_rank=4096, hidden=width, num_topk=topk)
        for kind in ("float32", "ue8m0"):
            scales = ScaleFormat(kind=kind).width(hidden)  # type: ignore[arg-type]
            sizes = {"num_ranks": ranks, "num_max_tokens_per_rank": 4096, "num_topk": topk, "width": width}
            quantised = dispatch_bytes(**sizes, num_scales=scales)
            plain = dispatch_bytes(**sizes, num_scales=0, element_size=2)
            assert quantised <= plain <= room, (hidden, topk, ranks, kind)


def test_a_buffer_sized_for_fp8_rows_alone_would_not_carry_the_backward() -> None:
    """Why ``use_fp8_dispatch`` of the specification is not used: many ranks, few choices."""
    sizes = {"num_ranks": 16, "num_max_tokens_per_rank": 4096, "num_topk": 2}
    quantised = buffer_bytes(**sizes, hidden=7168, use_fp8_dispatch=True)
    assert dispatch_bytes(**sizes, width=7168, num_scales=0, element_size=2) > quantised


def in_channels(hidden: int, topk: int, ranks: int, experts: int, kind: str | None) -> int:
    padded = -(-hidden // 256) * 256
    scales = None if kind is None else ScaleFormat(kind=kind).width(hidden)  # type: ignore[arg-type]
    token = Token(width=padded if kind is None else hidden, num_scales=scales, num_topk=topk)
    return channels_per_sm(token, num_ranks=ranks, num_experts=experts)


def test_channels_at_the_sizes_that_are_known() -> None:
    assert in_channels(7168, 8, 16, 256, None) == 7
    assert in_channels(7168, 8, 16, 256, "float32") == 8
    assert in_channels(2048, 8, 16, 128, None) == in_channels(2048, 8, 16, 128, "float32") == 8
    differ = {
        hidden
        for hidden in range(512, 8193, 128)
        if in_channels(hidden, 8, 16, 256, None) != in_channels(hidden, 8, 16, 256, "float32")
    }
    assert differ == {7040, 7168, 8064, 8192}


def test_the_bf16_backward_has_the_channels_of_the_fp8_forward() -> None:
    for hidden, topk, (ranks, experts) in itertools.product(
        range(512, 8193, 128), (1, 4, 8, 9, 32), ((16, 128), (16, 256), (64, 256), (128, 2048))
    ):
        plain = in_channels(hidden, topk, ranks, experts, None)
        for kind, limit in itertools.product(("float32", "ue8m0"), (4, 8, 20, 24, 64, 132)):
            quantised = in_channels(hidden, topk, ranks, experts, kind)
            forward, backward = sms_of_both(limit, quantised, plain)
            channels = forward * quantised  # what the handle holds
            assert backward * plain == channels, "the assertion of the cached dispatch"
            assert cached_num_sms(channels, plain, 132) == backward
            assert cached_num_sms(channels, quantised, 132) == forward, "a recomputation, or a gradient in FP8"
            assert channels % forward == 0, "the assertion of the combine"
            assert max(forward, backward) <= max(limit, 8)
            if quantised == plain:
                assert forward == limit


def test_channels_that_no_sm_count_gives_are_refused() -> None:
    with pytest.raises(LimitError, match="multiple of 7"):
        cached_num_sms(24 * 8, 7, 132)
    with pytest.raises(LimitError, match="132 SMs"):
        cached_num_sms(133 * 7, 7, 132)
    with pytest.raises(LimitError, match="bytes of a token"):
        in_channels(65536, 8, 16, 256, None)


# Training.


TAKING: dict[str, tuple[str, ...]] = {"opened": (), "as they are": ("--fp8-experts",)}


@pytest.mark.slow
def test_experts_that_take_fp8_rows_train_alike(tmp_path: Path) -> None:
    """Where no FP8 product is to be had, the experts de-quantise themselves: the same steps."""
    flags = (*SMALL, "--layout", "expert", "--steps", 4, "--no-save", "--fp8-dispatch")
    curves = [losses(train(1, tmp_path / name, *flags, *more)[0]) for name, more in TAKING.items()]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@pytest.mark.slow
def test_training_in_fp8_ends_where_bf16_does(tmp_path: Path) -> None:
    """A hundred steps of the tiny model; both curves agree, and the picture holds both where it can be drawn."""
    flags = ("--preset", "tiny", "--device", "cpu", "--dtype", "bf16", "--steps", 100, "--no-save")
    plain, _ = train(2, tmp_path / "bf16", *flags)
    compare = ("--compare", tmp_path / "bf16" / "log.jsonl")
    quantised, printed = train(2, tmp_path / "fp8", *flags, "--fp8-dispatch", *compare)
    assert "dispatch: FP8 with float32 scales, gradients in bf16" in printed
    assert losses(quantised)[0] == pytest.approx(losses(plain)[0], rel=1e-3)
    assert losses(quantised) != losses(plain)
    ends = [sum(losses(records)[-20:]) / 20 for records in (quantised, plain)]
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
