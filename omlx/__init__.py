"""omlx: a model server for MLX with a prefix cache in RAM and on SSD.

Importing this package imports no MLX; on Linux CPU it loads a fast BLAS, which only helps when it
is in place before MLX is imported (see `omlx.blas`).
"""

from omlx import blas

__version__ = "0.1.0"

blas.preload()
