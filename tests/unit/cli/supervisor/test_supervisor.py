"""The supervisor with fake children: starting, stopping and restarting them."""

import asyncio
import dataclasses
import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from baton.cli.supervisor import child_process, restart_policy, supervisor
from baton.cli.supervisor.child_output import LineRelay, LogFiles
from baton.cli.supervisor.child_process import ChildProcess
from baton.cli.supervisor.child_specs import complete_config
from baton.cli.supervisor.ports import reserve_ports
from baton.cli.supervisor.restart_policy import FROZEN_KILL_SECONDS, max_stop_seconds
from baton.config.settings import Config
from baton.errors import ConfigError, NodeFailed
from tests.unit.cli.supervisor.fake_children import (
    COORDINATOR,
    NODE,
    WAIT,
    WriteChildPrograms,
    any_alive,
    cluster,
    parent_pid,
    read_events,
    wait_for_restart,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def write_child_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteChildPrograms:
    """Write the modules that the children run. Each default starts, and ends on SIGTERM."""

    def write(
        coordinator: str = COORDINATOR + WAIT,
        prefill: str = WAIT,
        decode: str = WAIT,
        pool: str = WAIT,
    ) -> None:
        parts = {
            "coordinator": coordinator,
            "prefill_node": prefill,
            "decode_node": decode,
            "kv_pool": pool,
        }
        for module, code in parts.items():
            (tmp_path / f"{module}.py").write_text(NODE + code)

    monkeypatch.chdir(tmp_path)
    write()
    return write


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    free = Config(port=0, grpc_port=0, admin_port=0, drain_timeout=5.0, segment_dir=str(tmp_path))
    config_with_ports, sockets = reserve_ports(complete_config(free)[0])
    yield config_with_ports
    for reserved in sockets:
        reserved.close()


@pytest.fixture(params=["shown", "hidden"])
def proc(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with /proc and without it.

    Mounted with hidepid, /proc shows no process that leaves no core file.
    """
    if request.param == "hidden":
        monkeypatch.setattr(child_process, "_PROC", tmp_path / "proc")


async def test_the_coordinator_ends_before_the_nodes_and_they_before_their_pool(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    async with cluster(config) as (started, _):
        await started.wait_until_ready()
        pids = started.get_pids()
        assert set(pids) == {"coordinator", "pool-0", "prefill-0", "decode-0"}
        assert {parent_pid(pid) for pid in pids.values()} == {os.getpid()}
        await wait_until(
            lambda: len(read_events()) == len(pids)
        )  # they hear of their end from then on
    assert sorted(read_events()[:4]) == [
        "started coordinator",
        "started decode-0",
        "started pool-0",
        "started prefill-0",
    ]
    assert read_events()[4] == "ended coordinator"
    assert sorted(read_events()[5:7]) == ["ended decode-0", "ended prefill-0"]
    assert read_events()[7:] == ["ended pool-0"]
    assert not any_alive(pids.values())


async def test_children_have_process_groups_of_their_own_in_one_session(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    async with cluster(config) as (started, _):
        await started.wait_until_ready()
        pids = set(started.get_pids().values())
        assert {os.getpgid(pid) for pid in pids} == pids
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}


async def test_cluster_runs_on_without_a_pool_that_cannot_start(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    write_child_programs(pool="print('error: no room: lower --pool-memory')\nos._exit(2)\n")
    async with cluster(config) as (started, notices):
        await started.wait_until_ready()
        await wait_until(lambda: bool(notices))
        assert notices == ["pool-0 failed, continuing without it (no room: lower --pool-memory)"]
        assert set(started.get_pids()) == {"coordinator", "prefill-0", "decode-0"}


async def test_pool_that_always_fails_does_not_stop_the_cluster(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "INITIAL_DELAY", 0.001)
    write_child_programs(pool="sys.exit('no memory')")
    async with cluster(config) as (started, notices):
        await wait_until(lambda: len(notices) == restart_policy.MAX_FAILED_STARTS)
        assert notices[-1] == "pool-0 failed, continuing without it (no memory)"
        await (
            started.wait_until_ready()
        )  # only now: from then on it would be started again and again
        assert {"prefill-0", "decode-0"} <= set(started.get_pids())


async def test_zero_pool_memory_starts_no_pool(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    async with cluster(dataclasses.replace(config, pool_memory="0")) as (started, _):
        await started.wait_until_ready()
        assert "pool-0" not in started.get_pids()


async def test_a_child_that_dies_is_started_again(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    async with cluster(config) as (started, notices):
        await started.wait_until_ready()
        for name, number in (("decode-0", signal.SIGKILL), ("coordinator", signal.SIGKILL)):
            pid = started.get_pids()[name]
            os.kill(pid, number)
            await wait_for_restart(started, name, pid)
        await started.wait_until_ready()
        assert notices == [
            "decode-0 was ended by SIGKILL: starting it again in 0.1 s",
            "coordinator was ended by SIGKILL: starting it again in 0.1 s",
        ]


async def test_config_error_of_a_child_stops_the_cluster(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    write_child_programs(
        prefill="sys.stderr.write('{}\\nerror: model is broken: fix it\\n')\nsys.exit(2)"
    )
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"^model is broken: fix it$"):
        async with cluster(config, LineRelay(lambda _, line: lines.append(line))):
            await asyncio.Event().wait()
    assert "{}" in lines
    assert not any("broken" in line for line in lines)  # the caller of `up` prints the error


async def test_child_that_cannot_start_stops_the_cluster_with_its_last_line(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    write_child_programs(decode="sys.exit('no memory')")
    with pytest.raises(
        NodeFailed, match=r"decode-0 failed 5 times \(ended with exit code 1\).*: no memory"
    ):
        async with cluster(config):
            await asyncio.Event().wait()


async def test_config_exit_code_after_ready_restarts_the_child(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    async with cluster(config) as (started, notices):
        await started.wait_until_ready()
        write_child_programs(
            prefill="if not os.path.exists('tried'):\n open('tried', 'w')\n"
            " print('error: too late')\n sys.exit(2)\n" + WAIT
        )
        pid = started.get_pids()["prefill-0"]
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: len(notices) == 2)
        assert (
            notices[1] == "prefill-0 ended with exit code 2 (too late): starting it again in 0.2 s"
        )


@pytest.mark.usefixtures("proc")
async def test_a_stopped_child_is_killed_and_replaced(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count(0, int(FROZEN_KILL_SECONDS))  # each check is 10 s after the last
    monkeypatch.setattr("baton.process.clock.monotonic_clock", lambda: float(next(moments)))
    monkeypatch.setattr(supervisor, "_CHECK_INTERVAL", 0.05)
    async with cluster(config) as (started, notices):
        await started.wait_until_ready()
        pid = started.get_pids()["decode-0"]
        os.kill(pid, signal.SIGSTOP)
        await wait_for_restart(started, "decode-0", pid)
        assert notices[0] == "decode-0 has been stopped for 10 s: killing it"


async def test_child_that_ignores_sigterm_is_killed(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "TERM_GRACE_SECONDS", 0.2)
    write_child_programs(decode="note('deaf')\nsignal.sigwait({signal.SIGUSR1})")
    async with cluster(dataclasses.replace(config, drain_timeout=0.1)) as (started, notices):
        await started.wait_until_ready()
        await wait_until(lambda: "deaf decode-0" in read_events())
        pid = started.get_pids()["decode-0"]
    assert (
        "decode-0 did not end within 0.3 s of SIGTERM: killing it" in notices
    )  # on a busy machine not it alone
    assert not any_alive([pid])


async def test_stop_timeout_of_a_node_covers_its_drain(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: dict[str, float] = {}

    async def note(self: ChildProcess, seconds: float) -> None:
        patience[self.spec.name] = seconds
        await stop(self, seconds)

    stop = ChildProcess.stop
    monkeypatch.setattr(ChildProcess, "stop", note)
    async with cluster(config) as (started, _):
        await started.wait_until_ready()
    assert (
        patience["decode-0"]
        == patience["prefill-0"]
        == patience["coordinator"]
        > config.drain_timeout
    )
    assert sum(set(patience.values()), patience["coordinator"]) == max_stop_seconds(
        config.drain_timeout
    )


@pytest.mark.usefixtures("proc")
async def test_a_child_without_a_sign_of_life_is_ended_and_replaced(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process shows a sign of life and then hangs; the second one keeps showing them."""
    monkeypatch.setattr(supervisor, "_CHECK_INTERVAL", 0.05)
    signs = "import faulthandler, time\nfaulthandler.enable()\n"
    signs += "pipe = int(os.environ['BATON_LIVENESS_FD'])\n"
    hangs = "def stands_still():\n    time.sleep(600)\n"
    hangs += "if not os.path.exists('tried'):\n open('tried', 'w')\n"
    hangs += " os.write(pipe, b'.')\n stands_still()\n"
    goes_on = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    goes_on += "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
    goes_on += "note('goes on')\nwhile True:\n os.write(pipe, b'.')\n time.sleep(0.005)\n"
    write_child_programs(decode=signs + hangs + goes_on)
    lines: list[str] = []
    patient = dataclasses.replace(config, liveness_timeout=1.0)
    async with cluster(patient, LineRelay(lambda _, line: lines.append(line))) as (_, notices):
        await wait_until(lambda: "goes on decode-0" in read_events())
        assert notices == [
            "decode-0 has been unresponsive for 1 s (--liveness-timeout): ending it",
            "decode-0 was ended by SIGABRT: starting it again in 0.1 s",
        ]
    assert any("stands_still" in line for line in lines)  # where it hung is in its log


async def test_child_without_a_first_sign_of_life_is_left_alone(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting may take any time, since loading a model does."""
    monkeypatch.setattr(supervisor, "_CHECK_INTERVAL", 0.01)
    looks = count()
    look = ChildProcess.abort_if_unresponsive
    monkeypatch.setattr(
        ChildProcess, "abort_if_unresponsive", lambda *given: (next(looks), look(*given))
    )
    async with cluster(dataclasses.replace(config, liveness_timeout=0.01)) as (
        started,
        notices,
    ):
        await started.wait_until_ready()
        before = next(looks)
        await wait_until(lambda: next(looks) > before + 200)
        assert notices == []


async def test_liveness_checks_continue_after_an_exception(
    write_child_programs: WriteChildPrograms, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_CHECK_INTERVAL", 0.01)
    looks = count()

    def fail(self: ChildProcess, now: float) -> None:
        next(looks)
        raise ValueError

    monkeypatch.setattr(ChildProcess, "kill_if_frozen", fail)
    async with cluster(config) as (started, _):
        await wait_until(lambda: next(looks) > 20)
        assert len(started.get_pids()) == 4


async def test_child_runs_on_when_its_output_cannot_be_shown(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    class Broken(LineRelay):
        async def copy_lines(self, name: str, stream: asyncio.StreamReader) -> None:
            raise OSError("the terminal is gone")

    talks = "for _ in range(20000): print('a line of the kind that fills a pipe')\nnote('said')\n"
    write_child_programs(decode=talks + WAIT)
    async with cluster(config, Broken(lambda *_: None)) as (_, notices):
        await wait_until(lambda: "said decode-0" in read_events())
        assert "the output of decode-0 is not shown any more (OSError)" in notices


async def test_full_disk_blocks_no_child_and_dropped_lines_are_reported(
    write_child_programs: WriteChildPrograms, config: Config, tmp_path: Path
) -> None:
    """A full disk is simulated by RLIMIT_FSIZE of this process, which writes the log files.

    The children are started before it is set.
    """
    talks = "import time\nwhile not os.path.exists('quiet'):\n"
    talks += " print('talking', flush=True)\n time.sleep(0.001)\n"
    write_child_programs(decode=talks + "note('quiet')\n" + "print('enough', flush=True)\n" + WAIT)
    logs = LogFiles(tmp_path / "logs")
    file, quiet = logs.get_path("decode-0"), tmp_path / "quiet"
    async with cluster(config, logs) as (started, _):
        await started.wait_until_ready()
        await wait_until(lambda: file.exists() and "talking" in file.read_text())
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 7, limit[1]))
        try:
            await wait_until(lambda: logs.count_dropped_lines("decode-0") > 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        quiet.touch()
        await wait_until(lambda: "enough" in file.read_text())
    logs.close()
    assert "log lines dropped" in file.read_text()


async def test_stopping_before_anything_is_ready_leaves_nothing(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    write_child_programs(coordinator=WAIT)
    async with cluster(config) as (started, _):
        await asyncio.sleep(0)
    assert started.get_pids() == {}


async def test_lines_of_children_carry_their_names(
    write_child_programs: WriteChildPrograms, config: Config
) -> None:
    lines: list[tuple[str, str]] = []
    async with cluster(config, LineRelay(lambda name, line: lines.append((name, line)))):
        await wait_until(lambda: ("decode-0", "hello from decode-0") in lines)


async def test_detached_children_write_files_that_begin_anew(
    write_child_programs: WriteChildPrograms, config: Config, tmp_path: Path
) -> None:
    for _ in range(2):
        logs = LogFiles(tmp_path / "logs")
        async with cluster(config, logs) as (started, _):
            await started.wait_until_ready()  # its file is a new one by then
            await wait_until(partial(logs.get_last_lines, "decode-0"))
        assert logs.get_last_lines("decode-0") == ["hello from decode-0"]
        logs.close()


async def test_segments_of_the_dead_are_swept(
    write_child_programs: WriteChildPrograms, config: Config, tmp_path: Path
) -> None:
    left = tmp_path / f"baton-arena-{'0' * 32}"
    left.write_bytes(b"")
    async with cluster(config):
        pass
    assert not left.exists()
