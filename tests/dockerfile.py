"""Reading deploy/Dockerfile: its stages, and what an image says about the processes in it."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class BuildStage:
    name: str
    base: str  # an image, or an earlier stage
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, arguments


def parse_stages(path: Path) -> dict[str, BuildStage]:
    """By name, in the order of the file. Continued lines are joined; comments are dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: dict[str, BuildStage] = {}
    for line in filter(None, text.splitlines()):
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            current = found.setdefault(name, BuildStage(name, base))
        elif found:
            current.steps.append((instruction, arguments.strip()))
    return found


def list_steps(path: Path, target: str) -> list[tuple[str, str]]:
    """Every step that the image of a target is made by, from its base image on."""
    by_name = parse_stages(path)
    steps: list[tuple[str, str]] = []
    while target in by_name:
        steps = by_name[target].steps + steps
        target = by_name[target].base
    return steps


def image_environ(path: Path, target: str) -> dict[str, str]:
    pairs = [
        word
        for step, words in list_steps(path, target)
        if step == "ENV"
        for word in shlex.split(words)
    ]
    return dict(pair.split("=", 1) for pair in pairs)


def image_user(path: Path, target: str) -> str:
    """The user that the image's processes run as."""
    return [words for step, words in list_steps(path, target) if step == "USER"][-1]
