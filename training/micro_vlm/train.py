"""Train micro-vlm: `python -m training.micro_vlm.train`. One command, a fixed seed, about 40 minutes on two cores.

Four stages: the encoder alone (see `labels`), easy conversations, all of them, those that are hard. A checkpoint is
written every two minutes, and the same command goes on from there. The result is a model folder below build/;
`--ship` puts it, with the log, where the repository keeps them.
"""

import argparse
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import omlx  # before MLX, for the fast BLAS  # noqa: F401  # isort: skip
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models.idefics3 import Model
from tokenizers import Tokenizer

from training.micro_vlm import labels, network
from training.micro_vlm.batches import batches
from training.micro_vlm.conversations import Conversation, conversation, first_steps, last_steps
from training.micro_vlm.evaluate import evaluate
from training.micro_vlm.folder import SHIPPED, save_model
from training.micro_vlm.network import Batch, Sizes
from training.micro_vlm.tokenizer import train_tokenizer

LOG = Path(__file__).with_name("train.log")
RUN = Path("build/micro-vlm")  # checkpoints and the log of a run
_SAVE_EVERY_S = 120


class Plan(NamedTuple):
    """How much is done. The defaults are the run that made the shipped weights."""

    seed: int = 6
    picture_steps: int = 2800
    pictures: int = 64  # in a step of the first stage
    easy_steps: int = 250
    full_steps: int = 1500
    last_steps: int = 480
    pool: int = 1024  # conversations that are made, and grouped by length, together
    tokens: int = 2304  # in a step of the other stages, about
    rate: float = 2e-3  # of AdamW at its highest
    hidden_rate: float = 0.02  # of Muon
    sizes: Sizes = Sizes()


@dataclass
class Progress:
    """Where a run stands. `spent` are seconds of wall time, over all resumptions."""

    stage: int = 0
    step: int = 0
    spent: float = 0.0
    cpu: float = 0.0


