import pytest

from benchmarks import engine


def test_every_figure_stands_beside_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {
        "_HIDDEN": 32,
        "_INNER": 64,
        "_LAYERS": 2,
        "_HEADS": 4,
        "_VOCABULARY": 64,
        "_LAYER_WEIGHTS": 9000,
    }
    for name, value in tiny.items():
        monkeypatch.setattr(engine, name, value)
    rows = engine.measure_engine("some command", rounds=1)
    assert [row.name for row in rows] == [
        "engine/prefill_512",
        "engine/decode_512_batch_1",
        "engine/decode_512_batch_8",
        "engine/decode_512_batch_16",
    ]
    assert [row.unit for row in rows] == ["tokens/s", "ms", "ms", "ms"]
    for row in rows:
        assert row.limit
        assert row.share == pytest.approx(row.value / row.limit)
        assert row.command == "some command"
