"""The reader of compose files that the other tests stand on."""

from pathlib import Path

import pytest

from tests.compose_file import MissingVariable, load, seconds, size, substitute, variables_in

GIVEN = {"A": "one", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", "plain"),
        ("$A-${A}", "one-one"),
        ("$$A $${A}", "$A ${A}"),
        ("${B}|$B", "|"),
        ("${A:-x}${B:-x}${EMPTY:-x}", "onexx"),
        ("${A-x}${B-x}${EMPTY-x}", "onex"),
        ("${A:+x}${B:+x}${EMPTY:+x}", "x"),
        ("${A+x}${B+x}${EMPTY+x}", "xx"),
        ("${B:-${C:-${A}}}!", "one!"),
        ("${A:?none}${EMPTY?none}", "one"),
        ("http://x/${B:-a:b-c?d}", "http://x/a:b-c?d"),
    ],
)
def test_interpolation(text: str, wanted: str) -> None:
    assert substitute(text, GIVEN) == wanted


@pytest.mark.parametrize("text", ["${B:?set it}", "${B?set it}", "${EMPTY:?set it}", "${A:-x}${B:-${C:?set it}}"])
def test_what_is_required_is_asked_for(text: str) -> None:
    with pytest.raises(MissingVariable, match="set it"):
        substitute(text, GIVEN)


@pytest.mark.parametrize("text", ["${A", "${A/x/y}", "${}", "100$ "])
def test_what_compose_does_not_understand(text: str) -> None:
    with pytest.raises(AssertionError):
        substitute(text, GIVEN)


def test_variables_are_found() -> None:
    assert variables_in("${A:-${B:-1}} $${C} ${D:?x}") == {"A", "B", "D"}


def test_units() -> None:
    assert (seconds("45s"), seconds("1m30s"), seconds("2h")) == (45, 90, 7200)
    assert (size("512m"), size("1g"), size("512MiB"), size("1.5GiB")) == (512 << 20, 1 << 30, 512 << 20, 3 << 29)


FILE = """
x-base: &base
  environment: { SHARED: "${A}", PASSED: , ABSENT: }
services:
  last: { <<: *base, depends_on: [first], command: [python] }
  first: { <<: *base, deploy: { replicas: "${B:-2}" }, stop_grace_period: 1m, tmpfs: ["/tmp:size=1m"] }
  extra: { <<: *base, profiles: [more] }
"""


def test_services_are_read(tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(FILE)
    compose = load(tmp_path / "compose.yml", {"A": "one", "PASSED": "through"})
    first = compose.services["first"]
    assert first.environ == {"SHARED": "one", "PASSED": "through"}
    assert (first.replicas, first.stop_grace, first.mounts[0].target) == (2, 60, "/tmp")
    assert [service.name for service in compose.started()] == ["first", "last"]
    assert {service.name for service in compose.started("more")} == {"first", "last", "extra"}
