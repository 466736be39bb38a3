"""`python -m kv_pool`: the pool of a host. See docs/design/0005-kv-pool.md."""

import os
import sys
from collections.abc import Sequence

from baton import config_flags, log, runtime
from baton.errors import ConfigError
from baton.failpoints import arm_from_environment
from kv_pool.process import host_pool

POOL_FIELDS = (
    *("coordinator", "cluster_token", "insecure", "name", "listen", "health_port", "segment_dir", "silence"),
    *("pool_memory", "pool_eviction", "log_level", "log_format"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to stop; returns the exit code of the process."""
    supervisor = os.environ.get("BATON_SUPERVISOR_PID")
    if supervisor:
        runtime.die_with(int(supervisor))
    try:
        arm_from_environment()
        description = "The pool of KV blocks of one host."
        config = config_flags.load(argv, prog="python -m kv_pool", description=description, fields=POOL_FIELDS)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return runtime.EXIT_USAGE
    log.configure(config.log_level, config.log_format, node=config.name or "pool")
    return runtime.run(lambda stop: host_pool(config, stop))


if __name__ == "__main__":
    sys.exit(main())
