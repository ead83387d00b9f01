"""megatron-core's MoE layer with tokens in FP8, in both layouts: near what it gives without, and the same in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_cases import LAYOUTS, POOLS, Case, differences, installed, megatron, run_layer
from scene import Recorder, buffers, raised_by

from megatron_moe_v2.fp8 import ScaleFormat

pytestmark = pytest.mark.megatron


def in_fp8(rank: int, world: int, case: Case, fp8_backward: bool) -> tuple[list[str], set[str]]:
    """What differs between layouts, and by more than the rounding from the alltoall dispatcher; dtypes on the wire."""
    megatron()
    want = run_layer(case, "alltoall")
    results, dtypes = {}, set()
    for layout in LAYOUTS:
        options = {"fp8": ScaleFormat(kind="ue8m0"), "fp8_backward": fp8_backward}
        with (
            installed(layout, **options),
            buffers(kind=Recorder, adversary=case.adversary, MAX_TOKENS_PER_RANK=case.ceiling()) as built,
        ):
            original = built_dtypes(dtypes)
            with original:
                results[layout] = run_layer(case, "flex")
        assert len(built) == 1
    lines = [f"between layouts: {line}" for line in differences(results["token"], results["expert"], case.dtype)]
    for name, value in want.items():
        off = float((results["token"][name].double() - value.double()).norm() / value.double().norm())
        if not 0 < off < 0.1:
            lines.append(f"{name} is off by {off:.3f}")
    return lines, dtypes


def built_dtypes(dtypes: set[str]) -> Any:
    """While it holds, what recorded buffers dispatch is noted."""
    from scene import replaced

    dispatch = Recorder.dispatch

    def noting(self: Any, x: Any, **arguments: Any) -> Any:
        kind = "cached " if arguments.get("handle") is not None else ""
        dtypes.add(kind + str((x[0] if isinstance(x, tuple) else x).dtype).removeprefix("torch."))
        return dispatch(self, x, **arguments)

    return replaced(Recorder, "dispatch", noting)


@pytest.mark.parametrize("fp8_backward", [False, True], ids=["", "gradient too"])
def test_layer_in_fp8(fp8_backward: bool) -> None:
    case = Case(adversary=3, seq_length=32, dtype=torch.float32)
    back = "float8_e4m3fn" if fp8_backward else "float32"
    for lines, dtypes in POOLS[2].run(in_fp8, case, fp8_backward, timeout=120.0):
        assert lines == []
        assert dtypes == {"float8_e4m3fn", f"cached {back}"}


def bad_options(rank: int, world: int) -> list[Any]:
    from megatron_moe_v2.megatron import install

    return [raised_by(lambda: install(fp8="e4m3")), raised_by(lambda: install(fp8_backward=True))]  # type: ignore[arg-type]


def test_install_checks_its_options() -> None:
    for seen in POOLS[2].run(bad_options):
        assert [failure.type_name for failure in seen] == ["InputError", "InputError"]
