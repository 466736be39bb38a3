"""How a node names the GPU that it computes on."""

import pytest

from node_engine.model.common.compute_device import name_gpu


@pytest.mark.parametrize(
    ("index", "visible_devices", "name"),
    [
        (0, "", "cuda:0"),
        (1, "", "cuda:1"),
        (0, "3", "cuda:3"),
        (1, "3, 5", "cuda:5"),
        (0, "GPU-ab12,1", "cuda:0"),  # a UUID says nothing about its number
        (2, "3,5", "cuda:2"),
    ],
)
def test_a_gpu_has_its_number_on_the_machine(index: int, visible_devices: str, name: str) -> None:
    assert name_gpu(index, visible_devices) == name
