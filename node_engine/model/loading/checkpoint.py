"""The safetensors files of a Hugging Face folder: tensor names and memory-mapped contents."""

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from baton.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint:
    """The open safetensors files of one folder. Tensors are views of the mapped files."""

    def __init__(self, folder: Path) -> None:
        """Open all shards. Raises ConfigError that names the file."""
        self._stack = ExitStack()
        self._file_of_tensor: dict[str, safe_open] = {}
        with ExitStack() as opening:
            for path in list_shards(folder):
                try:
                    shard = opening.enter_context(safe_open(path, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise ConfigError(
                        f"{path}: cannot be read as safetensors: {error}: download it again"
                    ) from None
                for name in shard.keys():
                    if name in self._file_of_tensor:
                        raise ConfigError(
                            f"{path}: tensor {name} is in another shard as well:"
                            " download the model again"
                        )
                    self._file_of_tensor[name] = shard
            self._stack = opening.pop_all()

    def close(self) -> None:
        self._stack.close()

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._file_of_tensor)

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of_tensor[name].get_slice(name).get_shape())

    def load_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of_tensor[name].get_tensor(name)
        return tensor


def list_shards(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises ConfigError if one is missing."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{index}: no usable weight_map ({error!r}): download it again"
            ) from None
        outside = [name for name in names if Path(name).name != name]
        missing = [name for name in names if not (folder / name).is_file()]
        if outside or missing:
            raise ConfigError(
                f"{index}: names shards that are not in {folder}: {outside or missing}:"
                " download them"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{folder}: pickled weights can run code ({', '.join(pickled)}):"
            " convert them to safetensors"
        )
    raise ConfigError(
        f"{folder}: neither {SINGLE} nor {INDEX}: use --load-format dummy to run without weights"
    )
