"""No secret and no path of somebody's machine stands in a tracked file."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 4 << 20  # of a text; what is bigger is weights

PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
KNOWN_TOKEN = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20}|hf_[A-Za-z0-9]{30,}"
    r"|sk-[A-Za-z0-9_-]{32,}"
    r"|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{20,}|AIza[\w-]{35})"
)
HOME = re.compile(r"(?:^|[^\w.])(?:/home|/Users|[A-Z]:\\Users)[/\\]\w")
ASSIGNED_SECRET = re.compile(
    r"(?i)(?:key|token|secret|password|passwd)[\"']?\s*[:=]\s*[\"']?"
    r"(?P<value>[A-Za-z0-9+/_-]{20,}=*)"
)
LONG_HEX = re.compile(r"\b[0-9a-fA-F]{32,}\b")
SETTINGS = frozenset({".yml", ".yaml", ".env", ".toml", ".sh", ".cfg", ".ini", ".conf", ".example"})


def is_settings(path: str) -> bool:
    name = Path(path).name
    return Path(path).suffix in SETTINGS or name.startswith((".env", "Dockerfile", "Makefile"))


def find_problems(path: str, text: str) -> Iterator[str]:
    """What should not be in a file of this name."""
    for kind, pattern in (
        ("private key", PRIVATE_KEY),
        ("token", KNOWN_TOKEN),
        ("home folder", HOME),
    ):
        yield from (f"{path}: {kind}: {found[0].strip()[:24]}" for found in pattern.finditer(text))
    if is_settings(path):
        yield from (f"{path}: long hex: {found[0][:8]}..." for found in LONG_HEX.finditer(text))
        yield from (
            f"{path}: secret: {found['value'][:8]}..." for found in ASSIGNED_SECRET.finditer(text)
        )
    if len(ROOT.parts) > 2 and re.search(rf"(?<!\w){re.escape(str(ROOT))}\b", text):
        yield f"{path}: this checkout's own folder"


def list_tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return [name for name in listed.stdout.split("\0") if name]


def iter_texts() -> Iterator[tuple[str, str]]:
    for name in list_tracked_files():
        path = ROOT / name
        if path.is_file() and path.stat().st_size <= MAX_BYTES:
            content = path.read_bytes()
            if b"\0" not in content:
                yield name, content.decode(errors="replace")


def test_tracked_files_have_no_secrets_and_no_local_paths() -> None:
    if not list_tracked_files():
        pytest.skip("not a git checkout")
    assert [found for path, text in iter_texts() for found in find_problems(path, text)] == []


def test_no_secret_file_is_tracked() -> None:
    names = {Path(name).name for name in list_tracked_files()}
    assert not names & {
        ".env",
        "id_rsa",
        "id_ed25519",
        ".netrc",
        ".npmrc",
        ".pypirc",
        "credentials.json",
    }
    assert not {name for name in names if name.endswith((".pem", ".key", ".p12"))}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", "-----BEGIN " + "EC PRIVATE KEY-----"),
        ("a.md", "see /" + "home/jane/baton"),
        ("a.json", '"/' + 'Users/jane"'),
        ("a.md", "C:" + "\\Users\\jane"),
        ("a.py", "hf_" + "a" * 34),
        (".env.example", "BATON_API_KEY=" + "0a" * 16),
        ("a.yml", "x: " + "0f" * 20),
        ("deploy/Dockerfile", "ENV TOKEN=" + "abcdEFGH0123" * 2),
        ("a.md", f"cd {ROOT}" if len(ROOT.parts) > 2 else "/" + "home/jane"),
    ],
)
def test_planted_secrets_are_found(path: str, text: str) -> None:
    assert len(list(find_problems(path, text))) >= 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "a.yml",
            "BATON_API_KEY: ${BATON_API_KEY:?is not set. Make .env with 'sh deploy/new-env.sh'}",
        ),
        ("a.md", "a mount at /homepage/x, an option --home/x, https://x.org/home/x"),
        ("a.json", '"sha": "' + "0a" * 20 + '"'),
        ("a.yml", "PASSWORD: *admin-token"),
    ],
)
def test_harmless_text_is_not_flagged(path: str, text: str) -> None:
    assert list(find_problems(path, text)) == []
