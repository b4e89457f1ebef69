"""mx.array <-> buffers: the one place that knows how MLX's arrays look as bytes."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from omlx.storage.tensor_file import DTYPES as NUMPY_DTYPES
from omlx.storage.tensor_file import BlockBuffer, TensorSpec

Layers = list[tuple[mx.array, ...]]

# safetensors names of dtypes
DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}
DTYPE_NAMES: dict[mx.Dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def as_numpy(array: mx.array) -> npt.NDArray[Any]:
    """A view of the array's memory, no copy (bfloat16 as uint16); the array is evaluated.

    Writing into it changes the array. While the view lives, MLX copies the array when it is next
    updated in place, so drop it soon.
    """
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def empty_array(dtype: str, shape: Sequence[int]) -> mx.array:
    """An evaluated array of zeros that owns its memory, to be filled through `as_numpy`."""
    array = mx.zeros(shape, DTYPES[dtype])
    mx.eval(array)
    return array


def raw_bytes(array: mx.array) -> npt.NDArray[np.uint8]:
    """The memory of an evaluated, contiguous array as bytes (1-D), not copied; see `as_numpy`."""
    return as_numpy(array).reshape(-1).view(np.uint8)


def own_copy(array: mx.array | npt.NDArray[Any]) -> mx.array:
    """A copy that is evaluated, contiguous and shares no memory, of an array of any dtype that MLX has and any shape.

    Raises TypeError for others, such as complex128: they would lose bits.
    """
    if isinstance(array, mx.array):
        mx.eval(array)
        copy = _to_mlx(as_numpy(array), array.dtype)
    else:
        copy = _from_numpy(array)
    mx.eval(copy)
    return copy


def _from_numpy(array: npt.NDArray[Any]) -> mx.array:
    native = np.asarray(array)
    native = native.astype(native.dtype.newbyteorder("="), copy=False)
    name = next((name for name, dtype in NUMPY_DTYPES.items() if name != "BF16" and dtype == native.dtype), None)
    if name is None:
        raise TypeError(f"MLX has no arrays of dtype {native.dtype}")
    return _to_mlx(native, DTYPES[name])


def pack(layers: Iterable[Sequence[mx.array]]) -> BlockBuffer:
    """Copies one tuple of arrays a layer into one buffer; the arrays may be unevaluated and of any shape.

    Tensors are named "<layer>.<position in the tuple>".
    """
    named = [(f"{i}.{j}", array) for i, layer in enumerate(layers) for j, array in enumerate(layer)]
    arrays = [array for _, array in named]
    mx.eval(arrays)
    block = BlockBuffer.empty(tuple(TensorSpec(name, DTYPE_NAMES[a.dtype], tuple(a.shape)) for name, a in named))
    for index, array in enumerate(arrays):
        np.copyto(block.tensor(index), as_numpy(array))
    return block


def unpack(block: BlockBuffer) -> Layers:
    """The arrays again, evaluated and with memory of their own: one tuple for each first part of the tensors' names."""
    arrays = [_array(block, index) for index in range(len(block.specs))]
    mx.eval(arrays)
    names = (spec.name.rpartition(".")[0] for spec in block.specs)
    layers = groupby(zip(names, arrays, strict=True), key=lambda pair: pair[0])
    return [tuple(array for _, array in pairs) for _, pairs in layers]


def _array(block: BlockBuffer, index: int) -> mx.array:
    return _to_mlx(block.tensor(index), DTYPES[block.specs[index].dtype])


def _to_mlx(view: npt.NDArray[Any], dtype: mx.Dtype) -> mx.array:
    """A copy of `view`, which for bfloat16 is of uint16."""
    view = np.asarray(view, order="C")  # MLX takes no negative strides
    if dtype == mx.bfloat16:
        return mx.array(view).view(dtype)
    return mx.array(view, dtype)  # named, or float64 would become float32
