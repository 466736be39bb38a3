"""Loads a model for the native kernels: packs its weights, or finds them packed."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from baton.process import log
from kv_kernels.native.matrix import IncompressibleWeightsError
from node_engine.model.common.base_engine import TORCH_DTYPES
from node_engine.model.cpu.native_engine import NativeEngine
from node_engine.model.cpu.native_model import build_native_model
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.cpu.native_weights import WeightPlan
from node_engine.model.loading.checkpoint_digest import find_model_digest
from node_engine.model.loading.model_tensors import CheckpointTensors, DummyTensors
from node_engine.model.loading.packed_weights.image_layout import (
    RegionSpec,
    plan_image,
)
from node_engine.model.loading.packed_weights.image_memory import allocate_private_image
from node_engine.model.loading.packed_weights.store import ImageSource
from node_engine.model.loading.packed_weights.weight_sharing import WeightSharing
from node_engine.model.loading.resolved_model import ResolvedModel

# Smaller models are packed in a moment by each node.
MIN_SHARED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _FoundWeights:
    addresses: Mapping[str, int]  # of the regions, by name
    memory: object  # what has to stay alive for them
    image_bytes: int
    source: ImageSource


def load_native_engine(
    model: ResolvedModel,
    native: NativeOptions,
    threads: int,
    *,
    is_dummy: bool = False,
) -> NativeEngine:
    """Build an engine over native kernels.

    Raises ConfigError for what is not served, MemoryError if there is no memory or thread left.
    """
    library = native.kernels
    config, quantization = model.config, model.quantization
    plan = WeightPlan(config, model.dtype, quantization, library, is_compact=native.compact_weights)
    is_large = sum(region.nbytes for region in plan.regions) >= MIN_SHARED_BYTES
    sharing = native.open_sharing() if native.open_sharing is not None and is_large else None
    with closing(_open_tensors(model, is_dummy=is_dummy)) as tensors:
        if isinstance(tensors, CheckpointTensors):
            digests = sharing.digests if sharing else None
            digest = find_model_digest(model.folder, tensors, digests)
        else:
            digest = tensors.compute_digest()
        try:
            found = _find_weights(plan, tensors, digest, sharing)
        except IncompressibleWeightsError as error:
            log.get_logger("engine").info("weights are stored uncompressed", reason=str(error))
            found = None
        if found is None:  # the error is gone, and the memory that it kept
            plan = WeightPlan(config, model.dtype, quantization, library)
            found = _find_weights(plan, tensors, digest, sharing)
    packed = build_native_model(
        config, model.dtype, plan, found.addresses, found.memory, library, threads
    )
    if native.core_sharing is not None:
        packed.share_cores(native.core_sharing)
    engine = NativeEngine(
        config, packed, model.layout, model.max_model_len, digest, quantization, model.dtype
    )
    engine.compute_device = replace(
        engine.compute_device,
        packed_weight_bytes=found.image_bytes,
        packed_weight_source=found.source,
    )
    return engine


def _open_tensors(model: ResolvedModel, *, is_dummy: bool) -> CheckpointTensors | DummyTensors:
    dtype = TORCH_DTYPES[model.dtype]
    if is_dummy:
        return DummyTensors(model.config, dtype, model.device, model.quantization)
    return CheckpointTensors(model.folder, model.config, dtype, model.device, model.quantization)


def _find_weights(
    plan: WeightPlan,
    tensors: CheckpointTensors | DummyTensors,
    digest: bytes,
    sharing: WeightSharing | None,
) -> _FoundWeights:
    fills = {region.name: region.fill for region in plan.regions}

    def fill_region(name: str, view: memoryview) -> None:
        fills[name](view, tensors.load_tensor)

    key = plan.make_key(digest)
    specs = [RegionSpec(region.name, region.nbytes) for region in plan.regions]
    if sharing is not None:
        packed = sharing.store.open_or_build(key, specs, fill_region)
        if sharing.last_image is not None:
            sharing.last_image.save_image_id(packed.image_id)
        addresses = {name: region.address for name, region in packed.regions.items()}
        return _FoundWeights(addresses, packed, packed.image_bytes, packed.source)
    layout = plan_image(key, specs)
    memory = allocate_private_image(layout)
    for record in layout.regions:
        fill_region(record.name, memory.region_view(record))
    addresses = {record.name: memory.address + record.offset for record in layout.regions}
    return _FoundWeights(addresses, memory, layout.image_bytes, "checkpoint")
