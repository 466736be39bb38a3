"""Builds the engine that the settings of a node name, with its kernels and its sampler."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError, NodeFailed
from baton.process.cores import count_usable_cores
from node_engine.core.scheduling.step_limits import DeviceType, StepLimits
from node_engine.core.step.engine import DeviceLost, Engine
from node_engine.paced.costs import PacedCosts
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedEngine

if TYPE_CHECKING:  # torch is imported only if a model is served
    import torch

    from kv_kernels.reference.torch_kernels import TorchKernels
    from node_engine.model.loading.packed_weights.store import PackedWeightStore
    from node_engine.model.model_engine import Sampler

_PACED_MAX_MODEL_LEN = 8192
_MAX_THREADS = 4096  # more than any host has cores


def resolve_device_type(config: NodeConfig) -> DeviceType:
    """What computes here. Takes seconds for a model. Raises ConfigError for a missing GPU."""
    if config.engine == "paced":
        return "cpu"
    from node_engine.model.model_loader import resolve_device

    return "cuda" if resolve_device(config.device).type == "cuda" else "cpu"


def build_engine(
    config: NodeConfig,
    device: DeviceType,
    limits: StepLimits,
    weights: "PackedWeightStore | None" = None,
) -> Engine:
    """Build the engine that `--engine` names; this takes seconds.

    `weights`: the result of `begin_opening_weights`, if they are opened already. Raises ConfigError
    for a model that cannot be served, NodeFailed if the GPU failed.
    """
    if config.engine == "paced":
        return _build_paced_engine(config)
    try:
        with node_failed_at_device_loss():
            return _build_model_engine(config, device, limits, weights)
    finally:
        if weights is not None:
            weights.cancel_opening()  # what was opened, and is not of this model


def _build_model_engine(
    config: NodeConfig,
    device: DeviceType,
    limits: StepLimits,
    weights: "PackedWeightStore | None",
) -> Engine:
    from node_engine.host.cpu_kernels import choose_native_options
    from node_engine.model.model_loader import load_model_engine

    native = choose_native_options(config, weights) if device == "cpu" else None
    if native is None and weights is not None:
        weights.cancel_opening()
    shares_cores = native is not None and native.core_sharing is not None
    return load_model_engine(
        config.model,
        dtype=config.dtype,
        quantize=config.quantize,
        kv_dtype=config.kv_dtype,
        device=device,
        block_size=config.block_size,
        max_model_len=config.max_model_len or None,
        threads=count_compute_threads(config, shares_cores=shares_cores),
        load_format=config.load_format,
        choose_kernels=partial(choose_kernels, deterministic=config.deterministic),
        sampler=choose_sampler(),
        max_num_seqs=limits.max_num_seqs,
        deterministic=config.deterministic,
        native=native,
    )


def choose_kernels(device: "torch.device", *, deterministic: bool) -> "TorchKernels":
    """The kernels that a model uses on `device`."""
    from kv_kernels.dispatch import kernels_for

    return kernels_for(device, deterministic=deterministic)


def choose_sampler() -> "Sampler":
    """What draws a model's next tokens from its logits."""
    from node_engine.model.sampling.sampler import sample_tokens

    return sample_tokens


def _build_paced_engine(config: NodeConfig) -> Engine:
    costs = PacedCosts(
        prefill_us_per_token=config.paced_prefill_us_per_token,
        decode_base_us=config.paced_step_ms * 1e3,
        decode_us_per_sequence=config.paced_sequence_us,
    )
    return PacedEngine(
        costs,
        layout=replace(PACED_LAYOUT, block_size=config.block_size),
        vocab_size=config.paced_vocab_size,
        reread=config.paced_reread,
        max_model_len=config.max_model_len or _PACED_MAX_MODEL_LEN,
    )


def count_compute_threads(config: NodeConfig, *, shares_cores: bool) -> int:
    """Threads of the forward pass. `auto`: the cores of this process.

    A node that does not see when the other nodes of its host compute (`shares_cores` is false) gets
    its part: with a thread per core in every node, they would slow each other down several times
    over. Raises ConfigError unless the setting is auto or a number of threads.
    """
    if config.threads == "auto":
        cores = count_usable_cores()
        return cores if shares_cores else max(1, cores // config.nodes_per_host)
    if re.fullmatch("[0-9]{1,9}", config.threads):
        count = int(config.threads)
        if 1 <= count <= _MAX_THREADS:
            return count
    raise ConfigError(
        f"threads is {config.threads!r}: it must be auto or a number from 1 to {_MAX_THREADS}",
        param="threads",
    )


@contextmanager
def node_failed_at_device_loss() -> Iterator[None]:
    """Raise NodeFailed, with one line, for DeviceLost."""
    try:
        yield
    except DeviceLost as error:
        raise NodeFailed(f"the GPU failed at start: {error.reason}") from error
