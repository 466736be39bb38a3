"""Trained weights between the stages: bfloat16 bits in a numpy archive, the shape beside them."""

import json
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.llama import Llama, Shape

WEIGHTS = "weights.npz"
SHAPE = "shape.json"


def save(folder: Path, model: Llama) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bits = {
        name: parameter.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy()
        for name, parameter in model.named_parameters()
    }
    with (folder / WEIGHTS).open("wb") as file:
        np.savez(file, **bits)  # type: ignore[arg-type]
    (folder / SHAPE).write_text(json.dumps(model.shape.plain()) + "\n")


def load(folder: Path) -> tuple[Shape, dict[str, torch.Tensor]]:
    """The shape, and bfloat16 tensors by Hugging Face's names."""
    shape = Shape(**json.loads((folder / SHAPE).read_text()))
    with np.load(folder / WEIGHTS, allow_pickle=False) as stored:
        return shape, {name: torch.from_numpy(stored[name]).view(torch.bfloat16) for name in stored.files}
