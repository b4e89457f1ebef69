"""micro-vlm as a model folder, as transformers and mlx-vlm lay one out."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models.idefics3 import Model
from tokenizers import Tokenizer

from training.micro_vlm.network import SIDE
from training.micro_vlm.tokenizer import END, IMAGE_TOKENS, PAD, SPECIAL, START, save_tokenizer

SHIPPED = Path(__file__).parents[2] / "omlx" / "data" / "micro-vlm"

PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": SIDE},
}


def save_model(model: Model, settings: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files of the model folder; the weights as float16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.float16) for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    save_tokenizer(tokenizer, folder)
    ends = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": START}
    _write(folder / "config.json", settings)
    _write(folder / "generation_config.json", {name: SPECIAL.index(token) for name, token in ends.items()})
    _write(folder / "preprocessor_config.json", PREPROCESSOR)
    _write(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
