"""Markers, session fixtures and the hypothesis profile, for all test files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from launch import ENVIRONMENT, RankPool

SKIPS = {
    "gpu": "needs a CUDA GPU and the real deep_ep",
    "megatron": "needs the real megatron-core",
}

for _name, _value in ENVIRONMENT.items():
    if _name.startswith("MCORE_"):
        os.environ.setdefault(_name, _value)

hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = {"gpu": torch.cuda.is_available() and _installed("deep_ep"), "megatron": _installed("megatron.core")}
    for item in items:
        for name, present in found.items():
            if not present and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=SKIPS[name]))


def _pool(world: int) -> Iterator[RankPool]:
    pool = RankPool(world)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks1() -> Iterator[RankPool]:
    yield from _pool(1)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    yield from _pool(4)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """The pool of as many ranks as the test's ``ranks`` parameter says (indirect parametrisation)."""
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool
