"""A node that computes its first steps can be stopped, and what fails there ends it with one
line."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config.settings import Config
from baton.errors import NodeFailed, OutOfMemory
from baton.types import Role
from decode_node.default_limits import DECODE_LIMITS
from node_engine.core.step.engine import DeviceLost
from node_engine.host.assemble import run_node
from node_engine.paced.paced_engine import PacedEngine
from node_engine.roles.role_policy import RoleContext, RolePolicy

WarmUp = Callable[[PacedEngine, int, Callable[[], bool]], None]


def fail_to_make_role(context: RoleContext) -> RolePolicy:
    raise AssertionError("too late")


async def start(
    warm_up: WarmUp, folder: Path, stop: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PacedEngine, "warm_up", warm_up)
    config = Config(
        coordinator="127.0.0.1:1", engine="paced", kv_memory="2MiB", segment_dir=str(folder)
    )
    await run_node(config, Role.DECODE, stop, {Role.DECODE: fail_to_make_role})


async def test_stop_ends_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, stop, steps = asyncio.get_running_loop(), asyncio.Event(), list[int]()

    def warm_up(
        engine: PacedEngine, max_batched_tokens: int, is_wanted: Callable[[], bool]
    ) -> None:
        while is_wanted():
            steps.append(max_batched_tokens)
            asyncio.run_coroutine_threadsafe(_set(stop), loop).result()

    await start(warm_up, tmp_path, stop, monkeypatch)
    assert steps == [DECODE_LIMITS["cpu"].max_batched_tokens]
    assert not os.listdir(tmp_path)


async def _set(stop: asyncio.Event) -> None:
    stop.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            DeviceLost("CUDA error: launch failure\nCompile with more to know more."),
            "CUDA error: launch failure",
        ),
        (OutOfMemory("no memory left"), "no memory left"),
    ],
)
async def test_warm_up_failure_is_one_line(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(*_: object) -> None:
        raise error

    with pytest.raises(NodeFailed) as raised:
        await start(warm_up, tmp_path, asyncio.Event(), monkeypatch)
    assert str(raised.value).endswith(message)
    assert not os.listdir(tmp_path)
