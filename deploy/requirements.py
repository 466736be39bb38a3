"""Print what pyproject.toml requires at run time, one requirement a line; with names, those
packages only."""

import re
import sys
import tomllib
from pathlib import Path


def main(names: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        if not names or re.split(r"[^\w.-]", line, maxsplit=1)[0] in names:
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
