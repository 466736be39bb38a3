"""The file of a model that grammars need."""

from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"


def find_tokenizer_file(model: str, engine: str) -> Path | None:
    """Return the tokenizer.json of the served model, or None if it has none."""
    if engine == "paced" or not model:
        return None
    file = Path(model) / TOKENIZER_FILE
    return file if file.is_file() else None
