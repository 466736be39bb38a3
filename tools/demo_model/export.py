"""Stage `export`: trained weights and the tokenizer to a Hugging Face folder."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tools.demo_model import checkpoint, tokenizer
from tools.demo_model.chat import BOS, EOS, SPECIAL

LARGEST = 20_000_000  # bytes of the whole folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path(".demo/corpus"), help="folder that `prepare` wrote")
    parser.add_argument("--trained", type=Path, default=Path(".demo/trained/best"), help="folder of weights")
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="folder to write")


def run(arguments: argparse.Namespace) -> None:
    size = export(arguments.data, arguments.trained, arguments.out)
    print(f"{arguments.out}: {size / 1e6:.1f} MB")
    if size > LARGEST:
        raise SystemExit(f"{arguments.out} has {size} bytes, more than {LARGEST}: choose a smaller shape")


def export(data: Path, trained: Path, out: Path) -> int:
    """Returns the bytes of the folder."""
    out.mkdir(parents=True, exist_ok=True)
    shape, tensors = checkpoint.load(trained)
    bos, eos = SPECIAL.index(BOS), SPECIAL.index(EOS)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    shutil.copyfile(data / tokenizer.FILE, out / tokenizer.FILE)
    _write(out / "tokenizer_config.json", tokenizer.settings(shape.context))
    _write(out / "config.json", shape.hugging_face(bos, eos))
    _write(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    return sum(file.stat().st_size for file in out.iterdir())


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
