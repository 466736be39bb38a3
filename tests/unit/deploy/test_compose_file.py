"""docker-compose.yml as a document: it is one by the published schema, needs secrets and has none,
and keeps what it promises about rights, sizes, ports and time."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.config.settings import FIELD_NAMES, Config
from tests import dockerfile
from tests.compose_file import (
    SECRETS,
    ComposeFile,
    ComposeService,
    MissingVariable,
    list_variables,
    load_compose_file,
    parse_size,
    read_dotenv,
)

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "docker-compose.yml"
EXAMPLE = ROOT / ".env.example"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SCHEMA = ROOT / "tests" / "data" / "compose-spec" / "compose-spec.json"
PROFILES = ("gpu", "observability")
MARGIN = 5.0  # seconds beside the drain: open calls, transfer plane, interpreter


def load_compose(**variables: str) -> ComposeFile:
    return load_compose_file(FILE, {**SECRETS, **variables})


def all_services() -> list[ComposeService]:
    return load_compose().startup_order(*PROFILES)


def our_services() -> list[ComposeService]:
    return [service for service in all_services() if service.command[:1] == ("python",)]


def node_services() -> list[ComposeService]:
    return [service for service in our_services() if service.name != "coordinator"]


def ids(services: list[ComposeService]) -> list[str]:
    return [service.name for service in services]


# the document


def validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    "variables", [{}, {"BATON_PREFILL": "3", "BATON_DECODE": "4", "BATON_KV_MEMORY": "1GiB"}]
)
def test_file_matches_the_compose_schema(variables: dict[str, str]) -> None:
    assert [error.message for error in validator().iter_errors(load_compose(**variables).raw)] == []


def test_misspelt_key_is_detected() -> None:
    raw = dict(load_compose().raw)
    raw["services"] = {
        **raw["services"],
        "decode": {**raw["services"]["decode"], "stop_grace": "1s"},
    }
    assert len(list(validator().iter_errors(raw))) == 1


def test_plain_up_starts_one_of_each_on_cpus() -> None:
    started = {service.name: service for service in load_compose().startup_order()}
    assert {name: service.replicas for name, service in started.items()} == {
        "coordinator": 1,
        "pool": 1,
        "prefill": 1,
        "decode": 1,
    }
    assert all("BATON_DEVICE" not in service.environ for service in started.values())
    assert {service.environ.get("BATON_TRANSPORT") for service in started.values()} == {None, "zmq"}


def test_replicas_come_from_variables() -> None:
    wanted = load_compose(BATON_PREFILL="2", BATON_DECODE="3")
    assert (wanted.services["prefill"].replicas, wanted.services["decode"].replicas) == (2, 3)
    assert wanted.services["coordinator"].environ["BATON_PREFILL"] == "2"
    on_gpus = load_compose(
        BATON_PREFILL="2", BATON_DECODE="3", **read_dotenv(ROOT / "deploy" / "gpu.env")
    )
    assert [
        on_gpus.services[name].replicas
        for name in ("prefill", "decode", "prefill-gpu", "decode-gpu")
    ] == [
        0,
        0,
        2,
        3,
    ]
    assert on_gpus.services["coordinator"].environ["BATON_PREFILL"] == "2"


def test_gpu_nodes_reserve_a_gpu() -> None:
    for name in ("prefill-gpu", "decode-gpu"):
        service = load_compose().services[name]
        assert service.profiles == {"gpu"}
        assert service.environ["BATON_DEVICE"] == "cuda"
        (device,) = service.raw["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert service.raw["build"]["target"] == "cuda"


def test_environments_hold_settings_only() -> None:
    fields = {f"BATON_{field.upper()}" for field in FIELD_NAMES}
    for service in our_services():
        named = {name for name in service.raw["environment"] if name.startswith("BATON_")}
        assert named <= fields, service.name


# secrets


@pytest.mark.parametrize("missing", SECRETS)
@pytest.mark.parametrize("value", [None, ""])
def test_it_does_not_start_without_secrets(missing: str, value: str | None) -> None:
    variables = {name: secret for name, secret in SECRETS.items() if name != missing}
    with pytest.raises(
        MissingVariable, match=rf"^{missing} is not set. Make .env with 'sh deploy/new-env.sh'$"
    ):
        load_compose_file(FILE, variables if value is None else {**variables, missing: value})


def test_each_process_gets_only_the_secrets_it_needs() -> None:
    for service in node_services():
        assert {name for name in SECRETS if name in service.environ} == {"BATON_CLUSTER_TOKEN"}
    holders = {s.name for s in all_services() if SECRETS["BATON_ADMIN_TOKEN"] in s.environ.values()}
    assert holders == {"coordinator", "prometheus"}
    knowing = {s.name for s in all_services() if SECRETS["GRAFANA_PASSWORD"] in s.environ.values()}
    assert knowing == {"grafana"}, "whoever reads dashboards is no operator by that"
    words = [
        word
        for service in all_services()
        for word in (*service.command, *service.raw.get("entrypoint", ()))
    ]
    assert not any(secret in word for secret in SECRETS.values() for word in words)


def test_the_example_names_every_variable_and_its_default() -> None:
    text = FILE.read_text()
    passed_on = {
        name
        for s in our_services()
        for name, value in s.raw["environment"].items()
        if value is None
    }
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", EXAMPLE.read_text(), re.MULTILINE))
    assert example.keys() == list_variables(text) | passed_on
    assert {
        name for name, value in example.items() if not value and name not in passed_on
    } == SECRETS.keys()
    plain = dict(re.findall(r"\$\{(\w+):-([^${}]*)\}", text))
    assert {name: example[name] for name in plain} == plain
    set_so = {name: value for name, value in example.items() if value and name not in passed_on}
    assert load_compose(**set_so).raw == load_compose().raw


def test_new_secrets_are_made_once_and_kept_private(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for name in (".env.example", "deploy/new-env.sh"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    made = tmp_path / ".env"
    run = ("sh", str(tmp_path / "deploy" / "new-env.sh"))
    subprocess.run(run, check=True, capture_output=True)
    found = read_dotenv(made)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert found.keys() == SECRETS.keys()
    assert len(set(found.values())) == len(SECRETS)
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in found.values())
    load_compose_file(FILE, found)
    again = subprocess.run(run, check=False, capture_output=True, text=True)
    assert (again.returncode, read_dotenv(made)) == (1, found)
    assert "is there already" in again.stderr


# images


def test_third_party_images_can_be_pinned_by_digest(tmp_path: Path) -> None:
    """By variables, for which the registries are asked: a Docker of this test answers for them."""
    (tmp_path / "deploy").mkdir()
    for name in (".env.example", "deploy/new-env.sh", "deploy/pin-images.sh"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    digest = "sha256:" + "ab" * 32
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        '#!/bin/sh\ncase "$*" in *@*) exit 1 ;; '
        f'"buildx imagetools inspect "*) echo {digest} ;; esac\n'
    )
    docker.chmod(0o755)

    def run(script: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PATH": f"{docker.parent}:{os.environ['PATH']}"}
        command = ["sh", str(tmp_path / "deploy" / script)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert run("pin-images.sh").returncode == 1, "there is no .env yet"
    assert run("new-env.sh").returncode == 0
    secrets = read_dotenv(tmp_path / ".env")
    for _ in range(2):  # the second time from the pinned ones
        done = run("pin-images.sh")
        assert done.returncode == 0, done.stderr
    pinned = read_dotenv(tmp_path / ".env")
    assert pinned.items() >= secrets.items()
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    raw = load_compose_file(FILE, pinned).raw
    theirs = {
        raw["services"]["prometheus"]["image"],
        raw["services"]["grafana"]["image"],
        *(
            raw["services"][name]["build"]["args"]["PYTHON_IMAGE"]
            for name in ("coordinator", "decode-gpu")
        ),
    }
    assert len(theirs) == 3
    assert all(image.endswith(f"@{digest}") and image.count("@") == 1 for image in theirs)


def test_every_third_party_image_has_a_variable() -> None:
    stages = dockerfile.parse_stages(DOCKERFILE)
    bases = {stage.base for stage in stages.values()} - stages.keys()
    assert bases == {"${PYTHON_IMAGE}"}
    assert not re.search(r"^# *syntax=", DOCKERFILE.read_text(), re.MULTILINE), (
        "it is an image of others, too"
    )
    images = re.findall(r"^ +image: (.*)$", FILE.read_text(), re.MULTILINE)
    assert all(re.match(r"baton-serve:|\$\{\w+_IMAGE:-", image) for image in images)


# rights


@pytest.mark.parametrize("service", all_services(), ids=ids(all_services()))
def test_containers_have_few_rights(service: ComposeService) -> None:
    raw = service.raw
    assert raw["read_only"] is True
    assert raw["cap_drop"] == ["ALL"]
    assert "cap_add" not in raw
    assert raw["security_opt"] == ["no-new-privileges:true"]
    assert not raw.keys() & {"privileged", "network_mode", "pid", "ipc", "user"}
    assert not any("docker.sock" in mount.source for mount in service.mounts)
    assert all(mount.read_only for mount in service.mounts if mount.kind == "bind")
    assert raw["restart"] == "unless-stopped"
    assert {"max-size", "max-file"} <= raw["logging"]["options"].keys()
    assert raw["healthcheck"]["test"][0] == "CMD"


def test_ports_are_published_to_this_machine_only() -> None:
    published = [port for service in all_services() for port in service.raw.get("ports", ())]
    assert sorted(port.split(":")[-1] for port in published) == [
        "3000",
        "50051",
        "8000",
        "9000",
        "9090",
    ]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_nodes_have_a_network_of_their_own_without_a_way_out() -> None:
    assert load_compose().raw["networks"]["cluster"] == {"internal": True}
    assert all(service.raw["networks"] == ["cluster"] for service in node_services())


# time and memory


@pytest.mark.parametrize("service", our_services(), ids=ids(our_services()))
def test_stop_grace_period_covers_a_drain(service: ComposeService) -> None:
    assert service.stop_grace_seconds >= float(service.environ["BATON_DRAIN_TIMEOUT"]) + MARGIN
    assert float(service.environ["BATON_DRAIN_TIMEOUT"]) == Config().drain_timeout


def test_nodes_start_before_the_coordinator_and_outlive_it() -> None:
    """It is ready when they are, so none of them may wait until it is healthy."""
    order = ids(load_compose().startup_order(*PROFILES))
    assert all(order.index(node.name) < order.index("coordinator") for node in node_services())
    for service in all_services():
        for condition in service.raw.get("depends_on", {}).values():
            assert condition == {"condition": "service_started", "required": False}


def test_the_segment_volume_holds_the_caches_of_the_defaults() -> None:
    options = dict(
        re.findall(r"(\w+)=(\w+)", load_compose().raw["volumes"]["segments"]["driver_opts"]["o"])
    )
    by_default = {service.name: service for service in load_compose().startup_order()}
    in_it = (by_default["prefill"], by_default["decode"])
    caches = sum(
        service.replicas * parse_size(service.environ["BATON_KV_MEMORY"]) for service in in_it
    )
    assert parse_size(options["size"]) >= 2 * caches + parse_size(
        by_default["pool"].environ["BATON_POOL_MEMORY"]
    )
    assert f"{options['uid']}:{options['gid']}" == dockerfile.image_user(DOCKERFILE, "cpu")
    assert options["mode"] == "0700"
    for node in node_services():
        assert node.environ["BATON_SEGMENT_DIR"] in {
            mount.target for mount in node.mounts if mount.source == "segments"
        }
        own = "BATON_POOL_MEMORY" if node.name == "pool" else "BATON_KV_MEMORY"
        assert parse_size(node.raw["shm_size"]) > parse_size(node.environ[own])


def test_files_that_are_mounted_exist() -> None:
    for service in all_services():
        for mount in service.mounts:
            if mount.kind == "bind" and mount.source != "./models":
                assert (ROOT / mount.source).is_dir(), mount
            if mount.kind == "volume":
                assert mount.source in load_compose().raw["volumes"]
    assert os.access(ROOT / "deploy" / "new-env.sh", os.R_OK)
