"""Every state of ``deep_ep`` against every value of ``MCORE_DEEPEP_V2_BACKEND``, as one table.

``deep_ep`` is a stand-in package on the path. One subprocess imports torch once and forks a fresh child for each state,
which imports ``megatron_moe_v2.fused_a2a`` as a user would and reports what it saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_moe_v2.buffers import Backend, constructor_of
from megatron_moe_v2.probe import probe

V2 = "class ElasticBuffer:\n    def __init__(self):\n        constructed.append('V2')\n"
V1 = "class Buffer:\n    def __init__(self):\n        constructed.append('V1')\n"
OVERLAP = "class EventOverlap: pass\n"
HANDLE = "class EventHandle: pass\n"
HEAD = "__version__ = '9.8'\nconstructed = []\n"
LAZY_V2 = """
def __getattr__(name):
    if name == 'ElasticBuffer':
        raise AssertionError('no NCCL')
    raise AttributeError(name)
"""


@dataclass(frozen=True, kw_only=True)
class State:
    """A stand-in by its files, and what is to be seen: the class or the error's text for each backend asked for."""

    files: dict[str, str]
    flags: tuple[bool, bool]  # HAVE_DEEP_EP, HAVE_DEEP_EP_V2
    auto: str
    deepep_v2: str
    deepep_v1: str
    embedded: str = "EmbeddedElasticBuffer"
    logged: tuple[str, ...] = ()  # by the probe
    fallback: bool = False  # auto says at WARNING that it fell to embedded
    events: tuple[str | None, str | None] = (None, None)  # modules of EventOverlap and EventHandle
    errors: tuple[str | None, str | None] = field(default=(None, None))  # v1_error, v2_error


def broken(kind: str) -> State:
    return State(
        files={"__init__.py": f"raise {kind}('the cause')"},
        flags=(False, False),
        auto="EmbeddedElasticBuffer",
        deepep_v2=f"deep_ep is broken: {kind}: the cause",
        deepep_v1=f"deep_ep is broken: {kind}: the cause",
        logged=(f"{kind}: the cause",),
        fallback=True,
        errors=(f"{kind}: the cause", f"{kind}: the cause"),
    )


def overlap_in(place: str, files: dict[str, str]) -> State:
    return State(
        files={"__init__.py": HEAD + V1 + V2} | files,
        flags=(True, True),
        auto="ElasticBuffer",
        deepep_v2="ElasticBuffer",
        deepep_v1="LegacyElasticBuffer",
        events=(place, place),
    )


