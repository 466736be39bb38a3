"""Fits the settings of `baton up` to this machine: its GPUs and its memory."""

from baton.cli.supervisor.gpus import choose_gpus
from baton.cli.supervisor.memory_plan import fit_memory
from baton.cli.supervisor.visible_gpus import count_visible_gpus
from baton.config.settings import Config


def fit_machine(config: Config) -> tuple[Config, list[str]]:
    """Return settings that this machine can run, and notices that say what was chosen.

    Raises ConfigError for GPUs that are not there, and for explicit sizes that do not fit.
    """
    config, notices = choose_gpus(config, count_visible_gpus(config))
    config, memory_notice = fit_memory(config)
    return config, [*notices, memory_notice]
