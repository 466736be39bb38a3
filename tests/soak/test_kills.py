"""Each class of process is killed under load: nothing is wrong, every request ends once, blocks
come back, and the cluster serves again without anybody's help.

`make test` kills each twice, `make soak` twenty times, and then the bounds on recovery hold too.
"""

import statistics
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton.cli.supervisor.child_specs import COORDINATOR
from tests.cluster import Cluster
from tests.cluster_metrics import read_metric, wait_known_blocks
from tests.soak.kill_runner import KillRunner, RecoveryTimes

pytestmark = pytest.mark.asyncio(loop_scope="module")

JUDGED_KILLS = 10  # kills, from which on times are judged
MAX_RECOVERY_SECONDS = 10.0  # seconds until a new request is answered
MAX_COORDINATOR_RECOVERY_SECONDS = 5.0  # seconds from when the new one listens, until then


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    made = Cluster(
        tmp_path_factory.mktemp("kills"),
        engine="paced",
        prefill=2,
        decode=2,
        kv_memory="8MiB",
        paced_step_ms=4.0,
    )
    async with made:
        yield made
    made.assert_clean()


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--kills"))


def check_recoveries(recoveries: list[RecoveryTimes]) -> None:
    sys.stdout.write("\n".join(map(str, recoveries)) + "\n")
    for name in ("listening_seconds", "answered_seconds", "rejoined_seconds"):
        times = [getattr(one, name) for one in recoveries]
        sys.stdout.write(
            f"{len(times)} kills: {name} median {statistics.median(times):.2f}, "
            f"at most {max(times):.2f}\n"
        )
    if len(recoveries) >= JUDGED_KILLS:
        assert max(one.answered_seconds for one in recoveries) <= MAX_RECOVERY_SECONDS
        assert (
            max(one.answered_seconds - one.listening_seconds for one in recoveries)
            <= MAX_COORDINATOR_RECOVERY_SECONDS
        )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killed_nodes_recover_without_failed_requests(
    cluster: Cluster, kills: int, role: str
) -> None:
    """Nodes are killed in turn, and restarted at the same address or at another one."""
    others = {name: pid for name, pid in cluster.get_pids().items() if not name.startswith(role)}
    runner = KillRunner(cluster, seed=len(role))
    async with runner.running_load():
        recoveries = [
            await runner.kill_process(f"{role}-{number // 2 % 2}", elsewhere=number % 2 == 1)
            for number in range(kills)
        ]
    await cluster.wait_idle()
    assert runner.find_violations(coordinator_died=False) == []
    assert {
        name: pid for name, pid in cluster.get_pids().items() if not name.startswith(role)
    } == others
    check_recoveries(recoveries)


@pytest.mark.timeout(1200)
async def test_killed_coordinator_recovers(cluster: Cluster, kills: int) -> None:
    """Back at once, or after its nodes have given up what they held for it. Their caches outlive
    it: once the load is over, since it evicts, the last new one is told of all blocks that the one
    before it knew."""
    nodes = {name: pid for name, pid in cluster.get_pids().items() if name != COORDINATOR}
    prompt = list(range(1, 200))
    runner = KillRunner(cluster, seed=1)
    async with runner.running_load():
        long = cluster.config.silence + 1.0 if kills >= JUDGED_KILLS else 0.0
        recoveries = [
            await runner.kill_process(COORDINATOR, down=long * (number % 2))
            for number in range(kills)
        ]
    await cluster.wait_idle()
    await cluster.generate(prompt, max_tokens=2, ignore_eos=True)
    await cluster.wait_idle()
    blocks = await read_metric(cluster, "baton_prefix_directory_blocks")
    cluster.kill(COORDINATOR)
    cluster.start(COORDINATOR)
    await cluster.wait_ready()
    await wait_known_blocks(cluster, 0.9 * blocks)  # of all four nodes; its warm-up may evict a few
    cached = (await cluster.generate(prompt, max_tokens=2, ignore_eos=True)).usage.cached_tokens
    await cluster.wait_idle()
    assert runner.find_violations(coordinator_died=True) == []
    assert {name: pid for name, pid in cluster.get_pids().items() if name != COORDINATOR} == nodes
    assert cached > 0
    check_recoveries(recoveries)