STATES = {
    "v2-and-v1": State(
        files={"__init__.py": HEAD + V1 + V2},
        flags=(True, True),
        auto="ElasticBuffer",
        deepep_v2="ElasticBuffer",
        deepep_v1="LegacyElasticBuffer",
    ),
    "v1-only": State(
        files={"__init__.py": HEAD + V1, "utils.py": OVERLAP + HANDLE},
        flags=(True, False),
        auto="LegacyElasticBuffer",
        deepep_v2="has no ElasticBuffer",
        deepep_v1="LegacyElasticBuffer",
        events=("deep_ep.utils", "deep_ep.utils"),
    ),
    "v2-only": State(
        files={"__init__.py": HEAD + V2, "utils/__init__.py": HANDLE},
        flags=(False, True),
        auto="ElasticBuffer",
        deepep_v2="ElasticBuffer",
        deepep_v1="has no Buffer",
        events=(None, "deep_ep.utils"),
    ),
    "absent": State(
        files={},
        flags=(False, False),
        auto="EmbeddedElasticBuffer",
        deepep_v2="deep_ep is not installed",
        deepep_v1="deep_ep is not installed",
        fallback=True,
    ),
    "another-project": State(
        files={"__init__.py": ""},
        flags=(False, False),
        auto="EmbeddedElasticBuffer",
        deepep_v2="has no ElasticBuffer",
        deepep_v1="has no Buffer",
        fallback=True,
    ),
    "broken-ImportError": broken("ImportError"),
    "broken-AssertionError": broken("AssertionError"),
    "broken-TypeError": broken("TypeError"),
    "broken-OSError": broken("OSError"),
    "broken-dependency": State(
        files={"__init__.py": "import deep_ep_native_part"},
        flags=(False, False),
        auto="EmbeddedElasticBuffer",
        deepep_v2="No module named 'deep_ep_native_part'",
        deepep_v1="No module named 'deep_ep_native_part'",
        logged=("No module named 'deep_ep_native_part'",),
        fallback=True,
        errors=("ModuleNotFoundError: No module named 'deep_ep_native_part'",) * 2,
    ),
    "v1-beside-v2-broken-lazily": State(
        files={"__init__.py": HEAD + V1 + LAZY_V2},
        flags=(True, False),
        auto="LegacyElasticBuffer",
        deepep_v2="deep_ep is broken: AssertionError: no NCCL",
        deepep_v1="LegacyElasticBuffer",
        logged=("AssertionError: no NCCL",),
        errors=(None, "AssertionError: no NCCL"),
    ),
    "v1-beside-v2-broken-below": State(
        files={"__init__.py": HEAD + V1, "buffers/__init__.py": "", "buffers/elastic.py": "raise OSError('no NCCL')"},
        flags=(True, False),
        auto="LegacyElasticBuffer",
        deepep_v2="deep_ep is broken: OSError: no NCCL",
        deepep_v1="LegacyElasticBuffer",
        logged=("OSError: no NCCL",),
        errors=(None, "OSError: no NCCL"),
    ),
    "v2-beside-v1-broken-below": State(
        files={"__init__.py": HEAD + V2, "buffers/__init__.py": "", "buffers/legacy.py": "raise OSError('no NVSHMEM')"},
        flags=(False, True),
        auto="ElasticBuffer",
        deepep_v2="ElasticBuffer",
        deepep_v1="deep_ep is broken: OSError: no NVSHMEM",
        logged=("OSError: no NVSHMEM",),
        errors=("OSError: no NVSHMEM", None),
    ),
    "events-in-utils-event": overlap_in(
        "deep_ep.utils.event", {"utils/__init__.py": "", "utils/event.py": OVERLAP + HANDLE}
    ),
    "events-in-utils": overlap_in("deep_ep.utils", {"utils.py": OVERLAP + HANDLE}),
    "events-at-the-top": overlap_in("deep_ep", {"__init__.py": HEAD + V1 + V2 + OVERLAP + HANDLE}),
}
BACKENDS = ("auto", "deepep_v2", "deepep_v1", "embedded")

