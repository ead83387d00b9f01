"""Lines to export: a shell takes them, settings allow them, the doctor has nothing against them. Names as typed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_moe_v2.cli import bench, main
from megatron_moe_v2.cli.doctor.environment import (
    EP_VARIABLES,
    NCCL_VARIABLES,
    Surroundings,
    environment_check,
)
from megatron_moe_v2.cli.env import FABRICS, effective
from megatron_moe_v2.settings import DEEPEP_DEFAULTS, PREFIX, VARIABLES, read, unknown

ROOT = Path(__file__).parent.parent
RDMA = {"ib": "infiniband", "roce": "infiniband", "efa": "efa", "nvlink": None, "single-gpu": None}
HOSTS = {"ib": "16", "roce": "16", "efa": "16", "nvlink": "8", "single-gpu": "2"}


@pytest.mark.parametrize("optional", [False, True], ids=["as-printed", "with-all-that-is-optional"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_exported_lines(capsys: pytest.CaptureFixture[str], fabric: str, optional: bool) -> None:
    assert main(["env", fabric]) == 0
    text = capsys.readouterr().out
    if optional:
        text = text.replace("# export", "export")
    before = {"PATH": "/usr/bin:/bin", "USER": "me", "EP_DISABLE_GIN": "0"}
    shell = subprocess.run(["bash", "-euc", f"{text}\nenv -0"], env=before, capture_output=True, text=True, timeout=30)
    assert shell.returncode == 0, shell.stderr
    environ = dict(line.split("=", 1) for line in shell.stdout.split("\0") if line)
    read(environ)
    known = {variable.name for variable in VARIABLES} | {*EP_VARIABLES, *NCCL_VARIABLES}
    assert {name for name in environ if name.startswith((PREFIX, "EP_", "NCCL_"))} <= known
    local = "8" if fabric != "single-gpu" else "2"
    environ |= {"WORLD_SIZE": HOSTS[fabric], "LOCAL_WORLD_SIZE": local}
    around = Surroundings(gpu=True, v2=True, rdma=RDMA[fabric], nccl="2.30.7")
    assert [one for one in environment_check(environ, around) if one.status != "ok"] == []
    assert ("EP_DISABLE_GIN" in environ) == (RDMA[fabric] is None)
    if optional:
        assert environ["EP_JIT_CACHE_DIR"] == "/tmp/deep_ep_me"


@pytest.mark.parametrize("fabric", FABRICS)
def test_every_line_has_reason_and_source(capsys: pytest.CaptureFixture[str], fabric: str) -> None:
    main(["env", fabric, "--json"])
    found = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in found["exports"]]
    assert len(names) == len(set(names))
    assert all(one["reason"] and one["source"] for one in found["exports"])
    for one in found["exports"]:
        if one["source"].startswith("docs/"):
            assert (
                one["name"] in (ROOT / one["source"]).read_text()
                or one["name"].removeprefix(PREFIX) in (ROOT / one["source"]).read_text()
            )


def test_settings_in_force() -> None:
    environ = {f"{PREFIX}NUM_SMS": "tune", f"{PREFIX}CHECK": "1", f"{PREFIX}MODE": "hybird", f"{PREFIX}HIDDEN": " "}
    found = {one.name: one for one in effective(environ)}
    assert set(found) == {*(variable.name for variable in VARIABLES), *DEEPEP_DEFAULTS}
    assert (found[f"{PREFIX}NUM_SMS"].value, found[f"{PREFIX}NUM_SMS"].origin) == ("tune", "environment")
    assert (found[f"{PREFIX}CHECK"].value, found[f"{PREFIX}DETERMINISTIC"].value) == ("1", "0")
    assert found[f"{PREFIX}HIDDEN"].origin == "default"
    assert "hybrid, direct" in found[f"{PREFIX}MODE"].problem
    assert found["NCCL_CUMEM_ENABLE"].origin.startswith("set by this package")


@pytest.mark.parametrize(
    ("environ", "origin"),
    [({"NCCL_CUMEM_ENABLE": "0"}, "environment"), ({f"{PREFIX}SET_ENV": "0"}, "unset")],
    ids=["the-user's", "not-allowed-to"],
)
def test_variables_of_others(environ: dict[str, str], origin: str) -> None:
    (found,) = (one for one in effective(environ) if one.name == "NCCL_CUMEM_ENABLE")
    assert found.origin.startswith(origin)


def test_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}MAX_TOKENS_PER_RANK", "4096")
    assert main(["env", "--show"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "MAX_TOKENS_PER_RANK" in line)
    assert line.split() == [f"{PREFIX}MAX_TOKENS_PER_RANK", "4096", "environment"]
    monkeypatch.setenv(f"{PREFIX}MAX_TOKENS_PER_RANK", "-1")
    assert main(["env", "--show", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["settings"]
    assert [one["name"] for one in found if one["problem"]] == [f"{PREFIX}MAX_TOKENS_PER_RANK"]


def test_a_misspelt_setting_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(f"{PREFIX}MAX_TOKENS", "4096")
    assert main(["env", "--show"]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(f"nothing reads it; did you mean {PREFIX}MAX_TOKENS_PER_RANK?")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MCORE_DEEPEP_BACKEND", "BACKEND"),
        ("MCORE_DEEPEPV2_MODE", "MODE"),
        ("mcore_deepep_v2_backend", "BACKEND"),
        ("MCORE_DEEP_EP_V2_NUM_SMS", "NUM_SMS"),
        ("DEEPEP_V2_MAX_TOKENS_PER_RANK", "MAX_TOKENS_PER_RANK"),
    ],
)
def test_a_wrong_prefix_is_shown_and_diagnosed(name: str, meant: str) -> None:
    (found,) = (one for one in effective({name: "1"}) if one.problem)
    assert (found.name, found.value) == (name, "1")
    assert found.problem == f"nothing reads it; did you mean {PREFIX}{meant}?"
    (slip,) = (one for one in environment_check({name: "1"}, Surroundings()) if one.id == "unknown-variables")
    assert (slip.status, slip.found) == ("warn", f"{name} (did you mean {PREFIX}{meant}?)")


def test_names_of_others_are_no_wrong_prefix() -> None:
    others = ("MCORE_VERSION", "MODE", "BACKEND", "MEGATRON_CORE_0_16", "DEEPEP_HOME", "MAX_TOKENS_PER_RANK", "HIDDEN")
    environ = dict.fromkeys([*others, *EP_VARIABLES, *NCCL_VARIABLES, *(one.name for one in VARIABLES)], "1")
    assert unknown(environ) == {}


@pytest.mark.parametrize(
    ("typed", "name"), [("infiniband", "ib"), ("IB", "ib"), ("Single_GPU", "single-gpu"), ("NVLink", "nvlink")]
)
def test_fabric_by_another_spelling(capsys: pytest.CaptureFixture[str], typed: str, name: str) -> None:
    assert main(["env", name]) == 0
    expected = capsys.readouterr().out
    assert main(["ENV", typed]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        (["help"], "usage: megatron-moe-v2 [--help]"),
        (["help", "env"], "usage: megatron-moe-v2 env "),
        (["Help", "Plan"], "usage: megatron-moe-v2 plan "),
        (["--help"], "usage: megatron-moe-v2 [--help]"),
    ],
    ids=" ".join,
)
def test_help(capsys: pytest.CaptureFixture[str], typed: list[str], printed: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main(typed)
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith(printed)


@pytest.mark.parametrize("typed", ["helper", "doctors", ""], ids=["helper", "doctors", "empty"])
def test_no_command(typed: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main([typed])
    assert raised.value.code == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtype_by_its_long_name(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for typed in (str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.").upper()):
        assert bench._DTYPES[bench._parse(["--dtype", typed]).dtype] == dtype


@pytest.mark.parametrize("arguments", [[], ["ethernet"], ["ib", "--show"]], ids=["nothing", "unknown", "both"])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["env", *arguments])
    assert raised.value.code == 2
