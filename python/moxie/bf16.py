"""BF16 without a package for it: NumPy has no such type, so its 16 bits travel as uint16.

Moxie takes and returns arrays of either form: bits as uint16, or ml_dtypes.bfloat16 where ml_dtypes is installed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["from_bits", "to_bits"]


def to_bits(array: Any) -> NDArray[np.uint16]:
    """Rounds float32 values to BF16, to nearest with ties to even, as Moxie itself does; NaN stays NaN.

    Returns uint16 bits of the same shape.
    """
    values = np.ascontiguousarray(array, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bits(bits: Any) -> NDArray[np.float32]:
    """Exact float32 values of BF16 bits (uint16 or ml_dtypes.bfloat16)."""
    array = np.ascontiguousarray(bits).view(np.uint16)
    return (array.astype(np.uint32) << 16).view(np.float32)
