"""`python -m coordinator`: the front ends and the brain, assembled in assemble.py."""

import sys
from collections.abc import Sequence

from baton.config import flags
from baton.config.coordinator_config import CoordinatorConfig
from baton.models.model_source import with_local_model
from baton.process.entry import run_process
from coordinator.assemble import run_coordinator


def main(argv: Sequence[str] | None = None) -> int:
    def settings() -> CoordinatorConfig:
        description = "Baton's coordinator."
        config = flags.load_config(
            argv, CoordinatorConfig, prog="python -m coordinator", description=description
        )
        return with_local_model(config, weights=False)

    return run_process(settings, run_coordinator)


if __name__ == "__main__":
    sys.exit(main())
