"""Spreads the nodes of `baton up` over the GPUs of this machine. Pure.

Nodes take GPUs in turns, in the order prefill-0, decode-0, prefill-1, decode-1, and so on: with two
GPUs all prefill nodes compute on one and all decode nodes on the other, so that no prompt disturbs
a decode step. Where there are more nodes than GPUs, nodes share one, in time slices.

A node computes on the first GPU that it sees. It sees the others as well, behind its own, because a
process can map memory only of GPUs that it sees.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from baton.config.memory_size import is_memory_share
from baton.config.settings import ALL_GPUS, Config
from baton.errors import ConfigError

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPU of each node, as an index of the GPUs that this process sees."""

    gpu_by_node: Mapping[str, int]

    def count_nodes(self, gpu: int) -> int:
        """How many nodes compute on a GPU."""
        return Counter(self.gpu_by_node.values())[gpu]

    def describe(self) -> str:
        """Which node computes where, and what nodes that share a GPU get."""
        nodes_by_gpu: dict[int, list[str]] = {}
        for node, gpu in self.gpu_by_node.items():
            nodes_by_gpu.setdefault(gpu, []).append(node)
        parts = []
        for gpu, nodes in sorted(nodes_by_gpu.items()):
            text = f"GPU {gpu}: {', '.join(nodes)}"
            if len(nodes) > 1:
                text += f" in time slices, each with a cache of 1/{len(nodes)}"
            parts.append(text)
        return f"{'; '.join(parts)} (--gpus)"


def choose_gpus(config: Config, num_visible: int) -> tuple[Config, list[str]]:
    """Resolve `--gpus` to a list of indices, of `num_visible` GPUs, and say who computes where.

    Raises ConfigError for GPUs that are not there, and for --gpus where nodes use none.
    """
    uses_gpus = config.engine == "model" and config.device != "cpu"
    if config.gpus != ALL_GPUS and not uses_gpus:
        reason = "--device cpu" if config.engine == "model" else f"--engine {config.engine}"
        raise _gpus_error(config, f"with {reason} nodes use no GPU: leave one of them out")
    if not uses_gpus or (not num_visible and config.gpus == ALL_GPUS):
        return config, []
    indices = _parse_gpus(config, num_visible)
    config = dataclasses.replace(config, gpus=",".join(map(str, indices)) + ",")
    return config, [assign_gpus(config.prefill, config.decode, indices).describe()]


def assign_gpus(prefill: int, decode: int, gpus: Sequence[int]) -> GpuAssignment:
    """Assign so many nodes of each role to GPUs, of which there is one at least."""
    pairs = zip_longest(
        [f"prefill-{index}" for index in range(prefill)],
        [f"decode-{index}" for index in range(decode)],
    )
    nodes = [node for pair in pairs for node in pair if node is not None]
    return GpuAssignment({node: gpus[turn % len(gpus)] for turn, node in enumerate(nodes)})


def make_node_environs(config: Config, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What each node finds in its environment about itself and its GPU, by its name.

    `config` comes from `choose_gpus`. Without a choice of GPUs all nodes use the first one.
    """
    nodes = config.prefill + config.decode
    if config.gpus == ALL_GPUS:
        names = assign_gpus(config.prefill, config.decode, [0]).gpu_by_node
        return {name: {"BATON_NAME": name, "BATON_NODES_PER_GPU": str(nodes)} for name in names}
    gpus = [int(part) for part in config.gpus.split(",") if part]
    assignment = assign_gpus(config.prefill, config.decode, gpus)
    return {
        name: {
            "BATON_NAME": name,
            "BATON_NODES_PER_GPU": str(assignment.count_nodes(gpu)),
            "BATON_KV_MEMORY": _divide_share(config.kv_memory, assignment.count_nodes(gpu)),
            _VISIBLE_DEVICES: _own_gpu_first(gpu, gpus, environ),
        }
        for name, gpu in assignment.gpu_by_node.items()
    }


def _own_gpu_first(gpu: int, gpus: Sequence[int], environ: Mapping[str, str]) -> str:
    visible = environ.get(_VISIBLE_DEVICES, "")
    names = visible.split(",") if visible else []
    order = [gpu, *(other for other in gpus if other != gpu)]
    return ",".join(names[index].strip() if index < len(names) else str(index) for index in order)


def _divide_share(kv_memory: str, nodes: int) -> str:
    """A share of a GPU's memory is divided among its nodes; `auto` divides itself."""
    return f"{float(kv_memory) / nodes:.6g}" if is_memory_share(kv_memory) else kv_memory


def _parse_gpus(config: Config, num_visible: int) -> list[int]:
    """The indices that --gpus names. Raises ConfigError."""
    if not num_visible:
        raise _gpus_error(
            config,
            "no NVIDIA GPU is visible here: leave --gpus out, or see `baton doctor` for the driver"
            f" and {_VISIBLE_DEVICES}",
        )
    if config.gpus == ALL_GPUS:
        return list(range(num_visible))
    bound = (
        f"{num_visible} {'GPU is' if num_visible == 1 else 'GPUs are'} visible here"
        f" ({_VISIBLE_DEVICES}): give --gpus a number from 1 to {num_visible}, or a list of indices"
        f" from 0 to {num_visible - 1} such as '0,'"
    )
    is_list = "," in config.gpus
    parts = [part.strip() for part in config.gpus.removesuffix(",").split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise _gpus_error(config, bound)
    numbers = [int(part) for part in parts]
    if not is_list:
        if not 1 <= numbers[0] <= num_visible:
            raise _gpus_error(config, bound)
        return list(range(numbers[0]))
    if max(numbers) >= num_visible:
        raise _gpus_error(config, f"there is no GPU {max(numbers)}: {bound}")
    if len(set(numbers)) < len(numbers):
        raise _gpus_error(config, "it names a GPU twice: nodes share GPUs anyway if there are more")
    return numbers


def _gpus_error(config: Config, reason: str) -> ConfigError:
    return ConfigError(f"gpus is {config.gpus!r}: {reason}", param="gpus")
