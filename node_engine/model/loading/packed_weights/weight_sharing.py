"""What the nodes of a host share of packed weights, and keep for the next start."""

from dataclasses import dataclass

from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache
from node_engine.model.loading.packed_weights.last_image import LastImage
from node_engine.model.loading.packed_weights.store import PackedWeightStore


@dataclass(frozen=True, slots=True)
class WeightSharing:
    """Where packed weights and what is known of them are kept; None: nowhere."""

    store: PackedWeightStore
    digests: ModelDigestCache | None
    last_image: LastImage | None = None
