"""Which kernels a node on CPUs computes with: native ones, or torch's."""

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.process import log
from kv_kernels.native.library import NativeLibrary, load_library


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
