"""Build the small random model that `baton up` serves when none is bundled."""

import sys
from pathlib import Path

from benchmarks.models import DEMO, build

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.build_demo_model FOLDER")
    build(Path(sys.argv[1]), DEMO)
