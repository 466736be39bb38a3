"""`python -m kv_pool`: runs the shared KV pool of one host. See docs/design/0005-kv-pool.md."""

import sys
from collections.abc import Sequence

from baton.config import flags as config_flags
from baton.config.pool_config import PoolConfig
from baton.process.entry import run_process
from kv_pool.assemble import run_pool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pool until SIGTERM or SIGINT; returns the exit code of the process."""

    def settings() -> PoolConfig:
        description = "The pool of KV blocks of one host."
        return config_flags.load_config(
            argv, PoolConfig, prog="python -m kv_pool", description=description
        )

    return run_process(settings, run_pool)


if __name__ == "__main__":
    sys.exit(main())
