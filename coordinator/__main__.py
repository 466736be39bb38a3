"""`python -m coordinator`: the front door and the brain. Its parts are joined in assemble.py."""

import os
import sys
from collections.abc import Sequence

from baton import config_flags, runtime
from baton.errors import ConfigError
from baton.failpoints import arm_from_environment
from baton.model_source import with_local_model
from coordinator.assemble import coordinate

FIELDS = (
    *("model", "served_model_name", "engine", "mode", "prefill", "request_timeout", "max_queue", "max_attempts"),
    *("retry_budget", "placement", "explain_keep"),
    *("host", "port", "grpc_port", "admin_host", "admin_port", "cluster_host", "cluster_port", "state_dir"),
    *("api_key", "tenants", "cluster_token", "admin_token", "insecure", "failpoints_rpc"),
    *("heartbeat", "silence", "stall", "drain_timeout", "log_level", "log_format"),
)


def main(argv: Sequence[str] | None = None) -> int:
    supervisor = os.environ.get("BATON_SUPERVISOR_PID")
    if supervisor:
        runtime.die_with(int(supervisor))
    try:
        arm_from_environment()
        config = config_flags.load(
            argv, prog="python -m coordinator", description="Baton's coordinator.", fields=FIELDS
        )
        config = with_local_model(config, weights=False)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return runtime.EXIT_USAGE
    return runtime.run(lambda stop: coordinate(config, stop))


if __name__ == "__main__":
    sys.exit(main())
