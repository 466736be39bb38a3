"""Options of the native CPU engine. Does not import torch, which takes a second."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_kernels.native.core_sharing import CoreSharingSlot
from kv_kernels.native.native_library import NativeLibrary
from node_engine.model.loading.packed_weights.weight_sharing import WeightSharing

OpenSharing = Callable[[], WeightSharing]


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """The native kernels, how the engine stores weights, and how nodes of a host share cores."""

    kernels: NativeLibrary
    # Opens the memory in which all nodes of a host share the weights of a large model.
    open_sharing: OpenSharing | None = None
    # Compress bfloat16 weights to 12 bits each, without loss, if their exponents allow it.
    compact_weights: bool = True
    # Where this node announces that it computes, so that the nodes of a host divide its cores.
    # None: each step uses all threads.
    core_sharing: CoreSharingSlot | None = None
