"""Plan the host memory of the nodes' caches and of the pool, for `baton up` and `baton doctor`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from baton.config.memory_size import AUTO, parse_memory_size, resolve_memory_size
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.shared_memory.available_memory import (
    AvailableMemory,
    format_size,
    measure_available_memory,
)

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Host memory of the caches on one machine. With auto, the sizes are upper bounds."""

    node_count: int
    node_bytes: int  # of each node; 0 if `sized_on_gpu`
    pool_bytes: int  # 0: no pool
    sized_on_gpu: bool = False  # each node chooses by the memory of its GPU

    @property
    def total_bytes(self) -> int:
        return self.node_count * self.node_bytes + self.pool_bytes

    def __str__(self) -> str:
        pool = f" and a pool of {format_size(self.pool_bytes)}" if self.pool_bytes else ""
        if self.sized_on_gpu:
            return f"{self.node_count} nodes, sized by the memory of their GPU,{pool or ' no pool'}"
        return f"{self.node_count} nodes with {format_size(self.node_bytes)} each{pool}"


def is_sized_on_gpu(config: Config, driver: Path = _NVIDIA_DRIVER) -> bool:
    """Whether --kv-memory is relative to the memory of a GPU, which only the nodes measure.

    `driver` is a file that exists where the NVIDIA driver is loaded.
    """
    has_gpu = config.device == "cuda" or (config.device == "auto" and driver.exists())
    return config.engine == "model" and has_gpu and not parse_memory_size(config.kv_memory, 0)


def plan_memory(config: Config, available: AvailableMemory) -> MemoryPlan:
    """Return the sizes of all caches; those set to auto are reduced until the plan fits.

    Raises ConfigError for a malformed size.
    """
    nodes = config.prefill + config.decode
    on_gpu = is_sized_on_gpu(config)
    plan = MemoryPlan(
        nodes,
        0 if on_gpu else resolve_memory_size(config.kv_memory, available),
        resolve_memory_size(config.pool_memory, available, "pool_memory") if config.has_pool else 0,
        on_gpu,
    )
    auto_nodes = nodes if config.kv_memory == AUTO and not on_gpu else 0
    auto_pool = int(config.has_pool and config.pool_memory == AUTO)
    if plan.total_bytes <= available.usable_bytes or not auto_nodes + auto_pool:
        return plan
    fixed_bytes = (nodes - auto_nodes) * plan.node_bytes + (1 - auto_pool) * plan.pool_bytes
    share = max(0, available.usable_bytes - fixed_bytes) // (auto_nodes + auto_pool)
    return MemoryPlan(
        nodes,
        min(plan.node_bytes, share) if auto_nodes else plan.node_bytes,
        min(plan.pool_bytes, share) if auto_pool else plan.pool_bytes,
        on_gpu,
    )


def find_memory_shortage(plan: MemoryPlan, available: AvailableMemory) -> tuple[str, str] | None:
    """Return what is too large and how to fix it, or None if the plan fits."""
    if plan.total_bytes <= available.usable_bytes:
        return None
    free_text = (
        f"{format_size(available.free_bytes)} {available.limited_by}, "
        f"{format_size(available.reserve_bytes)} kept in reserve"
    )
    fix = f"--kv-memory {format_size(available.usable_bytes // plan.node_count * 9 // 10)} or less"
    if plan.pool_bytes:
        with_pool = (available.usable_bytes - plan.pool_bytes) // plan.node_count
        fix = f"a smaller --pool-memory (0: no pool), or with none {fix}"
        if with_pool > 0:
            fix = (
                f"--kv-memory {format_size(with_pool * 9 // 10)} or less, "
                "or a smaller --pool-memory (0: no pool)"
            )
    fix += (
        ", fewer nodes (--prefill, --decode), "
        "or a larger folder (docker: --shm-size) or memory limit"
    )
    return f"{plan} are {format_size(plan.total_bytes)}; {free_text}", fix


def fit_memory(config: Config) -> tuple[Config, str]:
    """Return `config` with sizes that fit, and a notice that states them.

    Raises ConfigError when explicit sizes exceed the available memory.
    """
    try:
        available = measure_available_memory(Path(config.segment_dir))
    except OSError as error:
        raise ConfigError(
            f"segment_dir {config.segment_dir!r} cannot be used ({error.strerror}): "
            "give --segment-dir a folder"
        ) from None
    plan = plan_memory(config, available)
    shortage = find_memory_shortage(plan, available)
    if shortage is not None:
        raise ConfigError(f"{shortage[0]}: give {shortage[1]}", param="kv_memory")
    kv_memory, pool_memory = config.kv_memory, config.pool_memory
    reduced = plan.node_bytes < resolve_memory_size(AUTO, available)
    if config.kv_memory == AUTO and reduced and not plan.sized_on_gpu:
        kv_memory = str(plan.node_bytes)
    if (
        config.has_pool
        and config.pool_memory == AUTO
        and plan.pool_bytes < resolve_memory_size(AUTO, available, "pool_memory")
    ):
        pool_memory = str(plan.pool_bytes)
    has_bounds = AUTO in (config.kv_memory, config.pool_memory) and not plan.sized_on_gpu
    qualifier = "at most " if has_bounds else ""
    notice = (
        f"cache memory: {qualifier}{plan} (--kv-memory, --pool-memory) "
        f"of {format_size(available.free_bytes)} {available.limited_by}"
    )
    return dataclasses.replace(config, kv_memory=kv_memory, pool_memory=pool_memory), notice
