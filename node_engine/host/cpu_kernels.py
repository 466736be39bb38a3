"""Which kernels a node on CPUs computes with, and where it keeps weights that they have packed."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.weight_cache import resolve_weight_cache
from baton.process import log
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.host.host_cores import open_host_cores
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.loading.packed_weights.cache_folder import (
    WeightCacheFolder,
    open_weight_cache,
)
from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache
from node_engine.model.loading.packed_weights.last_image import LastImage
from node_engine.model.loading.packed_weights.store import PackedWeightStore
from node_engine.model.loading.packed_weights.weight_sharing import WeightSharing


def choose_native_options(
    config: NodeConfig, begun: PackedWeightStore | None
) -> NativeOptions | None:
    """The native kernels, with what they share with other nodes of the host; None: torch computes.

    `begun`: the result of `begin_opening_weights`. Raises ConfigError if `--cpu-kernels native` is
    set and there are none.
    """
    library = load_cpu_kernels(config)
    if library is None:
        return None
    return NativeOptions(
        library,
        partial(open_weight_sharing, config, library, begun),
        config.compact_weights,
        open_host_cores(Path(config.segment_dir)),
    )


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


def begin_opening_weights(config: NodeConfig, opened: ExitStack) -> PackedWeightStore | None:
    """Begin to open the packed weights of the last start with these settings, on a thread.

    Called before torch is imported, which takes as long. `opened` ends what has not ended. None if
    no weights are remembered. Raises ConfigError for a bad size of the cache folder.
    """
    settings = resolve_weight_cache(config)
    if settings is None or config.engine != "model" or config.device == "cuda":
        return None
    library = load_library(config.cpu_kernels)
    if not isinstance(library, NativeLibrary):
        return None
    try:
        cache = WeightCacheFolder(settings.folder, settings.max_bytes)
    except OSError:
        return None  # open_weight_sharing says why, if it is needed
    image_id = _make_last_image(config, cache, library).find_image_id()
    if image_id is None:
        return None
    store = PackedWeightStore(Path(config.segment_dir), cache)
    store.begin_opening(image_id)
    opened.callback(store.cancel_opening)
    return store


def open_weight_sharing(
    config: NodeConfig, library: NativeLibrary, begun: PackedWeightStore | None
) -> WeightSharing:
    """Where the nodes of this host keep packed weights. Raises ConfigError for a bad folder.

    `begun`: the result of `begin_opening_weights`.
    """
    cache = open_weight_cache(resolve_weight_cache(config))
    return WeightSharing(
        begun or PackedWeightStore(Path(config.segment_dir), cache),
        None if cache is None else ModelDigestCache(cache.folder),
        None if cache is None else _make_last_image(config, cache, library),
    )


def _make_last_image(
    config: NodeConfig, cache: WeightCacheFolder, library: NativeLibrary
) -> LastImage:
    settings = {
        "kernels": library.describe(),
        "device": config.device,
        "model": str(Path(config.model).resolve()),
        "load_format": config.load_format,
        "dtype": config.dtype,
        "quantize": config.quantize,
        "compact_weights": config.compact_weights,
    }
    return LastImage(cache.folder, settings)
