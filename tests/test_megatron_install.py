"""``install`` and ``uninstall``: which names of megatron-core are replaced, when, and what is refused; the launcher."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import megatron.core
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from megatron_cases import LAYOUTS, OTHER_CORE, POOLS
from megatron_models import layouts_of_dispatchers

from megatron_moe_v2 import InputError, MegatronError
from megatron_moe_v2.megatron import core, install, installed, uninstall
from megatron_moe_v2.megatron.functions import MARKER
from megatron_moe_v2.megatron.manager import ExpertLayoutManager

pytestmark = pytest.mark.megatron

FUNCTIONS = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
ROOT = Path(__file__).parent.parent


def names() -> dict[str, Any]:
    """Every name that an installation may touch, as it is now."""
    owners: list[Any] = [fused_a2a, token_dispatcher, *core.free_input_modules()]
    wanted = (*FUNCTIONS, "HAVE_DEEP_EP", "_DeepepManager", "should_free_input")
    return {f"{owner.__name__}.{name}": vars(owner)[name] for owner in owners for name in wanted if name in vars(owner)}


def changed(before: dict[str, Any]) -> set[str]:
    return {path for path, value in names().items() if value is not before[path]}


@pytest.fixture(autouse=True)
def _originals() -> Iterator[None]:
    before = names()
    yield
    uninstall()
    assert not changed(before)


TOKEN = {f"{owner}.{name}" for owner in (core.FUSED_A2A, core.TOKEN_DISPATCHER) for name in FUNCTIONS} | {
    f"{core.FUSED_A2A}.HAVE_DEEP_EP"
}
EXPERT = TOKEN | {f"{core.TOKEN_DISPATCHER}._DeepepManager", f"{core.FREE_INPUT[0]}.should_free_input"}


@pytest.mark.parametrize(("layout", "touched"), [("token", TOKEN), ("expert", EXPERT)], ids=LAYOUTS)
def test_names_are_replaced_where_they_are_defined_and_used(layout: Any, touched: set[str]) -> None:
    before = names()
    assert installed() is None
    install(layout)
    assert installed() == layout
    assert changed(before) == touched
    assert fused_a2a.HAVE_DEEP_EP is True
    for owner in (fused_a2a, token_dispatcher):
        assert all(getattr(getattr(owner, name), MARKER) == layout for name in FUNCTIONS)
    uninstall()
    assert installed() is None
    assert not changed(before)
    uninstall()


def test_signatures_are_megatrons() -> None:
    original = inspect.signature(fused_a2a.FusedDispatch.forward)
    install()
    assert list(inspect.signature(token_dispatcher.fused_dispatch).parameters) == list(original.parameters)[1:]
    wanted = list(inspect.signature(fused_a2a.FusedCombine.forward).parameters)[1:]
    assert list(inspect.signature(token_dispatcher.fused_combine).parameters) == wanted


def test_a_second_install_changes_nothing_but_the_options() -> None:
    install(max_tokens_per_rank=64)
    first = names()
    install(max_tokens_per_rank=128)
    assert not changed(first)
    from megatron_moe_v2.megatron.patch import current_functions

    assert current_functions().max_tokens_per_rank == 128


def test_the_other_layout_takes_the_place_of_the_first() -> None:
    before = names()
    install("expert")
    assert issubclass(token_dispatcher._DeepepManager, ExpertLayoutManager)
    install("token")
    assert changed(before) == TOKEN
    install("expert")
    assert changed(before) == EXPERT


def test_what_another_put_there_gives_way_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    before = names()
    install()
    token_dispatcher.fused_combine = print
    uninstall()
    assert not changed(before)
    assert "fused_combine was replaced by another since" in caplog.text


USED = (*FUNCTIONS, "_DeepepManager", "MoEFlexTokenDispatcher")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("owner", "name"),
    [*((fused_a2a, name) for name in FUNCTIONS), *((token_dispatcher, name) for name in USED)],
    ids=[*(f"defined {name}" for name in FUNCTIONS), *(f"used {name}" for name in USED)],
)
def test_a_missing_name_is_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, layout: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        left = names()
        with pytest.raises(MegatronError) as caught:
            install(layout)
        assert f"{owner.__name__}.{name}" in str(caught.value)
        assert megatron.core.__version__ in str(caught.value)
        assert installed() is None
        assert names() == left


def test_a_refused_change_of_layout_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install("token")
    before = names()
    monkeypatch.delattr(token_dispatcher._DeepepManager, "get_number_of_tokens_per_expert")
    with pytest.raises(MegatronError):
        install("expert")
    assert installed() == "token"
    assert not changed(before)


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (token_dispatcher._DeepepManager, "get_number_of_tokens_per_expert", "get_number_of_tokens_per_expert"),
        (core.free_input_modules()[0], "should_free_input", "should_free_input"),
    ],
    ids=["a method of the manager", "the rule of what may be freed"],
)
def test_what_the_expert_layout_alone_needs(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, text: str) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(MegatronError, match=text):
            install("expert")
        install("token")
        uninstall()


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(ctx: Any, x: Any, token_indices: Any, token_probs: Any, num_experts: Any, group: Any) -> None: ...

    monkeypatch.setattr(fused_a2a.FusedDispatch, "forward", staticmethod(forward))
    with pytest.raises(MegatronError, match=r"FusedDispatch\.forward in megatron-core"):
        install()


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.12.3")
    with pytest.raises(MegatronError, match=r"got 0\.12\.3, expected 0\.13 or later"):
        install()


def test_without_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core", None)
        with pytest.raises(MegatronError, match=r"not installed\. pip install megatron-core"):
            install()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"layout": "row"}, "layout: got 'row'"), ({"max_tokens_per_rank": 0}, "max_tokens_per_rank: got 0")],
    ids=["layout", "ceiling"],
)
def test_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        install(**options)
    assert installed() is None


def test_after_a_dispatcher_exists() -> None:
    """It keeps the manager that it was built with, while functions are looked up at each call."""
    for outcome in POOLS[2].run(layouts_of_dispatchers):
        assert "install(layout='expert') after 1 dispatchers of the token layout were built" in outcome["expert"]
        assert "install(layout='token') after 1 dispatchers of the expert layout were built" in outcome["token"]
        assert "lose the functions" in outcome["uninstall"]
        assert outcome["again"] is None


def run(*arguments: str, path: str = "", cwd: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in (str(ROOT), path) if one)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import sys
import helper
from megatron.core.transformer.moe import token_dispatcher
from megatron_moe_v2.megatron import installed
print(__name__, sys.argv, installed(), token_dispatcher._DeepepManager.__name__, helper.__name__)
"""


