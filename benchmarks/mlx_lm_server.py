"""`mlx_lm.server` under the conditions omlx serves under: same BLAS, no run-time compilation, float32 weights.

    python benchmarks/mlx_lm_server.py --model FOLDER [any option of mlx_lm.server]

Half-precision and quantised kernels are very slow on CPU, so a dequantised float32 copy of the folder is
made once in the user's cache folder and served from there.
"""

# isort: off
import omlx  # first: it loads the BLAS that MLX then finds

import hashlib
import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm import server
from mlx_lm.utils import dequantize_model, load, save_config, save_model
# isort: on

assert omlx.__version__, "imported for its effect"


def main() -> None:
    """Replace the value of --model by its float32 copy and start the server."""
    at = sys.argv.index("--model") + 1
    sys.argv[at] = str(float32_copy(Path(sys.argv[at]).resolve()))
    server.main()


def float32_copy(source: Path) -> Path:
    """A folder with the same model in float32, made now unless it is there. `source` is an MLX model folder."""
    target = _copies() / f"{source.name}-float32-{_stamp(source)}"
    if target.is_dir():
        return target
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    model, _, config = load(str(source), return_config=True)
    # Scales and biases first, so that the products are float32 as well.
    model.set_dtype(mx.float32)
    save_model(partial, dequantize_model(model))
    left_out = ("quantization", "quantization_config")
    plain = {key: value for key, value in config.items() if key not in left_out}
    save_config(plain | {"torch_dtype": "float32"}, config_path=partial / "config.json")
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(("model", "config.json")):
            shutil.copy(path, partial)
    partial.rename(target)
    return target


def _copies() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omlx-benchmarks"


def _stamp(source: Path) -> str:
    """Changes when a file of the folder is replaced."""
    facts = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir())
    return hashlib.sha256(repr((str(source), facts)).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
