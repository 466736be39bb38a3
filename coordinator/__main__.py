"""`python -m coordinator`: the front ends and the brain, assembled in assemble.py."""

import sys
from collections.abc import Sequence

from baton.config import flags
from baton.config.settings import Config
from baton.models.model_source import with_local_model
from baton.process.entry import run_process
from coordinator.assemble import run_coordinator

COORDINATOR_FIELDS = (
    *(
        "model",
        "served_model_name",
        "engine",
        "load_format",
        "mode",
        "prefill",
        "request_timeout",
        "max_attempts",
    ),
    *("max_queue", "max_queue_tokens", "allowed_origins", "unknown_fields", "metrics_on_http"),
    *("retry_budget", "placement", "explain_keep", "slo", "ratio_auto"),
    *("local_prefill_share", "degrade_wait", "degraded_max_tokens"),
    *(
        "host",
        "port",
        "grpc_port",
        "admin_host",
        "admin_port",
        "cluster_host",
        "cluster_port",
        "state_dir",
    ),
    *("api_key", "tenants", "cluster_token", "admin_token", "insecure", "failpoints_rpc"),
    *("max_connections", "max_connections_per_address", "core_dumps"),
    *("heartbeat", "silence", "stall", "drain_timeout", "flip_timeout", "log_level", "log_format"),
)


def main(argv: Sequence[str] | None = None) -> int:
    def settings() -> Config:
        description = "Baton's coordinator."
        config = flags.load_config(
            argv, prog="python -m coordinator", description=description, fields=COORDINATOR_FIELDS
        )
        return with_local_model(config, weights=False)

    return run_process(settings, run_coordinator)


if __name__ == "__main__":
    sys.exit(main())
