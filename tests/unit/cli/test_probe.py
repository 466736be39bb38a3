"""The health check of containers: exit codes, and why not."""

import asyncio
import dataclasses
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from baton.cli import probe
from baton.cli.common.errors import CommandFailed, EndpointUnreachable
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.network.health_port import HealthPort

TOKEN = "operator"


class ReadyzHandler(http.server.BaseHTTPRequestHandler):
    status, body = 200, b"{}"

    def do_GET(self) -> None:
        allowed = self.path == "/readyz" and self.headers["authorization"] == f"Bearer {TOKEN}"
        self.send_response(self.status if allowed else 401)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def admin_port(status: int, body: bytes = b"{}") -> Iterator[Config]:
    """A coordinator's admin port, and settings that lead there as a container's do."""
    handler = type("Handler", (ReadyzHandler,), {"status": status, "body": body})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Config(admin_host="0.0.0.0", admin_port=served.server_port, admin_token=TOKEN)
        finally:
            served.shutdown()
            thread.join()


def test_a_ready_coordinator() -> None:
    with admin_port(200) as config:
        probe.probe_coordinator(config)


@pytest.mark.parametrize(
    ("body", "error_text"),
    [
        (b'{"error": {"message": "not ready: no decode node"}}', "not ready: no decode node"),
        (b"<html>", "/readyz answers 503"),
        (b'{"error": "x"}', "/readyz answers 503"),
        (b"[1]", "/readyz answers 503"),
    ],
)
def test_a_coordinator_that_is_not_ready_says_why(body: bytes, error_text: str) -> None:
    with admin_port(503, body) as config, pytest.raises(CommandFailed) as caught:
        probe.probe_coordinator(config)
    assert str(caught.value) == error_text


def test_a_wrong_token_is_not_healthy() -> None:
    with admin_port(200) as config, pytest.raises(CommandFailed, match="401"):
        probe.probe_coordinator(dataclasses.replace(config, admin_token="other"))


def test_a_coordinator_that_is_gone() -> None:
    with admin_port(200) as config:
        pass
    with pytest.raises(EndpointUnreachable, match=r"no coordinator answers at 127\.0\.0\.1:"):
        probe.probe_coordinator(config)


@asynccontextmanager
async def node() -> AsyncIterator[tuple[HealthPort, Config]]:
    health = HealthPort(Config(health_port=0))
    await health.start()
    try:
        yield health, Config(listen="0.0.0.0:50053", health_port=health.port)
    finally:
        await health.stop()


async def probe_in_thread(config: Config) -> None:
    """On a thread, because the node's answer needs this loop."""
    await asyncio.to_thread(probe.probe_node, config)


async def test_node_serving_leaving_and_gone() -> None:
    async with node() as (health, config):
        await probe_in_thread(config)
        await health.announce_shutdown()
        with pytest.raises(CommandFailed, match="NOT_SERVING"):
            await probe_in_thread(config)
    with pytest.raises(EndpointUnreachable, match=r"no node answers at 127\.0\.0\.1:"):
        await probe_in_thread(config)


@pytest.mark.parametrize("port", [0, -1])
def test_a_node_without_a_fixed_port_cannot_be_asked(port: int) -> None:
    with pytest.raises(ConfigError, match="a probe needs a fixed one"):
        probe.probe_node(Config(health_port=port))


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(200) as config:
        monkeypatch.setenv("BATON_ADMIN_PORT", str(config.admin_port))
        monkeypatch.setenv("BATON_ADMIN_HOST", "0.0.0.0")
        monkeypatch.setenv("BATON_ADMIN_TOKEN", TOKEN)
        assert probe.main(["coordinator"]) == 0
        monkeypatch.setenv("BATON_ADMIN_TOKEN", "other")
        assert probe.main(["coordinator"]) == 1
    assert probe.main(["coordinator"]) == 3
    monkeypatch.setenv("BATON_HEALTH_PORT", "-1")
    assert probe.main(["node"]) == 2
    assert TOKEN not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        probe.main(["pool"])
