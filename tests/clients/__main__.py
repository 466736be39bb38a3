"""Starts a cluster with the scripted model and runs `client_calls.py` against it.

`python -m tests.clients PYTHON [RECORD]`, where PYTHON is the interpreter of the clients.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.clients.scripted_model import build_scripted_model
from tests.clients.scripts import SCRIPTS
from tests.cluster import Cluster


async def run_clients(python: str, record: str | None) -> int:
    """Return the exit status of the clients."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "scripted"
        build_scripted_model(model, SCRIPTS)
        async with Cluster(folder, model=str(model), dtype="float32", threads="1") as cluster:
            calls = Path(__file__).with_name("client_calls.py")
            arguments = [str(calls), cluster.http_url, *([record] if record else [])]
            process = await asyncio.create_subprocess_exec(python, *arguments)
            return await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("python")
    parser.add_argument("record", nargs="?")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run_clients(arguments.python, arguments.record)))


if __name__ == "__main__":
    main()
