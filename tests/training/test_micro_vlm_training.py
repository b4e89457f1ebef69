"""The training itself, on a very small network: it learns, it ends with a model folder, and it can be resumed."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from tests.training.test_micro_vlm_network import TINY
from training.micro_vlm import train
from training.micro_vlm.evaluate import evaluate
from training.micro_vlm.train import Plan, Trainer, weights_digest

SHORT = Plan(picture_steps=60, pictures=4, easy_steps=4, full_steps=3, last_steps=2, pool=16, tokens=400, sizes=TINY)


@pytest.fixture(scope="module", autouse=True)
def small_tokenizer() -> object:
    """A tokenizer made from fewer conversations, which takes less time."""
    patch = pytest.MonkeyPatch()
    plain = train.train_tokenizer
    patch.setattr(train, "train_tokenizer", lambda: plain(200))
    yield
    patch.undo()


def weights(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model" / "model.safetensors"))


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return all(mx.array_equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.train(SHORT, folder)
    return folder


def test_a_run_ends_with_a_model_and_a_log(trained: Path) -> None:
    log = (trained / "train.log").read_text()
    assert f"sha256 {weights_digest(trained / 'model')}" in log
    assert repr(SHORT) in log
    stages = [line.split(" step")[0] for line in log.splitlines() if " step " in line]
    assert stages == ["pictures", "easy", "full", "last"]
    assert evaluate(trained / "model", 10).asked.total() >= 10


def test_the_encoder_learns(trained: Path, tmp_path: Path) -> None:
    """Some steps lower the loss, from what it is without learning."""
    (learned,) = re.findall(r"pictures step +60 loss ([\d.]+)", (trained / "train.log").read_text())
    idle = Trainer(SHORT._replace(picture_steps=10, rate=0.0, hidden_rate=0.0), tmp_path)
    idle.run()
    (chance,) = re.findall(r"pictures step +10 loss ([\d.]+)", (tmp_path / "train.log").read_text())
    assert float(learned) < 0.97 * float(chance)


@pytest.mark.parametrize("steps", [30, 60, 65])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(trained: Path, tmp_path: Path, steps: int) -> None:
    assert not Trainer(SHORT, tmp_path).run(steps)
    train.train(SHORT, tmp_path)
    assert "resumed at stage" in (tmp_path / "train.log").read_text()
    assert same(weights(trained), weights(tmp_path))
