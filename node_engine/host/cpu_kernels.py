"""Which kernels a node on CPUs computes with, and where it keeps weights that they have packed."""

from pathlib import Path

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.weight_cache import resolve_weight_cache
from baton.process import log
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.model.cpu.native_loader import WeightSharing
from node_engine.model.loading.packed_weights.cache_folder import open_weight_cache
from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache
from node_engine.model.loading.packed_weights.store import PackedWeightStore


def load_cpu_kernels(config: NodeConfig) -> NativeLibrary | None:
    """The native kernels, or None if torch's compute here; logs which, and why.

    Raises ConfigError if `--cpu-kernels native` is set and there are none.
    """
    library = load_library(config.cpu_kernels)
    if isinstance(library, NativeLibrary):
        log.get_logger("engine").info("cpu kernels chosen", kernels=library.describe())
        return library
    if config.cpu_kernels == "native":
        fix = library.fix or "set --cpu-kernels auto"
        raise ConfigError(f"--cpu-kernels native, and {library.reason}: {fix}")
    log.get_logger("engine").info("cpu kernels chosen", kernels=library.describe(), fix=library.fix)
    return None


def open_weight_sharing(config: NodeConfig) -> WeightSharing:
    """Where the nodes of this host keep packed weights. Raises ConfigError for a bad folder."""
    cache = open_weight_cache(resolve_weight_cache(config))
    return WeightSharing(
        PackedWeightStore(Path(config.segment_dir), cache),
        None if cache is None else ModelDigestCache(cache.folder),
    )
