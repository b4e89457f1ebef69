"""mx.array <-> buffers: the one place that knows how MLX's arrays look as bytes."""

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)  # arrays cannot be compared
class _Lent:
    """What was handed out; `ours` once `_own` has seen to it, until it is handed out again."""

    key: Hashable
    size: int
    arrays: list[mx.array]
    ours: bool = False

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class ArrayPool:
    """Arrays whose memory is used again when nobody needs them any more; for one thread, but for `clear`.

    New memory costs more than what is copied into it: the system clears every page, and then MLX does.
    The pool remembers what it handed out and looks whether it alone still holds that, so nobody has to
    give anything back. It remembers at most `max_bytes`, the last ones: so much may lie idle.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lent: list[_Lent] = []  # oldest first

    def take(self, key: Hashable, size: int, make: Callable[[int], list[mx.array]]) -> list[mx.array]:
        """Evaluated arrays as `make` makes them for `size` or up to a quarter more, with arbitrary content.

        Their memory belongs to the caller alone. `key` names what `make` makes.
        """
        for lent in reversed(self._lent):  # what was used last may be in the processor's cache still
            if lent.key == key and size <= lent.size <= size + size // 4 and _is_idle(lent):
                _own(lent)
                lent.ours = False
                break
        else:
            lent = _Lent(key, _roomy(size), make(_roomy(size)))
        self._remember(lent)
        return list(lent.arrays)

    def give(self, key: Hashable, arrays: list[mx.array]) -> None:
        """Takes over evaluated arrays that own their memory, to be handed out as of size 1 once they are idle."""
        known = next((lent for lent in self._lent if any(array is arrays[0] for array in lent.arrays)), None)
        self._remember(known or _Lent(key, 1, arrays))

    def settle(self) -> None:
        """Does now what would hold up the next `take`, for arrays that are idle already."""
        for lent in self._lent:
            if _is_idle(lent):
                _own(lent)

    def _remember(self, lent: _Lent) -> None:
        kept, room = [], self.max_bytes
        # `clear` may come between: it sets another list, and nothing is taken out of this one.
        for known in (lent, *(other for other in reversed(self._lent) if other is not lent)):
            room -= known.nbytes
            if room < 0:
                break
            kept.append(known)
        self._lent = kept[::-1]

    def clear(self) -> None:
        """Lets go of what lies idle. Safe in any thread."""
        self._lent = []


def _is_idle(lent: _Lent) -> bool:
    return lent.ours or _holders(lent.arrays) == _ALONE


def _holders(arrays: list[mx.array]) -> int:
    """The largest number of Python references to one of the arrays, those of this function included."""
    return max(sys.getrefcount(array) for array in arrays)


_ALONE = _holders([mx.array(0)])  # what it is for arrays that nothing but one list holds


def _own(lent: _Lent) -> None:
    """Makes sure that nothing else uses the memory of idle arrays, such as a slice or what is still to be computed.

    An update is done in place then; else MLX makes a copy, and the copy is ours. It stays so: nobody can get at them.
    """
    if not lent.ours:
        zeros = {array.dtype: mx.zeros(1, array.dtype) for array in lent.arrays}
        for array in lent.arrays:
            array[(slice(0, 1),) * array.ndim] = zeros[array.dtype]
        mx.eval(lent.arrays)
        lent.ours = True


def _roomy(size: int) -> int:
    """`size` or up to an eighth more: what grows bit by bit, as a conversation does, can use the same memory again."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def raw_bytes(array: mx.array) -> npt.NDArray[np.uint8]:
    """The memory of an evaluated array as bytes (1-D), not copied; see `as_numpy`.

    Raises BufferError unless the array is contiguous.
    """
    return np.frombuffer(array, np.uint8) if array.size else np.empty(0, np.uint8)


def contiguous(array: mx.array) -> mx.array:
    """The evaluated array with contiguous memory: itself, or a copy."""
    made = mx.contiguous(array)
    mx.eval(made)
    return made


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
