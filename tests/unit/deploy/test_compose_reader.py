"""The reader of compose files that the other tests stand on."""

from pathlib import Path

import pytest

from tests.compose_file import (
    MissingVariable,
    list_variables,
    load_compose_file,
    parse_duration,
    parse_size,
    substitute_variables,
)

VARIABLES = {"A": "one", "EMPTY": ""}


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
def test_variables_are_interpolated(text: str, wanted: str) -> None:
    assert substitute_variables(text, VARIABLES) == wanted


@pytest.mark.parametrize(
    "text", ["${B:?set it}", "${B?set it}", "${EMPTY:?set it}", "${A:-x}${B:-${C:?set it}}"]
)
def test_missing_required_variable_is_an_error(text: str) -> None:
    with pytest.raises(MissingVariable, match="set it"):
        substitute_variables(text, VARIABLES)


@pytest.mark.parametrize("text", ["${A", "${A/x/y}", "${}", "100$ "])
def test_invalid_syntax_is_refused(text: str) -> None:
    with pytest.raises(AssertionError):
        substitute_variables(text, VARIABLES)


def test_variables_are_found() -> None:
    assert list_variables("${A:-${B:-1}} $${C} ${D:?x}") == {"A", "B", "D"}


def test_durations_and_sizes_are_parsed() -> None:
    assert (parse_duration("45s"), parse_duration("1m30s"), parse_duration("2h")) == (45, 90, 7200)
    assert (parse_size("512m"), parse_size("1g"), parse_size("512MiB"), parse_size("1.5GiB")) == (
        512 << 20,
        1 << 30,
        512 << 20,
        3 << 29,
    )


FILE = """
x-base: &base
  environment: { SHARED: "${A}", PASSED: , ABSENT: }
services:
  last: { <<: *base, depends_on: [first], command: [python] }
  first: { <<: *base, deploy: { replicas: "${B:-2}" }, stop_grace_period: 1m,
           tmpfs: ["/tmp:size=1m"] }
  extra: { <<: *base, profiles: [more] }
"""


def test_services_are_read(tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(FILE)
    compose = load_compose_file(tmp_path / "compose.yml", {"A": "one", "PASSED": "through"})
    first = compose.services["first"]
    assert first.environ == {"SHARED": "one", "PASSED": "through"}
    assert (first.replicas, first.stop_grace_seconds, first.mounts[0].target) == (2, 60, "/tmp")
    assert [service.name for service in compose.startup_order()] == ["first", "last"]
    assert {service.name for service in compose.startup_order("more")} == {"first", "last", "extra"}
