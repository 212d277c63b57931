"""GGUF version 3, the file format of llama.cpp: metadata, then tensors.

    "GGUF", version, number of tensors, number of metadata entries
    metadata       key, type, value; a value may be an array
    tensor infos   name, shape (fastest axis first), type, offset from the start of the data
    data           each tensor at a multiple of 32 bytes

All numbers are little-endian. A tensor is float32, float16 or `q8_0`: blocks of 32 numbers of a row, each with a
float16 scale d = max|x| / 127 and 32 int8 values round(x / d). That is 8.5 bits per number. Rows whose length is no
multiple of 32 stay float16. Vectors (norms, biases) stay float32, as llama.cpp has them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.core.files import atomic_file

Array = np.ndarray
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
Q8_BLOCK = 32  # numbers that share a scale
# Type codes of metadata values, by Python type; integers are uint32 unless they say otherwise.
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TENSOR_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # general.file_type
QUANTIZATION_VERSION = 2


class Int32s(NamedTuple):
    """An array of int32: token types."""

    values: list[int]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Array], dtype: str) -> None:
    """Write metadata and tensors; matrices in `dtype`, or in the nearest type that their shape allows."""
    kinds = {name: tensor_dtype(name, array, dtype) for name, array in tensors.items()}
    with atomic_file(path) as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(pack_string(key) + pack_value(value))
        offset = 0
        for name, array in tensors.items():
            shape = array.shape[::-1]
            file.write(pack_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            file.write(struct.pack("<IQ", TENSOR_TYPES[kinds[name]], offset))
            offset += aligned(num_bytes(array, kinds[name]))
        file.write(padding(file.tell()))
        for name, array in tensors.items():
            data = encode_tensor(array, kinds[name])
            file.write(data)
            file.write(padding(len(data)))


def tensor_dtype(name: str, array: Array, dtype: str) -> str:
    """Return the type of a tensor. Positions and relative biases are read as float32."""
    is_small = array.ndim < 2 or name.startswith(("position_embd", "token_types")) or "rel_b" in name
    if dtype == "f32" or is_small:
        return "f32"
    return "f16" if dtype == "q8_0" and array.shape[-1] % Q8_BLOCK else dtype


def num_bytes(array: Array, dtype: str) -> int:
    return array.size * 4 if dtype == "f32" else array.size * 2 if dtype == "f16" else array.size // Q8_BLOCK * 34


def encode_tensor(array: Array, dtype: str) -> bytes:
    if dtype == "q8_0":
        return quantize_q8_0(array)
    with np.errstate(over="ignore"):
        encoded = np.ascontiguousarray(array, "<f4" if dtype == "f32" else "<f2")
    if not np.isfinite(encoded).all():
        raise UserError(f"A weight is beyond the range of {dtype}. Export with --dtype f32.")
    return encoded.tobytes()


def quantize_q8_0(array: Array) -> bytes:
    """Return blocks of a float16 scale and 32 int8 values; halves are rounded away from zero, as in llama.cpp."""
    blocks_NK = np.ascontiguousarray(array, np.float32).reshape(-1, Q8_BLOCK)
    scale_N1 = np.abs(blocks_NK).max(1, keepdims=True) / np.float32(127)
    inverse_N1 = np.divide(1, scale_N1, out=np.zeros_like(scale_N1), where=scale_N1 != 0)
    scaled_NK = blocks_NK * inverse_N1
    rounded_NK = np.sign(scaled_NK) * np.floor(np.abs(scaled_NK) + np.float32(0.5))
    return np.concatenate([scale_N1.astype("<f2").view(np.int8), rounded_NK.astype(np.int8)], 1).tobytes()


# --- packing --------------------------------------------------------------------------------------------------------


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def padding(size: int) -> bytes:
    return bytes(aligned(size) - size)


def pack_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_value(value: Any) -> bytes:
    """Return the type and the value of a metadata entry."""
    if isinstance(value, Int32s):
        return struct.pack(f"<IIQ{len(value.values)}i", ARRAY, INT32, len(value.values), *value.values)
    if isinstance(value, list):
        (kind,) = {type_code(part) for part in value}
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(pack_parts(value))
    return struct.pack("<I", type_code(value)) + next(pack_parts([value]))


def pack_parts(values: list[Any]) -> Iterator[bytes]:
    forms = {UINT32: "<I", FLOAT32: "<f", BOOL: "<?"}
    for value in values:
        kind = type_code(value)
        yield pack_string(value) if kind == STRING else struct.pack(forms[kind], value)


def type_code(value: Any) -> int:
    return {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}[type(value)]
