"""Options of the native CPU engine: its kernels, weights and cores. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_kernels.native.core_sharing import CoreSharingSlot
from kv_kernels.native.native_library import NativeLibrary
from node_engine.model.loading.packed_weights.weight_sharing import WeightSharing

OpenSharing = Callable[[], WeightSharing]


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """What an engine computes with on a CPU, and how it stores the weights."""

    kernels: NativeLibrary
    # Opens the memory in which all nodes of a host share the weights of a large model.
    open_sharing: OpenSharing | None = None
    # Compress bfloat16 weights to 12 bits each, without loss, if their exponents allow it.
    compact_weights: bool = True
    # By which nodes of a host share its cores; None: each step uses all threads.
    core_sharing: CoreSharingSlot | None = None
