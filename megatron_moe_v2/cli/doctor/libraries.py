"""``deep_ep`` and its namesake, apex and its namesake, Transformer Engine, megatron-core, Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from .findings import FAIL, OK, SKIP, WARN, Finding, numbers
from .imports import Imports

__all__ = ["deep_ep_check", "library_check", "locate"]

LEAST_MEGATRON = (0, 13)

_DEEP_EP = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"
_APEX = "pip install --no-build-isolation git+https://github.com/NVIDIA/apex"


def locate(module: str) -> Path | None:
    """Folder or file of a top-level module, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ([spec.origin] if spec.origin else []))
    return Path(places[0]) if places else None


def _distributions(module: str) -> list[str]:
    """``name version`` of each installed distribution that brings the module."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return sorted({f"{name} {importlib.metadata.version(name)}" for name in names})


def deep_ep_check(imports: Imports, gpu: bool, wanted: str) -> Iterator[Finding]:
    """Args: ``wanted``: the value of the backend setting."""
    group = "deep_ep"
    place, asked = locate("deep_ep"), wanted in ("deepep_v2", "deepep_v1")
    if place is None:
        yield Finding(
            id="deep_ep-distribution",
            group=group,
            status=FAIL if asked else WARN if gpu else SKIP,
            found="deep_ep is not installed",
            needed="DeepEP V2 on GPUs" if gpu or asked else "",
            fix=_DEEP_EP if gpu or asked else "",
        )
        return
    brought = _distributions("deep_ep")
    genuine = any((place / part).exists() for part in ("buffers/elastic.py", "buffers/legacy.py", "buffer.py"))
    text = f"{', '.join(brought) or 'no distribution claims it'}, at {place}"
    if not genuine:
        yield Finding(
            id="deep_ep-distribution",
            group=group,
            status=FAIL,
            found=f"{text}: a package of that name without DeepEP's buffers",
            needed="DeepSeek's DeepEP; the package registry's deep-ep is another project",
            fix=f"pip uninstall deep-ep; {_DEEP_EP}",
        )
    else:
        yield Finding(
            id="deep_ep-distribution",
            group=group,
            status=WARN if len(brought) > 1 else OK,
            found=text,
            needed="one distribution",
            fix="Uninstall all but one." if len(brought) > 1 else "",
        )
    facts = imports.of("deep_ep")
    if facts.get("error"):
        yield Finding(
            id="deep_ep-import",
            group=group,
            status=FAIL,
            found=f"deep_ep cannot be imported: {facts['error']}",
            needed="an import that works",
            fix="Mend what it names (NCCL: see nccl-loaded and nccl-duplicates), or set "
            "MCORE_DEEPEP_V2_BACKEND=embedded.",
        )
        return
    version = facts.get("version") or "of unknown version"
    yield Finding(id="deep_ep-import", group=group, status=OK, found=f"deep_ep {version} from {facts.get('file')}")
    classes = [
        name for name, have in (("ElasticBuffer (V2)", facts.get("v2")), ("Buffer (V1)", facts.get("v1"))) if have
    ]
    reasons = [facts[f"{name}_reason"] for name in ("v2", "v1") if not facts.get(name)]
    yield Finding(
        id="deep_ep-classes",
        group=group,
        status=OK if facts.get("v2") else WARN if facts.get("v1") else FAIL,
        found="; ".join([", ".join(classes) or "no buffer class", *dict.fromkeys(reasons)]),
        needed="ElasticBuffer, of DeepEP V2",
        fix="" if facts.get("v2") else _DEEP_EP,
    )


def library_check() -> Iterator[Finding]:
    yield _apex()
    yield _optional("transformer-engine", "transformer_engine", ("transformer-engine", "transformer_engine"))
    yield _megatron()
    yield _optional("triton", "triton", ("triton",))


def _optional(name: str, module: str, distributions: tuple[str, ...]) -> Finding:
    place = locate(module)
    if place is None:
        return Finding(id=name, group="libraries", status=SKIP, found=f"{name} is not installed; optional")
    return Finding(id=name, group="libraries", status=OK, found=f"{_version(distributions)} at {place}")


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{distributions[0]} of unknown version"


def _apex() -> Finding:
    """NVIDIA's is told from the registry's by what it holds: the latter is a web toolkit."""
    place = locate("apex")
    if place is None:
        return Finding(id="apex", group="libraries", status=SKIP, found="apex is not installed; optional")
    parts = [
        part for part in ("normalization", "optimizers", "multi_tensor_apply", "contrib") if (place / part).is_dir()
    ]
    text = f"{', '.join(_distributions('apex')) or _version(('apex',))} at {place}"
    if parts:
        return Finding(id="apex", group="libraries", status=OK, found=f"NVIDIA apex: {text}")
    return Finding(
        id="apex",
        group="libraries",
        status=WARN,
        found=f"an apex that is not NVIDIA's: {text}",
        needed="NVIDIA apex, or none: megatron-core works without, and may break on the namesake",
        fix=f"pip uninstall apex; if you want NVIDIA's: {_APEX}",
    )


def _megatron() -> Finding:
    place = locate("megatron")
    core = place / "core" if place is not None else None
    if core is None or not core.is_dir():
        return Finding(
            id="megatron-core", group="libraries", status=SKIP, found="megatron-core is not installed; optional"
        )
    version = _version(("megatron-core",))
    hook = (core / "transformer/moe/fused_a2a.py").exists()
    good = hook and (not numbers(version) or numbers(version) >= LEAST_MEGATRON)
    return Finding(
        id="megatron-core",
        group="libraries",
        status=OK if good else WARN,
        found=f"{version} at {core}" + ("" if hook else ", without transformer/moe/fused_a2a.py"),
        needed="megatron-core 0.13 or later",
        fix="" if good else "Upgrade megatron-core.",
    )
