import dataclasses

import pytest

from baton.cli.supervisor import child_specs
from baton.cli.supervisor.ports import Endpoints
from baton.config.resolve import resolve_config
from baton.config.settings import SECRET_FIELDS, Config
from baton.errors import ConfigError

WHERE = Endpoints(
    http="127.0.0.1:1", grpc="127.0.0.1:2", admin="127.0.0.1:3", cluster="127.0.0.1:4"
)


def children(config: Config, cores: int = 2, **environ: str) -> tuple[child_specs.ChildSpec, ...]:
    return child_specs.make_child_specs(config, WHERE, environ=environ, cores=cores, supervisor=77)


def test_one_process_for_each_part() -> None:
    specs = children(Config(prefill=2, decode=1))
    assert [(spec.name, spec.module) for spec in specs] == [
        ("coordinator", "coordinator"),
        ("prefill-0", "prefill_node"),
        ("prefill-1", "prefill_node"),
        ("decode-0", "decode_node"),
    ]
    assert [spec.environ.get("BATON_NAME") for spec in specs[1:]] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    assert {spec.environ["BATON_COORDINATOR"] for spec in specs[1:]} == {WHERE.cluster}
    assert {spec.environ["BATON_SUPERVISOR_PID"] for spec in specs} == {"77"}


def test_a_child_reads_the_settings_that_up_resolved() -> None:
    config = Config(
        model="m",
        prefill=3,
        insecure=True,
        heartbeat=0.25,
        kv_memory="4GiB",
        api_key="k",
        cluster_token="t",
    )
    coordinator, node, *_ = children(config)
    assert resolve_config({}, environ=coordinator.environ) == config
    for_node = dataclasses.replace(
        config,
        name="prefill-0",
        coordinator=WHERE.cluster,
        nodes_per_gpu=4,
        nodes_per_host=4,
        api_key="",
    )
    assert resolve_config({}, environ=node.environ) == for_node


def test_a_setting_of_the_environment_or_a_file_cannot_overrule_the_resolved_one() -> None:
    coordinator, *_ = children(
        Config(), BATON_PREFILL="9", BATON_CONFIG="/etc/baton.toml", BATON_FAILPOINTS="x", HOME="/h"
    )
    assert coordinator.environ["BATON_PREFILL"] == "1"
    assert "BATON_CONFIG" not in coordinator.environ
    assert coordinator.environ["BATON_FAILPOINTS"] == "x"
    assert coordinator.environ["HOME"] == "/h"


def test_each_child_gets_the_secrets_that_it_uses_and_none_on_its_command_line() -> None:
    """A child's command line is its interpreter, -m and the module; its secrets are in its
    environment."""
    config = Config(api_key="a-key", cluster_token="a-token", admin_token="an-admin")
    where = dataclasses.replace(WHERE, pool="127.0.0.1:5")
    for spec in child_specs.make_child_specs(
        config, where, environ={"BATON_API_KEY": "a-key"}, cores=2, supervisor=77
    ):
        given = {spec.environ.get(f"BATON_{field.upper()}") for field in SECRET_FIELDS} - {None}
        assert given == (
            {"a-key", "a-token", "an-admin"}
            if spec.name == child_specs.COORDINATOR
            else {"a-token"}
        )
        assert (
            not {"a-key", "an-admin"} & set(spec.environ.values())
            or spec.name == child_specs.COORDINATOR
        )
        assert "-" not in spec.module


def test_a_variable_that_nothing_reads_is_not_passed_on() -> None:
    for spec in children(Config(), BATON_PREFIL="2", BATON_ENDPOINT="h:1"):
        assert "BATON_PREFIL" not in spec.environ
        assert spec.environ["BATON_ENDPOINT"] == "h:1"


@pytest.mark.parametrize(
    ("threads", "prefill", "cores", "expected"),
    [("auto", 1, 2, "1"), ("auto", 3, 2, "1"), ("auto", 1, 8, "4"), ("3", 3, 2, "3")],
)
def test_openmp_threads_divide_the_cores_and_nodes_decide_on_theirs(
    threads: str, prefill: int, cores: int, expected: str
) -> None:
    for spec in children(Config(threads=threads, prefill=prefill), cores=cores)[1:]:
        if "BATON_NODES_PER_HOST" in spec.environ:
            assert spec.environ["OMP_NUM_THREADS"] == expected
            assert spec.environ["BATON_THREADS"] == threads


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1.5", ""])
def test_threads_that_are_no_number_are_refused_by_value(threads: str) -> None:
    with pytest.raises(ConfigError, match=f"threads is '{threads}'"):
        child_specs.check_threads(threads)


def test_idle_openmp_threads_do_not_spin_unless_the_user_says_so() -> None:
    for spec in children(Config(), cores=8):
        assert spec.environ["OMP_WAIT_POLICY"] == "passive"
    assert [spec.environ["OMP_NUM_THREADS"] for spec in children(Config(), cores=8)] == [
        "1",
        "4",
        "4",
    ]
    assert children(Config(), OMP_WAIT_POLICY="active")[1].environ["OMP_WAIT_POLICY"] == "active"
    assert children(Config(), OMP_NUM_THREADS="6")[1].environ["OMP_NUM_THREADS"] == "6"


def test_no_prefill_node_means_colocated_and_is_told() -> None:
    config, notes = child_specs.complete_config(Config(prefill=0))
    assert config.mode == "colocated"
    assert notes == ["--prefill 0: mode disaggregated becomes colocated"]
    assert [spec.name for spec in children(config)] == ["coordinator", "decode-0"]
    assert child_specs.complete_config(Config(prefill=0, mode="colocated"))[1] == []


def test_a_token_is_minted_unless_given() -> None:
    first, second = (child_specs.complete_config(Config())[0].cluster_token for _ in range(2))
    assert len(first) == 64
    assert first != second
    assert child_specs.complete_config(Config(cluster_token="mine"))[0].cluster_token == "mine"
