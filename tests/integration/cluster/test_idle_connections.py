"""Idle connections to one port of a cluster with few descriptors: every other port answers, and
nodes can join."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest
import pytest_asyncio

from baton.cli.supervisor.child_specs import COORDINATOR
from baton.cluster_link.dialer import CoordinatorDialer
from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.processes import list_listening_addresses

pytestmark = pytest.mark.asyncio(loop_scope="module")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

OPEN_FILES = 256
IDLE_CONNECTIONS = 300  # connections
TIMEOUT_SECONDS = 60.0  # seconds
PORTS = ("http", "grpc", "admin", "cluster", "decode-0", "prefill-0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("idle")
    made = Cluster(
        folder,
        engine="paced",
        paced_prefill_us_per_token=1.0,
        open_files=OPEN_FILES,
        also={"decode-1": "decode-0"},
        held_back=["decode-1"],
    )
    async with made:
        yield made
    made.assert_clean()


@asynccontextmanager
async def idle_connections(port: int) -> AsyncIterator[list[Connection]]:
    """Many connections to a port of loopback, on which nothing is ever said."""
    opened = [
        connection
        for connection in await asyncio.gather(*(_open(port) for _ in range(IDLE_CONNECTIONS)))
        if connection is not None
    ]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def wait_one_closed(connections: Iterable[Connection]) -> None:
    """Wait until the server has closed one of these connections."""
    reads = [asyncio.create_task(reader.read(1)) for reader, _ in connections]
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


async def _open(port: int) -> Connection | None:
    """None if not even the kernel accepts the connection."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            return await asyncio.open_connection("127.0.0.1", port)
    return None


def ports_of(cluster: Cluster, name: str) -> list[int]:
    """Those of the coordinator by their names, and all of a node by its own."""
    if hasattr(cluster.endpoints, name):
        return [int(getattr(cluster.endpoints, name).rpartition(":")[2])]
    return sorted(port for _, port in list_listening_addresses({cluster.get_pids()[name]}))


async def check_other_ports_answer(cluster: Cluster, attacked: str) -> None:
    """Whatever is not attacked answers on new connections."""
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    async with asyncio.timeout(TIMEOUT_SECONDS):
        async with httpx2.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
            if attacked != "http":
                answer = await client.post(f"{cluster.http_url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
            if attacked != "admin":
                assert (await client.get(f"{cluster.admin_url}/readyz")).status_code == 200
        if attacked != "grpc":
            assert len((await cluster.get_status()).nodes) >= 2
            assert len((await cluster.generate([1, 2, 3], max_tokens=4)).tokens) == 4
        if attacked != "cluster":
            await check_join_is_answered(cluster)


async def check_join_is_answered(cluster: Cluster) -> None:
    """The coordinator hears a Join, and this one it does not like."""
    dialer = CoordinatorDialer(cluster.config.cluster_token)
    async with dialer.open_channel(cluster.endpoints.cluster) as channel:
        call = dialer.open_stream(channel)
        await call.write(pb.NodeMessage(join=pb.Join(name="other", role="cook")))
        assert (await call.read()).HasField("refusal")


@pytest.mark.parametrize("attacked", PORTS)
async def test_idle_connections_to_one_port_leave_the_others_alone(
    cluster: Cluster, attacked: str
) -> None:
    pids = cluster.get_pids()
    for port in ports_of(cluster, attacked):
        async with idle_connections(port):
            for _ in range(3):
                await check_other_ports_answer(cluster, attacked)
    assert cluster.get_pids() == pids
    await check_other_ports_answer(cluster, attacked="")  # and the attacked one is back


async def test_half_sent_bodies_leave_room_for_a_complete_request(cluster: Cluster) -> None:
    """More of them than the port may hold connections, each with a head and the first byte of a
    body."""
    port = ports_of(cluster, "http")[0]
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
        b"content-type: application/json\r\ncontent-length: 10\r\n\r\n{"
    )
    async with idle_connections(port) as opened:
        for _, writer in opened:
            writer.write(head)
        for _ in range(8):
            late = await _open(port)
            assert late is not None
            late[1].write(head)
            opened.append(late)
            await check_other_ports_answer(cluster, attacked="")


async def test_node_joins_while_idle_connections_fill_the_cluster_port(cluster: Cluster) -> None:
    async with idle_connections(ports_of(cluster, "cluster")[0]):
        cluster.start("decode-1")
        await cluster.wait_status(
            lambda status: any(node.name == "decode-1" for node in status.nodes), TIMEOUT_SECONDS
        )
        await check_other_ports_answer(cluster, attacked="")


async def read_connection_metrics(cluster: Cluster) -> dict[str, float]:
    """The coordinator's metrics of connections, by name and labels as exposed."""
    async with httpx2.AsyncClient() as client:
        metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
    rows = (
        line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("baton_connections")
    )
    return {name: float(value) for name, value in rows}


async def wait_refusal_counted(cluster: Cluster, port: str) -> None:
    """Wait for the guard of the ports: the gRPC library closes connections too, earlier and
    uncounted."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            with contextlib.suppress(httpx2.TransportError):  # of the admin port under attack
                metrics = await read_connection_metrics(cluster)
                if metrics[f'baton_connections_refused_total{{port="{port}"}}'] > 0:
                    return
            await asyncio.sleep(0.1)


async def test_closed_idle_connections_are_counted_and_logged(cluster: Cluster) -> None:
    ports = ("http", "grpc", "admin", "cluster")
    for port in ports:
        async with idle_connections(ports_of(cluster, port)[0]) as opened:
            await wait_one_closed(opened)
            await wait_refusal_counted(cluster, port)
    metrics = await read_connection_metrics(cluster)
    for port in ports:
        assert metrics[f'baton_connections{{port="{port}"}}'] < OPEN_FILES / 2
    log = cluster.logs.log_path(COORDINATOR).read_text()
    assert "too many connections to the http port" in log
    assert "--max-connections" in log


async def test_closed_idle_connections_of_a_node_are_logged(cluster: Cluster) -> None:
    log = cluster.logs.log_path("decode-0")

    async def wait_logged() -> None:
        while "too many connections to the transfer port" not in log.read_text():
            await asyncio.sleep(0.1)

    is_logged = asyncio.create_task(wait_logged())
    async with asyncio.timeout(TIMEOUT_SECONDS):
        # Again if a library has closed the silent ones before the guard of the port counted them,
        # which it does less often on a busy machine.
        while not is_logged.done():
            async with AsyncExitStack() as stack:
                for port in ports_of(cluster, "decode-0"):
                    await stack.enter_async_context(idle_connections(port))
                await asyncio.wait([is_logged], timeout=5.0)
    await is_logged
