"""The documentation against the code: its blocks run, its options parse, its links lead somewhere, its lists are whole.

Python blocks of a page are run in order in one namespace, on two gloo ranks. A name that a page takes from its reader's
program comes from ``READERS``, just before the first statement that uses it. Shell blocks are run by bash with no
command to be found: what would have been called goes to the real parsers instead. A comment
``<!-- not run: reason -->`` before a block leaves it at a syntax check.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launch import RankPool, join_group
from torch.distributed import TCPStore
from torch.distributed.run import get_args_parser

from megatron_moe_v2 import MoEError, Settings, close_buffers, errors
from megatron_moe_v2.cli import main as command_line
from megatron_moe_v2.settings import DEEPEP_DEFAULTS, PREFIX, VARIABLES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = ("README.md", "examples/README.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md"))))
RUN = tuple(page for page in PAGES if page != "examples/README.md")

_SMALL = {
    "x": "torch.randn(3 + dist.get_rank(), 32)",
    "topk_idx": "torch.rand(len(x), 128).topk(4).indices",
    "topk_weights": "torch.rand(len(x), 4, requires_grad=True)",
    "experts": "topk_idx",
    "weights": "topk_weights",
    "group": "dist.group.WORLD",
    "torch": "__import__('torch')",
    "dist": "torch.distributed",
}
READERS: dict[str, dict[str, str]] = {
    "README.md": {
        **_SMALL,
        "x": "torch.randn(3 + dist.get_rank(), 2048)",
        "router": "torch.nn.Linear(2048, 128)",
        "my_experts": "lambda rows, counts: 2 * rows",
        "expert_output": "2 * recv_x",
    },
    "docs/cuda_graphs.md": {
        **_SMALL,
        "weight": "torch.randn(64, 32, 32)",
        "tokens": "torch.zeros(3, 1)",
        "new_tokens": "tokens",
        "model_step": "lambda tokens: tokens + 1",
        "moe": "lambda x, layout_cache: train.combine((s := train.dispatch(x, experts, weights, "
        "layout_cache=layout_cache)).tokens, s)",
        "checkpoint": "__import__('torch.utils.checkpoint', fromlist=['']).checkpoint",
        "RoutingLayout": "__import__('megatron_moe_v2').RoutingLayout",
    },
    "docs/fp8.md": {
        **_SMALL,
        "x": "torch.randn(3, 256, dtype=torch.bfloat16, requires_grad=True)",
        "weight": "torch.randn(256, 256, requires_grad=True)",
        "gemm": "lambda pair, weight: pair[0].float() @ weight",
    },
    "docs/own_scripts.md": {
        "weights": "torch.rand(len(x), top_k)",
        "experts": "torch.rand(len(x), num_experts).topk(top_k).indices",
        "group": "dist.group.WORLD",
        "shared_experts": "lambda x: 2 * x",
        "run_experts": "lambda rows, counts: 2 * rows",
    },
    "docs/rl.md": {
        **_SMALL,
        "tokens": "torch.zeros(4, 256)",
        "_decoder": "FlexTokenDispatcher(num_experts=8, layout='expert', static_shapes=True, "
        "num_max_tokens_per_rank='decode')",
        "decode_step": "lambda x: _decoder.combine((s := _decoder.dispatch(x, torch.zeros(4, 2).long() + "
        "torch.arange(2), torch.ones(4, 2))).tokens, s)",
        "train_step": "lambda rollout: None",
        "rollout_router": "lambda position: torch.rand(4, 8).topk(2).indices",
        "training_router": "lambda: torch.rand(12, 8)",
    },
    "docs/migration.md": {
        **_SMALL,
        "num_experts": "128",
        "grouped_mlp": "lambda rows, counts: 2 * rows",
    },
    "docs/megatron.md": {"model": "chunk()"},
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, first line, text, and whether it may be run."""

    language: str
    line: int
    text: str
    run: bool


def blocks(page: str, language: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"(<!-- not run: [^>]+ -->\n+)?^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [
        Block(
            language=match[2],
            line=text[: match.start(3)].count("\n") + 1,
            text=match[3],
            run=match[1] is None,
        )
        for match in found
        if match[2] == language
    ]


# ----------------------------------------------------------------------------------------------------- Python blocks


def parsed(page: str, block: Block) -> ast.Module:
    tree = ast.parse(block.text, filename=str(ROOT / page))
    return ast.increment_lineno(tree, block.line - 1)