CHILD = """
import json, logging, os, sys, traceback
import torch

def look(folder, backends):
    if os.listdir(folder):
        sys.path.insert(0, folder)
    else:
        sys.modules["deep_ep"] = None  # absent, whatever is installed
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append((record.levelname, record.getMessage()))
    logging.getLogger("megatron_moe_v2").addHandler(handler)

    from megatron_moe_v2 import fused_a2a
    from megatron_moe_v2.buffers import choose
    from megatron_moe_v2.errors import BackendError
    from megatron_moe_v2.probe import probe
    from megatron_moe_v2.settings import read

    found = probe()
    assert probe() is found
    seen = {
        "flags": [fused_a2a.HAVE_DEEP_EP, fused_a2a.HAVE_DEEP_EP_V2],
        "errors": [found.v1_error, found.v2_error],
        "events": [c and c.__module__ for c in (found.EventOverlap, found.EventHandle)],
        "logged": logged[:],
        "version": found.version,
        "file": found.file,
    }
    for backend in backends:
        settings = read({"MCORE_DEEPEP_V2_BACKEND": backend})
        for on_cuda in (True, False):
            logged.clear()
            try:
                chosen = choose(found, settings, on_cuda=on_cuda)
                result = [chosen.class_name, chosen.reason]
            except BackendError as error:
                result = ["BackendError", str(error)]
            first = logged[:]
            if result[0] != "BackendError":
                choose(found, settings, on_cuda=on_cuda)
            seen[f"{backend} {'cuda' if on_cuda else 'cpu'}"] = [*result, first, len(logged)]
    seen["constructed"] = getattr(sys.modules.get("deep_ep"), "constructed", [])
    seen["loaded"] = [b for b in backends if f"megatron_moe_v2.buffers.{b}" in sys.modules and b != "embedded"]
    seen["cuda"] = torch.cuda.is_initialized()
    return seen

folders, backends = json.loads(sys.argv[1])
for name, folder in folders.items():
    if not (pid := os.fork()):
        try:
            with open(folder + ".json", "w") as out:
                json.dump(look(folder, backends), out)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"state {name} failed")
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("states")
    folders = {}
    for name, state in STATES.items():
        folders[name] = str(root / name)
        (root / name).mkdir()
        for path, text in state.files.items():
            file = root / name / "deep_ep" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    command = [sys.executable, "-c", CHILD, json.dumps([folders, BACKENDS])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name: json.loads(Path(folder + ".json").read_text()) for name, folder in folders.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STATES)
def test_choice_on_cuda(seen: dict[str, Any], name: str, backend: str) -> None:
    expected = getattr(STATES[name], backend)
    got, text, logged, logged_in_all = seen[name][f"{backend} cuda"]
    if expected.endswith("ElasticBuffer") and " " not in expected:
        assert got == expected
        assert "\n" not in text
    else:
        assert got == "BackendError"
        assert expected in text
        assert f"MCORE_DEEPEP_V2_BACKEND={backend}" in text
        assert "pip install" in text
    falls = backend == "auto" and STATES[name].fallback
    assert [level for level, _ in logged] == ["WARNING"] * falls
    assert logged_in_all == falls, "a fallback is said once"
    if falls:
        assert text in logged[0][1]


@pytest.mark.parametrize("name", STATES)
def test_choice_without_cuda(seen: dict[str, Any], name: str) -> None:
    """DeepEP needs CUDA: ``auto`` is embedded in silence, an explicit choice of DeepEP raises."""
    for backend in BACKENDS:
        got, _, logged, _ = seen[name][f"{backend} cpu"]
        assert got == ("BackendError" if backend.startswith("deepep") else "EmbeddedElasticBuffer")
        assert logged == []


@pytest.mark.parametrize("name", STATES)
def test_probe(seen: dict[str, Any], name: str) -> None:
    state, got = STATES[name], seen[name]
    assert tuple(got["flags"]) == state.flags
    assert tuple(got["errors"]) == state.errors
    assert tuple(got["events"]) == state.events
    assert [level for level, _ in got["logged"]] == ["WARNING"] * len(got["logged"])
    assert len({text for _, text in got["logged"]}) == len(state.logged)
    assert all(expected in text for expected, (_, text) in zip(state.logged, got["logged"], strict=True))
    assert got["version"] == ("9.8" if HEAD in state.files.get("__init__.py", "") else None)
    assert not got["cuda"]


@pytest.mark.parametrize("name", STATES)
def test_nothing_is_constructed_by_choosing(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["constructed"] == []
    assert seen[name]["loaded"] == []


def test_module_without_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that somebody put into ``sys.modules`` by hand counts as installed."""
    module = types.ModuleType("deep_ep")
    module.Buffer = type("Buffer", (), {})
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    found = probe.__wrapped__()
    assert (found.installed, found.have_v1, found.have_v2) == (True, True, False)
    assert (found.v1_error, found.v2_error, found.file) == (None, None, None)


def test_constructor_comes_from_the_module_of_the_backend() -> None:
    build = constructor_of(Backend(name="embedded", class_name="EmbeddedElasticBuffer", reason="asked for"))
    assert build.__module__ == "megatron_moe_v2.buffers.embedded"
