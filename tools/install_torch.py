"""Install torch without CUDA from its own index, before pip would take PyPI's 5 GB build.

    python tools/install_torch.py https://download.pytorch.org/whl/cpu

The index is tried once, with a short timeout. If it cannot be reached, nothing is installed here,
and the following installation takes torch from pip's index. `make setup` runs this before anything
else is installed, so it uses the standard library only.
"""

import importlib.metadata
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX_TIMEOUT = 5.0  # seconds for the index to answer


def is_installed() -> bool:
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def find_index_problem(index: str) -> str:
    """Ask the index once; return why it does not list torch, or an empty string if it does."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=INDEX_TIMEOUT):
            return ""
    except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
        return str(error)


def install_from_index(index: str) -> bool:
    """Install the required torch version from the index; return whether pip succeeded."""
    listing = [sys.executable, str(ROOT / "deploy" / "requirements.py"), "torch"]
    requirement = subprocess.run(
        listing, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-compile",
        "--index-url",
        index,
    ]
    return subprocess.run([*pip, *requirement], check=False).returncode == 0


def main(index: str) -> None:
    if not index or is_installed():
        return
    reason = find_index_problem(index)
    if reason:
        sys.stdout.write(
            f"{index} cannot be reached ({reason}): torch comes from where pip looks\n"
        )
    elif not install_from_index(index):
        sys.stdout.write(f"torch was not installed from {index}: it comes from where pip looks\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
