"""The stubs in baton/pb are what protoc makes of proto/ today."""

from pathlib import Path

from tools.generate_stubs import generate_stubs

ROOT = Path(__file__).resolve().parents[3]


def test_stubs_are_current(tmp_path: Path) -> None:
    generate_stubs(tmp_path)
    stubs = {path.name: path.read_text() for path in (tmp_path / "baton" / "pb").iterdir()}
    kept = {
        path.name: path.read_text()
        for path in (ROOT / "baton" / "pb").iterdir()
        if path.name in stubs
    }
    assert stubs == kept, "run `make proto`"
    assert len(stubs) == 12
