"""Stage `train`: turn token ids into weights, on the CPU or one GPU, with torch and numpy only."""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from tools.demo_model.common import corpus_files as corpus
from tools.demo_model.common.progress_bar import ProgressBar
from tools.demo_model.training import checkpoint
from tools.demo_model.training.batch_sampler import BatchSampler
from tools.demo_model.training.held_out_loss import autocast, bits_per_byte, sum_nats
from tools.demo_model.training.learning_rate import learning_rate_factor
from tools.demo_model.training.llama import LlamaForTraining, LlamaShape

LOG_FILE = "training.jsonl"
SUMMARY_FILE = "training.json"
EVALUATION_COUNT = 15
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SELECTION_METRIC = "held_out_library"  # weights with the lowest loss on this part are kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path(".demo/corpus"), help="folder that `prepare` wrote"
    )
    parser.add_argument("--out", type=Path, default=Path(".demo/trained"), help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument(
        "--minutes", type=float, default=None, help="end earlier, with the schedule fitted to that"
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument(
        "--sequence", type=int, default=2048, help="tokens of a row, and positions of the model"
    )
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    for field, default in LlamaShape(0).to_dict().items():
        if field not in ("vocabulary", "context"):
            parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)


def run(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(arguments.device)
    facts = corpus.load_facts(arguments.data)
    sizes = {
        name: getattr(arguments, name)
        for name in LlamaShape(0).to_dict()
        if name not in ("vocabulary", "context")
    }
    model = LlamaForTraining(
        LlamaShape(facts.vocabulary, context=arguments.sequence, **sizes), arguments.dropout
    ).to(device)
    batches = BatchSampler(
        {name: corpus.load_tokens(arguments.data, name) for name in corpus.PART_SHARES},
        corpus.PART_SHARES,
        device,
        arguments.seed,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters on {_device_name(device)}", flush=True)
    _train(model, batches, facts, device, arguments)


def _train(
    model: LlamaForTraining,
    batches: BatchSampler,
    facts: corpus.CorpusFacts,
    device: torch.device,
    arguments: argparse.Namespace,
) -> None:
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"held_out_{part}" for part in corpus.HELD_OUT_PARTS]
    held_out = {name: corpus.load_tokens(arguments.data, name) for name in names}
    optimizer = _make_optimizer(model, device, arguments.rate, arguments.weight_decay)
    model.train()
    loss_of = _make_loss(model, device, arguments)
    best, evaluated, steps, began = float("inf"), 0, 0, time.monotonic()
    with ProgressBar("training") as progress, (folder / LOG_FILE).open("w") as log:
        for steps, done in _training_steps(arguments.steps, arguments.minutes):
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * learning_rate_factor(done)
            loss = _train_step(loss_of, model, batches, optimizer, arguments)
            progress.show_progress(done, f"step {steps}, best held-out {best:.4f} bits per byte")
            if done < 1.0 and done * EVALUATION_COUNT < evaluated + 1:
                continue
            evaluated = int(done * EVALUATION_COUNT)
            figures = {
                name: bits_per_byte(
                    sum_nats(model, tokens, device, arguments.sequence), facts.utf8_bytes[name]
                )
                for name, tokens in held_out.items()
            }
            seconds = round(time.monotonic() - began, 1)
            line = {"step": steps, "seconds": seconds, "loss": round(loss.item(), 4), **figures}
            log.write(json.dumps(line) + "\n")
            log.flush()
            if figures[SELECTION_METRIC] < best:
                best = figures[SELECTION_METRIC]
                checkpoint.save_checkpoint(folder / "best", model)
    checkpoint.save_checkpoint(folder / "last", model)
    _write_summary(folder, device, arguments, steps, time.monotonic() - began, best)


def _write_summary(
    folder: Path,
    device: torch.device,
    arguments: argparse.Namespace,
    steps: int,
    seconds: float,
    best: float,
) -> None:
    """Write and print what the training was; `best` is in bits per byte of held-out text."""
    summary = {
        "device": _device_name(device),
        "seconds": round(seconds, 1),
        "steps": steps,
        "tokens": steps * arguments.rows * arguments.sequence,
        "best_held_out_bits_per_byte": best,
        "torch": torch.__version__,
        "settings": {
            key: str(value)
            for key, value in vars(arguments).items()
            if key not in ("data", "out", "stage")
        },
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary), flush=True)


def _training_steps(steps: int, minutes: float | None) -> Iterator[tuple[int, float]]:
    """Yield the step number (from 1) and the share of the training done; the last share is 1."""
    began = time.monotonic()
    for step in range(1, steps + 1):
        elapsed = (time.monotonic() - began) / (60.0 * minutes) if minutes else 0.0
        done = min(1.0, max(step / steps, elapsed))
        yield step, done
        if done >= 1.0:
            return


def _train_step(
    loss_of: LossFunction,
    model: LlamaForTraining,
    batches: BatchSampler,
    optimizer: torch.optim.Optimizer,
    arguments: argparse.Namespace,
) -> torch.Tensor:
    loss = loss_of(*batches.sample_batch(arguments.rows, arguments.sequence))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _make_optimizer(
    model: LlamaForTraining, device: torch.device, peak: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return AdamW without weight decay of the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")


def _make_loss(
    model: LlamaForTraining, device: torch.device, arguments: argparse.Namespace
) -> LossFunction:
    """Return the mean loss of inputs and targets, compiled on a GPU where that works."""

    def plain(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast(device):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    if device.type != "cuda" or arguments.no_compile:
        return plain
    compiled: LossFunction = torch.compile(plain)
    probe = torch.zeros((arguments.rows, arguments.sequence), dtype=torch.long, device=device)
    try:
        compiled(probe, probe).backward()
    except (RuntimeError, ImportError, OSError) as error:
        print(
            f"training without torch.compile: {type(error).__name__}: {str(error)[:300]}",
            flush=True,
        )
        compiled = plain
    model.zero_grad(set_to_none=True)
    return compiled


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
