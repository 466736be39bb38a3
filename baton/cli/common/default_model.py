"""The bundled model, which `baton up` and `make demo` serve when none is named."""

from pathlib import Path

import baton
from baton.errors import ConfigError

_ROOT = Path(baton.__file__).resolve().parent.parent
_BUNDLED = Path("models", "demo")


def find_default_model(root: Path = _ROOT) -> Path:
    """Return the bundled model's folder, which source trees and editable installations have.

    Raises ConfigError if it is missing: an installed wheel has no weights in it.
    """
    bundled = root / _BUNDLED
    if not (bundled / "config.json").exists():
        raise ConfigError(
            f"no model named, and this installation has none of its own in {bundled}: "
            "name a folder with --model, or run from a checkout, which has one in models/demo"
        )
    return bundled
