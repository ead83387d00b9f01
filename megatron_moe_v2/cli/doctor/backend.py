"""Which buffer class would be chosen here, and why."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import FAIL, OK, WARN, Finding, Status
from .imports import Imports

__all__ = ["backend_check"]


def backend_check(imports: Imports, gpu: bool) -> Iterator[Finding]:
    facts = imports.of("backend")
    needed = "a class that can be built" + (", on GPUs DeepEP V2" if gpu else "")
    status: Status = OK
    if "error" in facts:
        status, found = FAIL, f"none: {facts['error']}"
        fix = "Mend torch first." if "error" in imports.of("torch") else "Do what the message says."
    elif facts["refused"]:
        status, found, fix = FAIL, f"{facts['class']}, but its construction would fail: {facts['refused']}", ""
    else:
        found, fix = f"{facts['class']} ({facts['name']}), because {facts['reason']}", ""
        if gpu and facts["name"] != "deepep_v2":
            status, fix = (
                WARN,
                "Install DeepEP V2, or name the backend in MCORE_DEEPEP_V2_BACKEND to say that it is meant.",
            )
            if "MCORE_DEEPEP_V2_BACKEND" in facts["reason"]:
                status, fix = OK, ""
    yield Finding(id="backend", group="backend", status=status, found=found, needed=needed, fix=fix)
