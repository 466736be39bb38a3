"""The model that `up` and `make demo` serve when none is named: the bundled one."""

from pathlib import Path

import baton
from baton.errors import ConfigError

_ROOT = Path(baton.__file__).resolve().parent.parent
_BUNDLED = Path("models", "demo")


def find_default_model(root: Path = _ROOT) -> Path:
    """Its folder, named `demo`: beside the packages in a source tree, so a checkout or an editable
    installation.

    Raises ConfigError where it is not: an installed wheel has no weights in it.
    """
    bundled = root / _BUNDLED
    if not (bundled / "config.json").exists():
        raise ConfigError(
            f"no model named, and this installation has none of its own in {bundled}: name a folder with --model, "
            "or run from a checkout, which has one in models/demo"
        )
    return bundled
