"""Stage `export`: write the trained weights and the tokenizer to a Hugging Face folder."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tools.demo_model.common import bpe_tokenizer as tokenizer
from tools.demo_model.common.chat_format import BOS, EOS, SPECIAL_TOKENS
from tools.demo_model.training import checkpoint

MAX_FOLDER_BYTES = 20_000_000  # limit of the whole folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path(".demo/corpus"), help="folder that `prepare` wrote"
    )
    parser.add_argument(
        "--trained", type=Path, default=Path(".demo/trained/best"), help="folder of weights"
    )
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="folder to write")


def run(arguments: argparse.Namespace) -> None:
    size = export_model(arguments.data, arguments.trained, arguments.out)
    print(f"{arguments.out}: {size / 1e6:.1f} MB")
    if size > MAX_FOLDER_BYTES:
        raise SystemExit(
            f"{arguments.out} has {size} bytes, more than {MAX_FOLDER_BYTES}: "
            "choose a smaller shape"
        )


def export_model(data: Path, trained: Path, out: Path) -> int:
    """Write the folder and return its size in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    shape, tensors = checkpoint.load_checkpoint(trained)
    bos, eos = SPECIAL_TOKENS.index(BOS), SPECIAL_TOKENS.index(EOS)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes files that only the owner can read
    shutil.copyfile(data / tokenizer.TOKENIZER_FILE, out / tokenizer.TOKENIZER_FILE)
    _write_json(out / "tokenizer_config.json", tokenizer.tokenizer_config(shape.context))
    _write_json(out / "config.json", shape.to_hf_config(bos, eos))
    _write_json(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    return sum(file.stat().st_size for file in out.iterdir())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
