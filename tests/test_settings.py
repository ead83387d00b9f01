"""The environment: each variable's bad values, unknown names, and that nothing else in the package reads it."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_moe_v2
from megatron_moe_v2 import SettingsError, settings
from megatron_moe_v2.settings import PREFIX, VARIABLES, Settings, name_of, read, snapshot

PACKAGE = Path(megatron_moe_v2.__file__).parent

GOOD = {
    "BACKEND": {"auto": "auto", "deepep_v2": "deepep_v2", "deepep_v1": "deepep_v1", "embedded": "embedded"},
    "MODE": {"hybrid": "hybrid", "direct": "direct"},
    "MAX_TOKENS_PER_RANK": {"1": 1, "4096": 4096, " 7 ": 7},
    "DECODE_MAX_TOKENS_PER_RANK": {"1": 1, "256": 256},
    "HIDDEN": {"0": 0, "7168": 7168},
    "NUM_TOPK": {"0": 0, "8": 8},
    "NUM_SMS": {"0": 0, "24": 24, "tune": -1},
    "NUM_QPS": {"0": 0, "17": 17},
    "CPU_TIMEOUT_SECS": {"1": 1, "300": 300},
    "GPU_TIMEOUT_SECS": {"1": 1, "100": 100},
    "SET_ENV": {"0": False, "1": True},
    "DETERMINISTIC": {"0": False, "1": True},
    "CHECK": {"0": False, "1": True},
    "AGREE_SECS": {"0.5": 0.5, "60": 60.0},
    "NVTX": {"0": False, "1": True},
}
BAD = {
    "BACKEND": ["deepep", "DEEPEP_V2", "auto,embedded"],
    "MODE": ["normal"],
    "MAX_TOKENS_PER_RANK": ["0", "-1", "8k", "4096.0", "nan", "2147483648"],
    "DECODE_MAX_TOKENS_PER_RANK": ["0", "many"],
    "HIDDEN": ["-256", "wide"],
    "NUM_TOPK": ["-1", "2.5"],
    "NUM_SMS": ["-1", "all"],
    "NUM_QPS": ["-1", "many"],
    "CPU_TIMEOUT_SECS": ["0", "1.5"],
    "GPU_TIMEOUT_SECS": ["0", "long"],
    "SET_ENV": ["no"],
    "DETERMINISTIC": ["yes", "2"],
    "CHECK": ["true", "01"],
    "AGREE_SECS": ["0", "-5", "inf", "nan", "soon", "1e18"],
    "NVTX": ["on"],
}


def cases(table: dict) -> list[tuple[str, str]]:
    return [(suffix, text) for suffix, texts in table.items() for text in texts]


def test_tables_cover_every_variable() -> None:
    suffixes = {variable.suffix for variable in VARIABLES}
    assert set(GOOD) == set(BAD) == suffixes
    assert {variable.field for variable in VARIABLES} == set(Settings().as_dict())


@pytest.mark.parametrize(("suffix", "text"), cases(GOOD))
def test_good_value(suffix: str, text: str) -> None:
    field = next(variable.field for variable in VARIABLES if variable.suffix == suffix)
    got = read({PREFIX + suffix: text})
    assert getattr(got, field) == GOOD[suffix][text]
    assert got.as_dict() == Settings().as_dict() | {field: GOOD[suffix][text]}
    assert name_of(field) == PREFIX + suffix


@pytest.mark.parametrize(("suffix", "text"), cases(BAD))
def test_bad_value_names_variable_value_and_allowed(suffix: str, text: str) -> None:
    allowed = next(variable.allowed for variable in VARIABLES if variable.suffix == suffix)
    with pytest.raises(SettingsError) as error:
        read({PREFIX + suffix: text})
    for part in (PREFIX + suffix, repr(text), allowed):
        assert part in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_value_is_unset(text: str) -> None:
    assert read({variable.name: text for variable in VARIABLES}) == Settings()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("BACKENDS", "BACKEND"), ("MAX_TOKENS", "MAX_TOKENS_PER_RANK"), ("NUM_SM", "NUM_SMS"), ("HIDEN", "HIDDEN")],
)
def test_unknown_name_suggests_the_nearest(name: str, nearest: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, settings.__name__):
        assert read({PREFIX + name: "1"}) == Settings()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(rf"\b{PREFIX}{name}\b.*\b{PREFIX}{nearest}\b", record.getMessage())


@pytest.mark.parametrize("name", ["MCORE_DEEPEP_BACKEND", "MCORE_DEEPEPV2_MODE", "mcore_deepep_v2_backend"])
def test_a_slip_in_the_prefix_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, settings.__name__):
        assert read({name: "direct"}) == Settings()
    (record,) = caplog.records
    assert f"{name} is no setting of this package; did you mean {PREFIX}" in record.getMessage()


def test_other_names_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert read({"MCORE_DEEPEP": "x", "PATH": "y"}) == Settings()
    assert not caplog.records


def test_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    monkeypatch.setenv(name_of("hidden"), "512")
    assert read().hidden == 512
    assert snapshot() != before


def environment_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and literal name of every use of the environment, ``"?"`` where the name is not a literal."""
    named = {}  # uses that name their variable: os.environ["X"], os.environ.get("X", ...), os.getenv("X", ...)
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            use, key = node.value, node.slice
        elif isinstance(node, ast.Call) and node.args:
            use, key = node.func, node.args[0]
            if isinstance(use, ast.Attribute) and use.attr in {"get", "pop", "setdefault"}:
                use = use.value
        else:
            continue
        if isinstance(key, ast.Constant):
            named[use] = str(key.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "getenvb"}:
            yield node.lineno, named.get(node, "?")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((node.lineno, "?") for alias in node.names if alias.name.startswith(("environ", "getenv")))


@pytest.mark.parametrize(
    "source",
    [
        f"import os; os.environ['{PREFIX}HIDDEN']",
        f"import os; os.getenv('{PREFIX}HIDDEN', '')",
        f"import os; os.environ.get('{PREFIX}HIDDEN')",
        "import os; {k: v for k, v in os.environ.items()}",
        "from os import environ",
    ],
)
def test_a_reader_of_the_prefix_would_be_found(source: str) -> None:
    assert any(name == "?" or name.startswith(PREFIX) for _, name in environment_uses(ast.parse(source)))


def test_only_settings_reads_the_prefix() -> None:
    """The doctor looks at the raw environment, since it must run where ``settings`` is broken, and ``env`` shows it."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        cli = PACKAGE / "cli"
        if file in (PACKAGE / "settings.py", cli / "env.py") or cli / "doctor" in file.parents:
            continue
        tree = ast.parse(file.read_text())
        for line, name in environment_uses(tree):
            if name == "?" or name.startswith(PREFIX):
                found.append(f"{file.relative_to(PACKAGE)}:{line} reads {name} from the environment")
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(PREFIX + "[A-Z_]*", node.value)
            ):
                found.append(f"{file.relative_to(PACKAGE)}:{node.lineno} spells {node.value}; use settings.name_of")
    assert not found
