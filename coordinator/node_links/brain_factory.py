"""Builds the brain from the coordinator's settings."""

from typing import Literal

from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import ConfigError, InvalidRequest
from baton.slo import Slo, parse_slo
from coordinator.core.brain import Brain
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.join_checks import ServedModel
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import POLICIES
from coordinator.explanation_codec import EXPLANATION_PACKING


def build_brain(config: CoordinatorConfig, served: ServedModel | None = None) -> Brain:
    """Nodes that join are compared with `served`, the model as far as it is known.

    Raises ConfigError.
    """
    settings = BrainSettings(
        mode=effective_mode(config),
        max_queue=config.max_queue,
        max_attempts=config.max_attempts,
        reserve_timeout=config.stall,
        explain_keep=config.explain_keep,
        explanation_packing=EXPLANATION_PACKING,
        retry_budget_share=config.retry_budget,
        local_prefill_share=config.local_prefill_share,
        degrade_wait_seconds=config.degrade_wait,
        degraded_max_tokens=config.degraded_max_tokens,
        default_slo=_parse_config_slo(config.slo),
        max_queue_tokens=config.max_queue_tokens,
    )
    registry = NodeRegistry(config.silence, config.stall, served)
    return Brain(registry, POLICIES[config.placement](), settings)


def effective_mode(config: CoordinatorConfig) -> Literal["disaggregated", "colocated", "auto"]:
    """A cluster without prefill nodes is colocated, whatever --mode says."""
    return config.mode if config.prefill else "colocated"


def _parse_config_slo(slo: str) -> Slo:
    """Raises ConfigError."""
    try:
        return parse_slo(slo)
    except InvalidRequest as error:
        raise ConfigError(f"--slo: {error.message}", param="slo") from None
