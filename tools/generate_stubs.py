"""`make proto`: generate baton/pb from proto/.

A test compares the checked-in stubs with the output. protoc gets the files under the virtual path
baton/pb/, so that the generated imports are absolute and unique.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_NAMES = ("common", "generation", "cluster", "pool")


def generate_stubs(out: Path) -> None:
    """Write the stubs below `out`/baton/pb. Raises SystemExit when protoc reports an error."""
    files = [f"baton/pb/{name}.proto" for name in PROTO_NAMES]
    arguments = [
        f"-Ibaton/pb={ROOT / 'proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    if protoc.main(["protoc", *arguments, *files]) != 0:
        sys.exit("protoc failed")


if __name__ == "__main__":
    generate_stubs(ROOT)
