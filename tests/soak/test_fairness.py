"""Classes and tenants beside each other on real processes: what each waits for its first token while others ask for
more than there is, and whom the devices' time is charged to.

`make test` plays it for seconds and judges outcomes; `make soak` for a minute each, and judges latencies too.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from baton.cli.top_view import total
from coordinator.core.tenants import hash_key
from tests.cluster import Cluster
from tests.open_loop import Ask, Outcome, as_tenant, held_to
from tests.pool.rig import until
from tests.soak.conftest import Figures
from tests.soak.storm import JUDGED, Storm, lag, ms, spread, ttfts
from tests.virtual_cluster import percentile

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLO = 0.25  # seconds to a first token, for premium
PLACES = 16
ASK = Ask()
TENANTS = {"gold": "premium", "a": "standard", "b": "standard", "c": "standard", "greedy": "standard"}
MEEK = ("a", "b", "c")
SHARE = 0.2  # of the capacity, for each of four
SETTINGS = {
    "prefill": 1,
    "decode": 2,
    "max_num_seqs": PLACES // 2,
    "max_batched_tokens": 128,
    "max_queue": 64,
    "kv_memory": "4MiB",
    "paced_prefill_us_per_token": 100.0,
    "heartbeat": 0.25,
}


@dataclass(slots=True)
class Stage:
    storm: Storm
    file: Path

    def write(self, rate: float | None = None, headroom: float | None = None) -> None:
        """The greedy one's limit in requests a second, and what who asks for too much leaves."""
        head = "" if headroom is None else f"headroom = {headroom}\n"
        self.file.write_text(head + "".join(_entry(name, rate if name == "greedy" else None) for name in TENANTS))

    async def reload(self, rate: float | None = None, headroom: float | None = None) -> None:
        """The coordinator has read it when this returns."""
        log = self.storm.cluster.logs.path("coordinator")
        before = log.read_text().count("tenants reloaded")
        self.write(rate, headroom)
        self.storm.cluster.signal("coordinator", signal.SIGHUP)
        await until("tenants reloaded", lambda: log.read_text().count("tenants reloaded") > before)


def _entry(name: str, rate: float | None) -> str:
    digest = hash_key(f"key-of-{name}".encode()).hex()
    text = f'[[tenants]]\nname = "{name}"\nclass = "{TENANTS[name]}"\nkeys = ["sha256:{digest}"]\n'
    return text + ("" if rate is None else f"requests_per_second = {rate:.3f}\nrequest_burst = 2\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("fairness")
    file = folder / "tenants.toml"
    seconds = float(request.config.getoption("--storm-seconds"))
    step = 40.0 if seconds >= JUDGED else 20.0  # milliseconds: 23 or 45 requests a second
    cluster = Cluster(folder, engine="paced", model="", tenants=str(file), paced_step_ms=step, **SETTINGS)
    made = Stage(Storm(cluster, seconds, figures), file)
    made.write()
    async with cluster:
        await made.storm.measure(as_tenant(ASK, "a"), 2 * PLACES)
        yield made
    cluster.assert_clean()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def at_rest(stage: Stage) -> AsyncIterator[None]:
    yield
    await stage.storm.cluster.wait_quiet()


async def offer(storm: Storm, seed: int, **rates: float) -> dict[str, list[Outcome]]:
    """Of each tenant, at its share of the capacity; those who arrived when the others had."""
    loop = storm.loop()
    loop.arrivals = seed
    began = time.monotonic()
    offered = [loop.offer(as_tenant(ASK, name), rate * storm.scale, storm.seconds) for name, rate in rates.items()]
    outcomes = await asyncio.gather(*offered)
    for each in outcomes:
        held_to(each)
    await storm.cluster.wait_quiet()
    settled = began + storm.seconds / 10
    return {name: [one for one in each if one.due >= settled] for name, each in zip(rates, outcomes, strict=True)}


async def test_premium_beside_three_times_the_capacity(stage: Stage) -> None:
    storm = stage.storm
    alone = (await offer(storm, 1, gold=SHARE))["gold"]
    crowded = await offer(storm, 1, gold=SHARE, a=3.0)
    gold, bulk = crowded["gold"], crowded["a"]
    assert {each.end for each in (*alone, *gold)} == {"answered"}, "premium is turned away"
    ended = held_to(bulk)
    storm.note(
        "standard offers 3x the capacity",
        premium_TTFT_alone=spread(ttfts(alone)),
        premium_TTFT=spread(ttfts(gold)),
        clients_own_delay=lag(gold),
        standard_TTFT=spread(ttfts(bulk)),
        standard=", ".join(f"{count} {how}" for how, count in sorted(ended.items())),
        SLO=ms(SLO),
    )
    storm.judge(percentile(ttfts(gold), 0.95) <= SLO, spread(ttfts(gold)))


async def test_one_tenant_at_ten_times_its_share(stage: Stage) -> None:
    """It costs the others a tenth of their p95 at most, whether its share is its limit or it is given all that the
    others leave but the headroom. Without that it costs them more, which is measured and not judged."""
    storm = stage.storm

    async def p95(greed: float) -> float:
        outcomes = await offer(storm, 2, **dict.fromkeys(MEEK, SHARE), greedy=greed * SHARE)
        meek = [each for name in MEEK for each in outcomes[name]]
        assert {each.end for each in meek} == {"answered"} or greed > 1
        return percentile(ttfts(meek), 0.95)

    fair, unlimited = await p95(1.0), await p95(10.0)
    await stage.reload(headroom=0.0)
    bare = await p95(10.0)
    await stage.reload(rate=SHARE * storm.scale)
    limited = await p95(10.0)
    storm.note(
        "one of four at 10x its share",
        others_TTFT_p95=f"{ms(fair)} while all keep to their shares",
        with_a_limit=f"{ms(limited)}, {limited / fair:.2f}x",
        without_one=f"{ms(unlimited)}, {unlimited / fair:.2f}x",
        nor_headroom=f"{ms(bare)}, {bare / fair:.2f}x",
    )
    storm.judge(limited <= 1.1 * fair, (limited, fair))
    storm.judge(unlimited <= 1.1 * fair, (unlimited, fair))


async def test_device_seconds_add_up(stage: Stage) -> None:
    storm = stage.storm
    await offer(storm, 3, gold=SHARE, a=2 * SHARE)
    async with httpx.AsyncClient(base_url=storm.cluster.admin) as admin:
        lines = [line.rpartition(" ") for line in (await admin.get("/metrics")).text.splitlines() if line[0] != "#"]
    counters = {key: float(value) for key, _, value in lines}
    busy = total(counters, "baton_device_busy_seconds_total")
    parts = {
        (phase, name): total(counters, "baton_device_seconds_total", phase=phase, **{"class": name})
        for phase in ("prefill", "decode")
        for name in ("premium", "standard")
    }
    assert all(seconds > 0 for seconds in parts.values()), parts
    everything = total(counters, "baton_device_seconds_total")
    assert abs(everything - busy) <= 0.02 * busy
    storm.note(
        "device seconds",
        **{f"{name} {phase}": f"{seconds:.2f} s" for (phase, name), seconds in parts.items()},
        sum_of_busy=f"{everything / busy:.2%} of {busy:.2f} s",
    )