def test_launcher_runs_a_script_with_it_installed(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").touch()
    out = run("-m", "megatron_moe_v2.megatron", "--layout", "expert", str(script), "--layout", "x", "-m", "1")
    arguments = [str(script), "--layout", "x", "-m", "1"]
    assert out.splitlines()[0] == f"__main__ {arguments} expert ExpertLayoutManager helper"


def test_launcher_runs_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from megatron_moe_v2.megatron.__main__ import main

    (tmp_path / "pretrain_module.py").write_text(SCRIPT)
    (tmp_path / "helper.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["-m", "pretrain_module", "--lr", "1"])
    words = capsys.readouterr().out
    assert words.startswith("__main__ [")
    assert "pretrain_module.py', '--lr', '1'] token _DeepepManager helper" in words


@pytest.mark.skipif(not OTHER_CORE, reason="MEGATRON_CORE_0_16 does not say where megatron-core 0.16 is")
def test_symbols_of_0_16() -> None:
    code = """
import megatron.core
from megatron_moe_v2.megatron import core, install, installed, uninstall
for layout in ("token", "expert"):
    core.check(layout)
    install(layout)
    print(megatron.core.__version__, installed(), [one.__name__ for one in core.free_input_modules()])
    uninstall()
"""
    out = run("-c", code, path=OTHER_CORE)
    assert out.splitlines() == [f"0.16.1 {layout} ['{core.FREE_INPUT[1]}']" for layout in LAYOUTS]
