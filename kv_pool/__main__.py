"""`python -m kv_pool`: runs the shared KV pool of one host. See docs/design/0005-kv-pool.md."""

import sys
from collections.abc import Sequence

from baton.config import flags as config_flags
from baton.config.settings import Config
from baton.process.entry import run_process
from kv_pool.pool_process import run_pool

POOL_SETTINGS = (
    *(
        "coordinator",
        "cluster_token",
        "insecure",
        "name",
        "listen",
        "advertise",
        "health_port",
        "host_id",
    ),
    *("segment_dir", "transport", "silence", "ticket_ttl", "progress_timeout"),
    *(
        "pool_memory",
        "pool_disk",
        "pool_disk_dir",
        "state_dir",
        "pool_eviction",
        "log_level",
        "log_format",
    ),
    *("max_connections_per_address", "core_dumps"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pool until SIGTERM or SIGINT; returns the exit code of the process."""

    def settings() -> Config:
        description = "The pool of KV blocks of one host."
        return config_flags.load_config(
            argv, prog="python -m kv_pool", description=description, fields=POOL_SETTINGS
        )

    return run_process(settings, run_pool)


if __name__ == "__main__":
    sys.exit(main())
