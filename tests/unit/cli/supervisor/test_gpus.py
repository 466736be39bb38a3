"""Which GPUs the nodes of `baton up` compute on, on machines with GPUs that are only numbers."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.supervisor import visible_gpus
from baton.cli.supervisor.child_specs import make_child_specs
from baton.cli.supervisor.gpus import assign_gpus, choose_gpus, make_node_environs
from baton.cli.supervisor.ports import Endpoints
from baton.config.settings import ALL_GPUS, Config
from baton.errors import ConfigError

WHERE = Endpoints(
    http="127.0.0.1:1", grpc="127.0.0.1:2", admin="127.0.0.1:3", cluster="127.0.0.1:4"
)


def spread(
    num_visible: int, environ: dict[str, str] | None = None, **settings: Any
) -> dict[str, dict[str, str]]:
    config, _ = choose_gpus(Config(**settings), num_visible)
    return make_node_environs(config, environ or {})


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "expected"),
    [
        (1, 1, [0], [0, 0]),
        (1, 1, [0, 1], [0, 1]),
        (2, 2, [0, 1], [0, 1, 0, 1]),  # prefill on one, decode on the other
        (2, 2, [0, 1, 2, 3], [0, 1, 2, 3]),
        (3, 1, [0, 1], [0, 1, 0, 1]),  # prefill-0, decode-0, prefill-1, prefill-2
        (0, 3, [4, 7], [4, 7, 4]),
        (1, 1, [0, 1, 2], [0, 1]),
    ],
)
def test_nodes_take_gpus_in_turns_one_of_each_role_after_the_other(
    prefill: int, decode: int, gpus: list[int], expected: list[int]
) -> None:
    assert list(assign_gpus(prefill, decode, gpus).gpu_by_node.values()) == expected


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 8))
def test_every_node_has_a_gpu_and_no_gpu_has_two_more_than_another(
    prefill: int, decode: int, count: int
) -> None:
    assignment = assign_gpus(prefill, decode, range(count))
    assert len(assignment.gpu_by_node) == prefill + decode
    loads = [assignment.count_nodes(gpu) for gpu in range(count)]
    assert sum(loads) == prefill + decode
    assert max(loads) - min(loads) <= 1


def test_all_visible_gpus_are_used_by_default_and_said() -> None:
    config, notices = choose_gpus(Config(prefill=2, decode=1), 2)
    assert config.gpus == "0,1,"
    assert notices == [
        "GPU 0: prefill-0, prefill-1 in time slices, each with a cache of 1/2; GPU 1: decode-0"
        " (--gpus)"
    ]
    assert choose_gpus(config, 2)[0] == config  # what was resolved means the same again


@pytest.mark.parametrize(
    ("gpus", "resolved"),
    [("1", "0,"), ("3", "0,1,2,"), ("2,0", "2,0,"), ("3,", "3,"), (" 1 , 2 ", "1,2,")],
)
def test_a_number_is_a_count_and_a_list_has_indices(gpus: str, resolved: str) -> None:
    assert choose_gpus(Config(gpus=gpus), 4)[0].gpus == resolved


@pytest.mark.parametrize(
    ("gpus", "visible", "words"),
    [
        ("9", 2, "gpus is '9': 2 GPUs are visible here.*--gpus a number from 1 to 2.*from 0 to 1"),
        ("0", 2, "gpus is '0'.*a number from 1 to 2"),
        ("-1", 2, "gpus is '-1'.*a number from 1 to 2"),
        ("two", 2, "gpus is 'two'.*a number from 1 to 2"),
        ("", 2, "gpus is ''.*a number from 1 to 2"),
        ("0,,1", 2, "gpus is '0,,1'.*a list of indices"),
        ("9" * 4000, 2, "a number from 1 to 2"),
        ("0,2", 2, "gpus is '0,2': there is no GPU 2: 2 GPUs are visible"),
        ("1,", 1, "gpus is '1,': there is no GPU 1: 1 GPU is visible"),
        ("0,0", 2, "gpus is '0,0': it names a GPU twice"),
        ("1", 0, "gpus is '1': no NVIDIA GPU is visible here: leave --gpus out"),
    ],
)
def test_gpus_that_are_not_there_are_refused(gpus: str, visible: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        choose_gpus(Config(gpus=gpus), visible)
    assert refused.value.param == "gpus"


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"device": "cpu"}, "with --device cpu"), ({"engine": "paced"}, "with --engine paced")],
)
def test_gpus_for_nodes_that_use_none_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"gpus is '1': {words} nodes use no GPU"):
        choose_gpus(Config(gpus="1", **settings), 4)
    assert choose_gpus(Config(**settings), 4) == (Config(**settings), [])


def test_without_gpus_nothing_is_chosen() -> None:
    config = Config(prefill=1, decode=1)
    assert choose_gpus(config, 0) == (config, [])
    assert make_node_environs(config, {}) == {
        "prefill-0": {"BATON_NAME": "prefill-0", "BATON_NODES_PER_GPU": "2"},
        "decode-0": {"BATON_NAME": "decode-0", "BATON_NODES_PER_GPU": "2"},
    }


def test_a_node_sees_its_own_gpu_first_and_the_others_behind_it() -> None:
    environs = spread(3, prefill=1, decode=1)
    assert environs["prefill-0"]["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert environs["decode-0"]["CUDA_VISIBLE_DEVICES"] == "1,0,2"
    assert spread(3, gpus="2,", prefill=1)["decode-0"]["CUDA_VISIBLE_DEVICES"] == "2"


def test_indices_count_what_cuda_visible_devices_leaves() -> None:
    environs = spread(2, {"CUDA_VISIBLE_DEVICES": "5, GPU-ab12"}, prefill=1, decode=1)
    assert environs["prefill-0"]["CUDA_VISIBLE_DEVICES"] == "5,GPU-ab12"
    assert environs["decode-0"]["CUDA_VISIBLE_DEVICES"] == "GPU-ab12,5"


@pytest.mark.parametrize(
    ("kv_memory", "shared", "alone"),
    [("0.5", "0.25", "0.5"), ("auto", "auto", "auto"), ("4GiB", "4GiB", "4GiB")],
)
def test_nodes_of_one_gpu_divide_a_share_of_its_memory(
    kv_memory: str, shared: str, alone: str
) -> None:
    environs = spread(2, prefill=2, decode=1, kv_memory=kv_memory)
    found = {
        name: (each["BATON_NODES_PER_GPU"], each["BATON_KV_MEMORY"])
        for name, each in environs.items()
    }
    assert found == {
        "prefill-0": ("2", shared),
        "prefill-1": ("2", shared),
        "decode-0": ("1", alone),
    }


def test_child_processes_get_it() -> None:
    config, _ = choose_gpus(Config(prefill=1, decode=1, kv_memory="0.8"), 2)
    specs = make_child_specs(config, WHERE, environ={}, cores=2, supervisor=77)
    by_name = {spec.name: spec.environ for spec in specs}
    assert by_name["decode-0"]["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert by_name["decode-0"]["BATON_NODES_PER_GPU"] == "1"
    assert by_name["decode-0"]["BATON_NODES_PER_HOST"] == "2"
    assert by_name["decode-0"]["BATON_KV_MEMORY"] == "0.8"
    assert "CUDA_VISIBLE_DEVICES" not in by_name["coordinator"]


def test_gpus_are_counted_only_where_nodes_may_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    assert visible_gpus.count_visible_gpus(Config(), tmp_path) == 0  # no device file
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(visible_gpus, "_COMMAND", [sys.executable, "-c", "print(3)"])
    assert visible_gpus.count_visible_gpus(Config(), tmp_path) == 3
    assert visible_gpus.count_visible_gpus(Config(device="cpu"), tmp_path) == 0
    assert visible_gpus.count_visible_gpus(Config(engine="paced"), tmp_path) == 0
    for broken in ("print('none')", "raise SystemExit(1)"):
        monkeypatch.setattr(visible_gpus, "_COMMAND", [sys.executable, "-c", broken])
        assert visible_gpus.count_visible_gpus(Config(), tmp_path) == 0


def test_the_setting_is_all_gpus_by_default() -> None:
    assert Config().gpus == ALL_GPUS
