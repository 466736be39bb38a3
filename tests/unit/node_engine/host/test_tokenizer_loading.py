"""A node reads the tokenizer of grammars while it starts, and joins a cluster afterwards."""

import asyncio
from pathlib import Path

import pytest

from baton.config.settings import Config
from baton.types import Role
from node_engine.host import assemble
from node_engine.host.assemble import run_node
from node_engine.host.engine_factory import build_engine
from node_engine.structured_output import constraint_factory
from tests.models import build_model


async def test_a_node_serves_when_its_tokenizer_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class RecordingFactory:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start_tokenizer_loading(self) -> None:
            events.append("reading")

        def wait_for_tokenizer(self) -> None:
            events.append("read")

        def close(self) -> None:
            events.append("closed")

    class Node:
        async def run(self, stop: asyncio.Event) -> None:
            events.append("serving")

    def load_weights(*arguments: object) -> object:
        events.append("weights")
        return build_engine(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(constraint_factory, "ConstraintFactory", RecordingFactory)
    monkeypatch.setattr(assemble, "build_engine", load_weights)
    monkeypatch.setattr(assemble, "assemble_node", lambda *_: Node())
    model = build_model("llama", tmp_path)
    (model / "tokenizer.json").write_text("{}")
    config = Config(
        coordinator="127.0.0.1:1",
        model=str(model),
        segment_dir=str(tmp_path),
        kv_memory="8MiB",
        device="cpu",
    )
    await run_node(config, Role.DECODE, asyncio.Event())
    assert events == ["reading", "weights", "read", "serving", "closed"]
