"""deploy/Dockerfile: who runs in the image, what is left out of it, what goes into it."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import dockerfile
from tests.compose_file import SECRETS, load_compose_file

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "deploy" / "Dockerfile"
TARGETS = ("cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_dockerfile_has_the_expected_stages() -> None:
    stages = dockerfile.parse_stages(FILE)
    assert list(stages)[-1] == "cpu"  # what is built when no target is named
    assert {
        name: stage.base for name, stage in stages.items() if stage.base in stages
    } == dict.fromkeys(TARGETS, "runtime")
    assert {stages[name].base for name in ("build", "runtime")} == {"${PYTHON_IMAGE}"}
    python = re.search(r"^ARG PYTHON_IMAGE=python:(\S+)", FILE.read_text(), re.MULTILINE)
    assert python is not None
    assert "-slim" in python[1]


@pytest.mark.parametrize("target", TARGETS)
def test_processes_are_not_root(target: str) -> None:
    user, _, group = dockerfile.image_user(FILE, target).partition(":")
    assert int(user) >= 10000
    assert int(group) >= 10000
    assert dockerfile.list_steps(FILE, target)[-1][0] == "USER"


def test_no_compiler_and_no_package_installer_in_the_cpu_image() -> None:
    steps = [words for step, words in dockerfile.list_steps(FILE, "cpu") if step == "RUN"]
    assert not any(re.search(r"\b(apt-get|gcc|pip|curl|wget)\b", words) for words in steps)
    copied = [
        words for step, words in dockerfile.list_steps(FILE, "cpu") if step in ("COPY", "ADD")
    ]
    assert copied == ["--from=build /opt/baton /opt/baton"]


def test_the_file_names_no_secret() -> None:
    assert not any(name in FILE.read_text() for name in SECRETS)


def test_services_use_targets_and_ports_that_exist() -> None:
    compose = load_compose_file(ROOT / "docker-compose.yml", SECRETS)
    exposed = {
        port
        for step, words in dockerfile.list_steps(FILE, "cpu")
        if step == "EXPOSE"
        for port in words.split()
    }
    for service in compose.services.values():
        if "build" in service.raw:
            assert service.raw["build"]["target"] in TARGETS
            assert (ROOT / service.raw["build"]["dockerfile"]) == FILE
            assert {port.split(":")[-1] for port in service.raw.get("ports", ())} <= exposed


def is_ignored(path: str) -> bool:
    """By .dockerignore: the last rule that matches the path or a folder that it is in."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if line.startswith("#") or not line:
            continue
        parts = path.split("/")
        folders = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        if any(
            fnmatch.fnmatchcase(folder, pattern.removeprefix("**/"))
            or (pattern.startswith("**/") and pattern[3:] in parts)
            for folder in folders
        ):
            verdict = not line.startswith("!")
    return verdict


def test_build_context_has_what_the_wheel_needs_and_nothing_private() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    packages = [
        name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    tops = [f"kernels/{name}" if name == "kv_kernels" else name for name in packages]
    needed = [path for path in tracked if path.startswith(tuple(f"{top}/" for top in tops))]
    build_files = [
        path
        for path in tracked
        if path in ("pyproject.toml", "MANIFEST.in") or path.startswith("tools/build_backend/")
    ]
    assert [
        path
        for path in (*needed, *build_files, "README.md", "deploy/requirements.py")
        if is_ignored(path)
    ] == []
    private = (
        ".env",
        ".git/config",
        ".venv/bin/python",
        "tests/models.py",
        "shared.key",
        "baton/__pycache__/x.pyc",
    )
    assert [path for path in private if not is_ignored(path)] == []


def test_requirements_are_those_of_the_project() -> None:
    def printed(*names: str) -> list[str]:
        command = [sys.executable, "deploy/requirements.py", *names]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    wanted = PROJECT["project"]["dependencies"]
    assert printed() == wanted
    assert printed("torch") == [line for line in wanted if line.startswith("torch>")]