def supply(node: ast.AST, readers: dict[str, str], names: dict[str, Any]) -> None:
    """Evaluate what ``node`` uses of the reader's program and nobody has defined."""
    within = list(ast.walk(node))
    own = {one.arg for one in within if isinstance(one, ast.arg)}
    own |= {one.id for one in within if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    known = names.keys() | (own if isinstance(node, ast.FunctionDef | ast.ClassDef) else set())
    for used in within:
        if isinstance(used, ast.Name) and isinstance(used.ctx, ast.Load) and used.id not in known:
            expression = readers.get(used.id)
            if expression is not None and not hasattr(builtins, used.id):
                supply(ast.parse(expression), readers, names)
                names[used.id] = eval(expression, names)


def run_blocks(page: str, names: dict[str, Any]) -> int:
    """Run a page's blocks, a statement after the other; how many."""
    count = 0
    for block in blocks(page, "python"):
        tree = parsed(page, block)
        for statement in tree.body if block.run else ():
            supply(statement, READERS.get(page, {}), names)
            module = ast.Module(body=[statement], type_ignores=[])
            exec(compile(module, str(ROOT / page), "exec", dont_inherit=True), names)
        count += block.run
    return count


def run_page(rank: int, world: int, page: str, port: int) -> int:
    """A page as a program of its own, whose default group meets at the store on ``port``. Collective over the world."""
    dist.destroy_process_group()
    usual, os.environ["MASTER_PORT"] = os.environ["MASTER_PORT"], str(port)
    try:
        if not any("init_process_group()" in block.text for block in blocks(page, "python")):
            dist.init_process_group("gloo")
        return run_blocks(page, {"__name__": "documentation"})
    finally:
        close_buffers(abort=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["MASTER_PORT"] = usual
        join_group(f"after {page}")


WITH_PYTHON = [page for page in RUN if any(block.run for block in blocks(page, "python"))]


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page != "docs/megatron.md"])
def test_python_blocks_run(page: str, ranks2: RankPool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert all(count > 0 for count in ranks2.run(run_page, page, store.port, timeout=30.0))


def run_megatron_page(rank: int, world: int) -> int:
    from megatron_cases import Case, megatron
    from megatron_models import Chunk
    from scene import buffers

    from megatron_moe_v2.megatron import uninstall

    megatron()
    with buffers():
        try:
            return run_blocks("docs/megatron.md", {"__name__": "documentation", "chunk": lambda: Chunk([Case()])})
        finally:
            uninstall()


@pytest.mark.megatron
def test_megatron_page_runs() -> None:
    pytest.importorskip("megatron.core")
    from megatron_cases import POOLS

    assert all(count > 0 for count in POOLS[2].run(run_megatron_page))


@pytest.mark.parametrize("page", PAGES)
def test_blocks_parse(page: str) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(parsed(page, block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_moe_v2"):
                module = importlib.import_module(str(node.module))
                assert not [one.name for one in node.names if not hasattr(module, one.name)], f"line {node.lineno}"
    for block in blocks(page, "json"):
        json.loads(block.text)


# ------------------------------------------------------------------------------------------------------ shell blocks


RECORD = 'command_not_found_handle() { printf "%s\\0" "$@" >&3; printf "\\n\\0" >&3; }\nPATH=/nowhere\n'


def commands(block: Block, folder: Path) -> list[list[str]]:
    """The arguments of every command that bash would start."""
    calls = folder / "calls"
    script = f"exec 3>'{calls}'\n{RECORD}{block.text}"
    done = subprocess.run(["/bin/bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=20)
    assert not done.stderr, done.stderr
    return [call.split("\0")[:-1] for call in calls.read_text().split("\n\0")[:-1]]


class Parsed(Exception):
    """A parser has taken its arguments: enough."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Calls a program up to the end of its argument parser."""
    real = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.Namespace:
        found: argparse.Namespace = real(parser, *args, **kwargs)
        if parser.prog != "megatron-moe-v2":  # that one only chooses the subcommand
            raise Parsed
        return found

    def call(program: Callable[[], Any]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(argparse.ArgumentParser, "parse_args", stop)
            with pytest.raises(Parsed):
                program()

    return call


def check_python(argv: list[str], only_parse: Callable[[Callable[[], Any]], None], patch: pytest.MonkeyPatch) -> None:
    """What follows ``python``: a script or module of this repository, with its own options."""
    if argv[:2] == ["-m", "megatron_moe_v2"]:
        only_parse(lambda: command_line(argv[2:]))
    elif argv[:2] == ["-m", "megatron_moe_v2.megatron"]:
        launcher = importlib.import_module("megatron_moe_v2.megatron.__main__")
        only_parse(lambda: launcher.main(argv[2:]))
    elif argv[0] == "-m":
        assert find_spec(argv[1]), argv[1]
        assert not [one for one in argv[2:] if one.endswith(".py") and not (ROOT / one).is_file()]
    else:
        script = ROOT / argv[0]
        assert script.is_file(), argv[0]
        if "parse_args(" not in script.read_text():
            assert len(argv) == 1, f"{argv[0]} takes no options"
        elif "import megatron.core" not in script.read_text() or find_spec("megatron"):
            patch.syspath_prepend(str(script.parent))
            patch.setattr(sys, "argv", argv)
            only_parse(lambda: runpy.run_path(str(script), run_name="__main__"))


def check_command(argv: list[str], only_parse: Callable[[Callable[[], Any]], None], patch: pytest.MonkeyPatch) -> None:
    program, *rest = argv
    if program == "megatron-moe-v2":
        only_parse(lambda: command_line(rest))
    elif program == "torchrun":
        launched = get_args_parser().parse_args(rest)
        target = [launched.training_script, *launched.training_script_args]
        check_python(["-m", *target] if launched.module else target, only_parse, patch)
    elif re.fullmatch(r"python[\d.]*", program):
        check_python(rest, only_parse, patch)
    elif program == "bash":
        assert (ROOT / rest[0]).is_file(), rest[0]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")])
def test_shell_blocks_are_understood(
    page: str,
    tmp_path: Path,
    only_parse: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for block in blocks(page, "bash"):
        for argv in commands(block, tmp_path) if block.run else ():
            try:
                check_command(argv, only_parse, monkeypatch)
            except SystemExit as refused:
                pytest.fail(f"{page}, block at line {block.line}: {argv} ends with status {refused.code}")


# ------------------------------------------------------------------------------------------------------------- links


def anchors(path: Path) -> set[str]:
    """What a code host makes of a page's headings."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    source = ROOT / page
    prose = re.sub(r"^```.*?^```$", "", source.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (source.parent / name).resolve() if name else source
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def test_the_index_names_every_page() -> None:
    text = (DOCS / "README.md").read_text()
    assert not [path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"]({path.name})" not in text]


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    named = re.findall(r"`((?:docs|examples|scripts|tests)/[\w/.]+\.\w+)`", (ROOT / page).read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_architecture_names_modules_that_exist() -> None:
    package = {path.name for path in (ROOT / "megatron_moe_v2").rglob("*.py")}
    named = {Path(name).name for name in re.findall(r"[\w/]+\.py", (DOCS / "architecture.md").read_text())}
    assert not [name for name in named - package if not list(ROOT.glob(f"*/{name}"))]
    top = {path.name for path in (ROOT / "megatron_moe_v2").glob("[!_]*.py")}
    assert not top - named, "modules that the page does not name"


# ------------------------------------------------------------------------------------------------ lists and pictures


def rows(page: str, columns: int) -> list[list[str]]:
    """Table rows whose first cell is in backticks."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    split = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines if line.startswith("| `")]
    return [row for row in split if len(row) == columns]


def test_settings_page_is_the_table_of_variables() -> None:
    defaults = Settings()
    wanted = {}
    for variable in VARIABLES:
        value = getattr(defaults, variable.field)
        text = value if isinstance(value, str) else f"{value:g}"
        wanted[f"`{variable.suffix}`"] = (f"`{text}`", variable.allowed)
    found = {name: (default, allowed) for name, default, allowed, _ in rows("docs/settings.md", 4)}
    assert found == wanted
    assert len(VARIABLES) == len(fields(Settings))


def test_settings_page_names_what_is_set_of_others() -> None:
    others = dict(rows("docs/settings.md", 2))
    for name, value in DEEPEP_DEFAULTS.items():
        assert others[f"`{name}`"].startswith(f"set to {value} where unset")


OTHERS = ("EP_", "FI_", "MEGATRON_CORE_", "NCCL_", "OMP_")
"""Beginnings of the variables that belong to others or to the tests; what else is in capitals is a setting."""


@pytest.mark.parametrize("page", PAGES)
def test_variables_named_anywhere_exist(page: str) -> None:
    known = {variable.suffix for variable in VARIABLES}
    text = (ROOT / page).read_text()
    assert set(re.findall(rf"{PREFIX}([A-Z_]+\b)", text)) <= known
    bare = re.findall(r"`([A-Z]+_[A-Z_]+[A-Z])(?:=[^`]*)?`", text)
    assert {name for name in bare if not name.startswith(OTHERS)} <= known


def error_classes() -> dict[str, type]:
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {name: value for name, value in found.items() if issubclass(value, MoEError)}


def test_error_page_has_every_class_and_no_other() -> None:
    headings = re.findall(r"^## `(\w+)`$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(error_classes())


def texts_of_the_package() -> set[str]:
    """Every text in the code, with "…" for what is put in."""
    found = set()
    for path in (ROOT / "megatron_moe_v2").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values]
                found.add("".join(parts))
    return found


def test_messages_on_the_error_page_are_those_of_the_code() -> None:
    known = texts_of_the_package()
    quoted = [text for first, _ in rows("docs/errors.md", 2) for text in re.findall(r"`([^`]+)`", first)]
    quoted += re.findall(r"\(`(agreement …[^`]+)`\)", (DOCS / "errors.md").read_text())
    assert len(quoted) > 30
    assert not [text for text in quoted if not any(text in one for one in known)]


def test_pictures_are_what_the_script_draws() -> None:
    spec = spec_from_file_location("draw_layouts", ROOT / "scripts" / "draw_layouts.py")
    assert spec
    assert spec.loader
    module = sys.modules["draw_layouts"] = module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    drawn = module.pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "img").glob("*_layout.svg")} == drawn
