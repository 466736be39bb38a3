import pytest

from baton.errors import ConfigError, HandoffFailed
from baton.process.failpoints import (
    KNOWN_FAILPOINTS,
    FailpointAction,
    Failpoints,
    arm_from_environment,
)


def test_unarmed_points_do_nothing() -> None:
    points = Failpoints()
    assert all(points.hit(name) is None for name in KNOWN_FAILPOINTS)


def test_skip_and_times() -> None:
    points = Failpoints("transfer.write.before=drop+2*2")
    assert [points.hit("transfer.write.before") for _ in range(5)] == [
        None,
        None,
        FailpointAction.DROP,
        FailpointAction.DROP,
        None,
    ]


def test_error_is_a_failed_handoff() -> None:
    with pytest.raises(HandoffFailed, match=r"decode\.commit\.before"):
        Failpoints("decode.commit.before=error").hit("decode.commit.before")


def test_probability_is_seeded() -> None:
    def draws(seed: int) -> list[FailpointAction | None]:
        points = Failpoints("transfer.write.before=corrupt@0.5", seed)
        return [points.hit("transfer.write.before") for _ in range(50)]

    assert draws(1) == draws(1) != draws(2)
    assert 10 < draws(1).count(FailpointAction.CORRUPT) < 40


@pytest.mark.parametrize(
    "spec",
    [
        "nonsense",
        "no.such.point=drop",
        "decode.commit.before=drop",
        "transfer.write.before=fly",
        "transfer.write.before=delay(1.2.3)",
        "transfer.write.before=drop@0.1.2",
        "transfer.write.before=drop@.",
    ],
)
def test_bad_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        Failpoints(spec)


@pytest.mark.parametrize(
    ("variable", "value"), [("BATON_FAILPOINTS", "nonsense"), ("BATON_FAILPOINTS_SEED", "dice")]
)
def test_a_bad_variable_is_a_start_up_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=value):
        arm_from_environment()