class Trainer:
    """One run: the model, where it stands, its checkpoint and its log."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self._folder = plan, folder
        folder.mkdir(parents=True, exist_ok=True)
        mx.random.seed(plan.seed)
        self.model = network.build(network.config(plan.sizes))
        self._encoder = labels.Encoder(self.model, plan.sizes.width)
        self._at = Progress()
        self._began, self._began_cpu = time.perf_counter(), time.process_time()
        self._left: int | None = None
        self._resumed: dict[str, mx.array] = {}
        self.tokenizer = self._tokenizer()

    def _tokenizer(self) -> Tokenizer:
        file = self._folder / "tokenizer.json"
        if not file.exists():
            train_tokenizer().save(str(file))
        return Tokenizer.from_file(str(file))

    def log(self, text: str) -> None:
        """Say something, and keep it in the log."""
        print(text, flush=True)
        with (self._folder / "train.log").open("a") as file:
            file.write(text + "\n")

    def seconds(self) -> tuple[float, float]:
        """Wall and processor time of the run so far."""
        wall, cpu = time.perf_counter() - self._began, time.process_time() - self._began_cpu
        return self._at.spent + wall, self._at.cpu + cpu

    def run(self, most_steps: int | None = None) -> bool:
        """All stages, from the checkpoint on if there is one; or `most_steps` of them. Whether all is done now."""
        self._left = most_steps
        self._resume()
        plan = self.plan
        for stage in range(self._at.stage, 4):
            self._at.stage = stage
            if stage:
                self.model.vision_model.freeze()
                self.model.connector.freeze()
            if stage == 0:
                self._train(self._encoder, labels.loss, self._pictures(), plan.picture_steps, labels.accuracies)
            else:
                make, steps = {
                    1: (first_steps, plan.easy_steps),
                    2: (conversation, plan.full_steps),
                    3: (last_steps, plan.last_steps),
                }[stage]
                self._train(self.model, network.loss, self._conversations(make, steps), steps, _accuracy)
            if self._left == 0:
                return False
            self._at.step = 0
        return True

    def _pictures(self) -> Iterator[labels.Labelled]:
        for step in range(self._at.step, self.plan.picture_steps):
            yield labels.labelled(self.plan.seed, step, self.plan.pictures)

    def _conversations(self, make: Callable[[Random], Conversation], steps: int) -> Iterator[Batch]:
        """The batches of this stage from the present step on. Pools differ in size, so they are counted through."""
        plan, at, pool = self.plan, 0, 0
        while at < steps:
            seed = f"{plan.seed} {self._at.stage} {pool}"
            made = batches(self.tokenizer, make, seed, plan.pool, plan.tokens)
            yield from made[max(0, self._at.step - at) :] if at + len(made) > self._at.step else ()
            at, pool = at + len(made), pool + 1

    def _train(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], mx.array],
        data: Iterator[Any],
        steps: int,
        measure: Callable[[Any, Any], dict[str, float]],
    ) -> None:
        optimizer = _optimizer(self.plan, steps, 0.5 if self._at.stage == 3 else 1.0)
        optimizer.init(module.trainable_parameters())
        if self._resumed:
            optimizer.state = tree_unflatten(list(self._resumed.items()))
            self._resumed = {}
        derive = nn.value_and_grad(module, loss)
        losses: list[float] = []
        saved = time.perf_counter()
        for batch in data:
            if self._at.step >= steps:
                break
            value, gradients = derive(module, batch)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            optimizer.update(module, gradients)
            mx.eval(value, module.parameters(), optimizer.state)
            losses.append(value.item())
            self._at.step += 1
            if self._at.step % 100 == 0 or self._at.step == steps:
                self._report(np.mean(losses[-100:]), measure(module, batch))
            if self._left is not None:
                self._left -= 1
            if time.perf_counter() - saved > _SAVE_EVERY_S or self._left == 0:
                self._save(optimizer)
                saved = time.perf_counter()
            if self._left == 0:
                return

    def _report(self, loss: Any, measured: dict[str, float]) -> None:
        wall, cpu = self.seconds()
        shares = " ".join(f"{name} {share:.3f}" for name, share in measured.items())
        name = ("pictures", "easy", "full", "last")[self._at.stage]
        self.log(f"{name} step {self._at.step:5d} loss {loss:.4f} {shares} wall {wall:.0f} s cpu {cpu:.0f} s")

    def _save(self, optimizer: optim.Optimizer) -> None:
        wall, cpu = self.seconds()
        model = {f"model.{name}": value for name, value in tree_flatten(self.model.parameters())}
        heads = {f"heads.{name}": value for name, value in tree_flatten(self._encoder.parameters()["heads"])}
        state = {f"state.{name}": value for name, value in tree_flatten(optimizer.state)}
        about = {"stage": str(self._at.stage), "step": str(self._at.step), "wall": str(wall), "cpu": str(cpu)}
        new = self._folder / "new.safetensors"
        mx.save_safetensors(str(new), model | heads | state, about)
        new.rename(self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint.safetensors"

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        arrays, about = mx.load(str(self._checkpoint), return_metadata=True)
        self._at = Progress(int(about["stage"]), int(about["step"]), float(about["wall"]), float(about["cpu"]))
        self.model.load_weights(list(_below(arrays, "model.").items()))
        self._encoder.update({"heads": tree_unflatten(list(_below(arrays, "heads.").items()))})
        self._resumed = _below(arrays, "state.")
        self.log(f"resumed at stage {self._at.stage} step {self._at.step}")


def _below(arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _optimizer(plan: Plan, steps: int, share: float) -> optim.Optimizer:
    """Muon for the layers' matrices, AdamW for the rest, at a share of the plan's rates."""
    adam = optim.AdamW(_rate(share * plan.rate, steps), betas=[0.9, 0.98], weight_decay=0.02)
    muon = optim.Muon(_rate(share * plan.hidden_rate, steps), weight_decay=0.0)
    return optim.MultiOptimizer([muon, adam], [lambda name, weight: ".layers." in name and weight.ndim == 2])


def _rate(peak: float, steps: int) -> Callable[[mx.array], mx.array]:
    """Up to `peak` in the first steps, then down to a hundredth along a cosine."""
    warm = min(150, max(1, steps // 10))
    rise = optim.linear_schedule(peak / 50, peak, warm)
    return optim.join_schedules([rise, optim.cosine_decay(peak, max(1, steps - warm), peak / 100)], [warm])


def _accuracy(model: Model, batch: Batch) -> dict[str, float]:
    right = network.answer_logits(model, batch).argmax(axis=1) == batch.answers
    return {"tokens": right.mean().item()}


def train(plan: Plan, folder: Path) -> Path:
    """A whole run, or the rest of one: the model folder, its digest in the log."""
    trainer = Trainer(plan, folder)
    trainer.log(f"{plan}\n{_machine()}")
    trainer.run()
    made = folder / "model"
    save_model(trainer.model, network.config(plan.sizes), trainer.tokenizer, made)
    wall, cpu = trainer.seconds()
    trainer.log(f"trained in {wall:.0f} s, {cpu:.0f} s of processor time")
    trainer.log(f"model.safetensors sha256 {weights_digest(made)}")
    return made


def weights_digest(folder: Path) -> str:
    """sha256 of a model folder's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _machine() -> str:
    packages = ("mlx", "mlx-vlm", "numpy", "pillow", "tokenizers")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return f"{system}, Python {platform.python_version()}, {versions}"


def main() -> None:
    """The run that made the shipped weights, if no flag says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RUN, help="checkpoint, log and model (default: %(default)s)")
    parser.add_argument("--ship", action="store_true", help="replace the shipped weights and log")
    arguments = parser.parse_args()
    made = train(Plan(), arguments.folder)
    log = arguments.folder / "train.log"
    with log.open("a") as file:
        print(*evaluate(made).lines(), sep="\n", file=file)
    print(log.read_text())
    if arguments.ship:
        shutil.copytree(made, SHIPPED, dirs_exist_ok=True)
        shutil.copyfile(log, LOG)


if __name__ == "__main__":
    main()
