"""The planner: presets, configurations, buffer bytes, limits, and the command without torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_moe_v2.buffers import deepep_v2
from megatron_moe_v2.buffers.contract import buffer_bytes
from megatron_moe_v2.cli import main
from megatron_moe_v2.cli.plan import Bandwidths, make_plan
from megatron_moe_v2.cli.plan import limits as plan_limits
from megatron_moe_v2.cli.plan.memory import num_buffer_bytes, padded
from megatron_moe_v2.cli.plan.model import PRESETS, Cluster, Model, from_config
from megatron_moe_v2.errors import SettingsError

ROOT = Path(__file__).parent.parent

# Parameters that the publishers state; routed experts hold nearly all of them.
BILLIONS = {
    "deepseek-v3": 671,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "glm-4.5": 355,
    "kimi-k2": 1040,
    "gpt-oss-120b": 116.8,
    "mixtral-8x7b": 46.7,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_size(name: str) -> None:
    preset = PRESETS[name]
    experts = preset.num_layers * preset.num_experts * 3 * preset.hidden * preset.expert_ffn / 1e9
    assert 0.94 < experts / BILLIONS[name] < 1
    assert preset.source


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("multiple", [False, True], ids=["one-reduction", "multiple-reduction"])
@pytest.mark.parametrize("topk", [0, 1, 8])
def test_buffer_bytes_on_one_domain(ranks: int, fp8: bool, multiple: bool, topk: int) -> None:
    sizes: dict[str, Any] = {"hidden": 2048, "num_topk": topk, "num_max_tokens_per_rank": 4097}
    expected = buffer_bytes(num_ranks=ranks, use_fp8_dispatch=fp8, allow_multiple_reduction=multiple, **sizes)
    for hybrid in (False, True):
        cluster = Cluster(ranks=ranks)
        assert num_buffer_bytes(cluster, hybrid=hybrid, fp8=fp8, multiple_reduction=multiple, **sizes) == expected


@pytest.mark.parametrize(("ranks", "bytes_seen"), [(1, 18_874_368), (2, 35_651_584)])
def test_buffer_bytes_seen_on_a_gpu(ranks: int, bytes_seen: int) -> None:
    found = num_buffer_bytes(Cluster(ranks=ranks), hidden=2048, num_topk=8, num_max_tokens_per_rank=4096)
    assert found == bytes_seen


def test_limits_are_those_of_the_backend() -> None:
    for name in ("MAX_HYBRID_LANES",):
        assert getattr(plan_limits, name) == getattr(deepep_v2, name)
    assert plan_limits.MAX_TOPK == deepep_v2.MAX_NUM_TOPK
    assert plan_limits.MAX_EXPERTS == deepep_v2.MAX_NUM_EXPERTS
    assert plan_limits.MAX_LOCAL_EXPERTS == deepep_v2.MAX_NUM_LOCAL_EXPERTS
    assert plan_limits.LARGEST_PADDING == deepep_v2._LARGEST_PADDING
    for hidden in (256, 2880, 7168):
        assert padded(hidden) == deepep_v2.padded_hidden(hidden)
    from megatron_moe_v2.settings import Settings

    assert Settings().max_tokens_per_rank == plan_limits.DEFAULT_CEILING


@pytest.mark.parametrize(
    ("change", "cluster", "limit"),
    [
        ({}, {}, None),
        ({"num_topk": 33}, {}, "top-k"),
        ({"num_topk": 17}, {"ranks": 16, "etp": 2}, "top-k"),
        ({"num_experts": 4096}, {"ranks": 16}, "experts"),
        ({"num_experts": 514}, {"ranks": 2}, "local-experts"),
        ({"num_experts": 66}, {}, "experts-per-rank"),
        ({"num_experts": 2048}, {"ranks": 2048, "gpus_per_node": 64}, "ranks"),
        ({"num_experts": 1936}, {"ranks": 16}, "hybrid-lanes"),
        ({"num_experts": 512}, {"ranks": 512}, "scale-out-ranks"),
        ({"num_experts": 144}, {"ranks": 144, "gpus_per_node": 72}, "scale-up-ranks"),
        ({}, {"ranks": 4, "gpus_per_node": 3}, "uneven-nodes"),
        ({"hidden": 300}, {}, "hidden"),
        ({"hidden": 2880}, {}, None),
        ({}, {"micro_batch": 8192}, "memory"),
        ({}, {"seq_len": 16384}, None),
    ],
)
def test_limit(change: dict[str, int], cluster: dict[str, int], limit: str | None) -> None:
    sizes = {"hidden": 1024, "num_experts": 64, "num_topk": 8, "num_layers": 1, "expert_ffn": 512, **change}
    made = make_plan(Model(name="m", **sizes), Cluster(**{"ranks": 8, **cluster}))  # type: ignore[arg-type]
    hit = [one.id for one in made.limits if one.status == "fail"]
    assert (limit in hit) if limit else not hit


def test_warnings_do_not_fail() -> None:
    made = make_plan(PRESETS["gpt-oss-120b"], Cluster(ranks=8, seq_len=131072, cp=8))
    assert {one.id: one.status for one in made.limits} == {"hidden": "warn", "ceiling": "warn"}


def test_ceiling_and_exports() -> None:
    preset = PRESETS["deepseek-v3"]
    made = make_plan(preset, Cluster(ranks=64, seq_len=4096, micro_batch=2, tp=2, cp=3), mode="direct", fabric="efa")
    assert made.ceiling == 1366
    assert made.exports[0] == "export MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK=1366"
    assert "export MCORE_DEEPEP_V2_MODE=direct" in made.exports
    assert "export FI_PROVIDER=efa" in made.exports
    assert "export EP_DISABLE_GIN=1" not in made.exports
    alone = make_plan(preset, Cluster(ranks=8))
    assert "export EP_DISABLE_GIN=1" in alone.exports


def test_time_is_that_of_the_slower_link() -> None:
    speed = Bandwidths(nvlink_gbs=100, rdma_gbs=10, efficiency=0.5)
    assert speed.seconds(100e9, 1e9) == pytest.approx(2)
    assert speed.seconds(1e9, 100e9) == pytest.approx(20)


def test_activations() -> None:
    """4 ranks, one expert each, all selected: every rank receives every token once, in both layouts."""
    sizes = Model(name="m", hidden=256, num_experts=4, num_topk=4, num_layers=1, expert_ffn=512)
    made = make_plan(sizes, Cluster(ranks=4, seq_len=100), alignment=1)
    token, expert = made.activations["token"], made.activations["expert"]
    row, rows = 512, 400
    assert (token.received, token.moved, token.output) == (rows * row, rows * row, rows * row)
    assert (expert.received, expert.moved) == (rows * row, 0)
    assert token.inner == rows * 3 * 512 * 2
    assert token.kept == expert.kept == expert.peak == 2 * rows * row + token.inner
    assert token.peak == token.kept + 2 * rows * row
    padded_rows = make_plan(sizes, Cluster(ranks=4, seq_len=100), alignment=129).activations["expert"]
    assert padded_rows.received == (rows + 64) * row


CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "deepseek": (
        {
            "hidden_size": 7168,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "moe_intermediate_size": 2048,
            "intermediate_size": 18432,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "noaux_tc",
        },
        (7168, 256, 8, 58, 2048, 8, 4),
    ),
    "qwen3": (
        {
            "hidden_size": 2048,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        (2048, 128, 8, 48, 768, 1, 1),
    ),
    "every-second-but-two": (
        {
            "hidden_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 8,
            "moe_intermediate_size": 8,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1, 2],
        },
        (16, 4, 2, 3, 8, 1, 1),
    ),
    "mixtral": (
        {
            "hidden_size": 4096,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
        },
        (4096, 8, 2, 32, 14336, 1, 1),
    ),
    "nested": (
        {
            "model_type": "vl",
            "text_config": {
                "hidden_size": 64,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 2,
                "moe_intermediate_size": 8,
            },
        },
        (64, 4, 2, 2, 8, 1, 1),
    ),
}


@pytest.mark.parametrize(("config", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_config(tmp_path: Path, config: dict[str, Any], expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for place in (tmp_path, tmp_path / "config.json"):
        m = from_config(place)
        found = (m.hidden, m.num_experts, m.num_topk, m.num_layers, m.expert_ffn, m.num_groups, m.topk_groups)
        assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json"), ("[]", "object"), ('{"hidden_size": 8}', "n_routed_experts"), (None, "No such file")],
    ids=["no-json", "no-object", "dense", "missing"],
)
def test_config_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError, match=message):
        from_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["--ranks", "63"], "experts-per-rank"),
        (["--ranks", "2048"], "ranks"),
        (["--ranks", "64", "--seq-len", "1000000"], "memory"),
    ],
    ids=["uneven", "too-many", "too-long"],
)
def test_nothing_to_export_where_a_limit_fails(
    capsys: pytest.CaptureFixture[str], arguments: list[str], limit: str
) -> None:
    code, out, _ = run(capsys, "--model", "deepseek-v3", *arguments)
    assert code == 1
    *_, tail = out.split("\n\n")
    reason, *lines = tail.splitlines()
    assert reason.startswith("# not to be exported, for limits fail: ")
    assert limit in reason
    assert lines[0].startswith("# export MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK=")
    assert all(line.startswith("# ") for line in lines)


def test_experts_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def line(*more: str) -> str:
        return run(capsys, "--model", "deepseek-v3", *more)[1].splitlines()[2]

    assert line("--ranks", "63").endswith("256 experts do not divide over them")
    assert line("--ranks", "64").endswith("4 experts a rank")
    assert line("--ranks", "64", "--etp", "2").endswith("8 experts a rank, expert tensor parallel 2")


@pytest.mark.parametrize(("tp", "cp"), [(3, 1), (1, 3)], ids=["tp", "cp"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_sequence_that_does_not_divide(tp: int, cp: int, micro_batch: int) -> None:
    made = make_plan(PRESETS["deepseek-v3"], Cluster(ranks=64, tp=tp, cp=cp, micro_batch=micro_batch))
    (found,) = (one for one in made.limits if one.id == "sequence")
    assert found.status == "warn"
    assert f"4096 does not divide over tp {tp} x cp {cp}" in found.found
    assert "4098" in found.fix
    assert not make_plan(PRESETS["deepseek-v3"], Cluster(ranks=64, tp=2, cp=2)).limits


def test_no_two_presets_are_one_name() -> None:
    assert len({name.replace("-", "").replace(".", "").lower() for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize("name", ["deepseekv3", "DeepSeek-V3", "deepseek_v3", "DEEPSEEK.V3"])
def test_preset_by_another_spelling(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, "--model", name, "--ranks", "16", "--mode", "Direct", "--fabric", "InfiniBand")
    assert code == 0
    assert out.startswith("DeepSeek-V3:")
    assert out.endswith("export MCORE_DEEPEP_V2_MODE=direct\n")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(["plan", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "deepseek-v3", "--ranks", "64")
    assert code == 0
    for text in ("ceiling   4096 tokens", "4867489792 bytes", "from 4 of 8 groups", "limits    none", "worst case"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 140


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--hidden", "1024", "--experts", "64", "--topk", "4", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["model"]["source"] == "flags"
    assert found["phases"]["dispatch"]["expected"]["between"] == 0
    assert set(found) == {
        "model",
        "cluster",
        "mode",
        "fp8",
        "bandwidths",
        "ceiling",
        "num_buffer_bytes",
        "copies",
        "phases",
        "activations",
        "limits",
        "exports",
    }


def test_flags_change_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--model", "deepseek-v3", "--topk", "6", "--json")
    changed = json.loads(out)["model"]
    assert (changed["num_topk"], changed["num_groups"]) == (6, 8)
    _, out, _ = run(capsys, "--model", "deepseek-v3", "--ungrouped", "--json")
    assert json.loads(out)["model"]["num_groups"] == 1


def test_fp8_moves_and_reserves_less(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fp8 = (
        json.loads(run(capsys, "--model", "kimi-k2", "--ranks", "32", "--json", *more)[1]) for more in ([], ["--fp8"])
    )
    halves = [one["phases"]["dispatch"]["expected"]["between"] for one in (fp8, plain)]
    assert 0.5 < halves[0] / halves[1] < 0.54
    assert fp8["phases"]["combine"] == plain["phases"]["combine"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "--model, --config"),
        (["--model", "gpt-5"], 2, "invalid choice"),
        (["--model", "kimi-k2", "--config", "x"], 2, "not both"),
        (["--config", "/no/such"], 2, "config.json"),
        (["--model", "kimi-k2", "--ranks", "0"], 2, "no integer from 1"),
        (["--model", "kimi-k2", "--etp", "3"], 2, "a multiple of the 3"),
        (["--model", "kimi-k2", "--efficiency", "1.5"], 2, "above 1"),
        (["--model", "kimi-k2", "--plot", "x.svg"], 2, "--sweep"),
        (["--hidden", "8", "--experts", "4", "--topk", "5"], 2, "at most the 4"),
        (["--model", "mixtral-8x7b", "--ranks", "16"], 1, "experts-per-rank"),
        (["--help"], 0, "deepseek-v3"),
    ],
)
def test_exit_status(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str) -> None:
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert text in out + err


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", "deepseek-v3", "--sweep", "--json")
    points = json.loads(out)
    assert code == 0
    assert [one["ranks"] for one in points] == [2**power for power in range(12)]
    for one in points:
        assert one["simulated"] == pytest.approx([one["ranks_of_token"], one["nodes_of_token"]], rel=0.03)
        assert one["between"] <= one["plain_between"] * 1.01
    for field in ("num_buffer_bytes", "ranks_of_token", "nodes_of_token", "within", "between", "seconds"):
        values = [one[field] for one in points]
        assert values == sorted(values), field
    assert "ranks" in points[-1]["hit"]
    assert "scale-out-ranks" not in points[8]["hit"]
    table = run(capsys, "--model", "deepseek-v3", "--sweep")[1]
    assert "2048" in table


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sweep.svg"
    code, _, err = run(capsys, "--model", "qwen3-30b-a3b", "--sweep", "--plot", str(file))
    if importlib.util.find_spec("matplotlib") is None:
        assert code == 2
        assert "pip install matplotlib" in err
    else:
        assert code == 0
        assert "expert-parallel ranks" in file.read_text()


@pytest.mark.parametrize("arguments", [["plan", "--model", "kimi-k2"], ["env", "ib"]], ids=["plan", "env"])
def test_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        f"from megatron_moe_v2.cli import main; sys.exit(main({arguments}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
