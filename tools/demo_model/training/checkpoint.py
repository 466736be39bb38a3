"""Trained weights between the stages: bfloat16 bits in a numpy archive, and the shape as JSON."""

import json
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.training.llama import LlamaForTraining, LlamaShape

WEIGHTS_FILE = "weights.npz"
SHAPE_FILE = "shape.json"


def save_checkpoint(folder: Path, model: LlamaForTraining) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bits = {
        name: parameter.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy()
        for name, parameter in model.named_parameters()
    }
    with (folder / WEIGHTS_FILE).open("wb") as file:
        np.savez(file, **bits)  # type: ignore[arg-type]
    (folder / SHAPE_FILE).write_text(json.dumps(model.shape.to_dict()) + "\n")


def load_checkpoint(folder: Path) -> tuple[LlamaShape, dict[str, torch.Tensor]]:
    """Return the shape, and bfloat16 tensors by their Hugging Face names."""
    shape = LlamaShape(**json.loads((folder / SHAPE_FILE).read_text()))
    with np.load(folder / WEIGHTS_FILE, allow_pickle=False) as stored:
        return shape, {
            name: torch.from_numpy(stored[name]).view(torch.bfloat16) for name in stored.files
        }
