"""Makes `int4.npz` with compressed-tensors. From the repository root: `python -m tests.golden.make_int4_golden`.

Needs torch and compressed-tensors (README.md has the versions). Scales follow the library's own minmax rule, bf16
max|w| / 7.5 over 32 inputs; codes, packing and dequantisation are those of its `pack-quantized` compressor.
"""

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors.pack_quantized import (  # pyright: ignore[reportMissingImports]
    PackedQuantizationCompressor,
    pack_to_int32,
    unpack_from_int32,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]

from tests.golden import HERE
from tests.golden.weights import random_bits, round_bf16, uniform

GROUP = 32

# One group whose codes show nibble order, offset, round-half-even and the clamp at -8.
WORKED_EXAMPLE = [
    *(1.875, -1.875, 0.0, 0.25, -0.25, 0.6015625, 0.6484375, -0.875),
    *(0.875, 0.12255859375, 0.125, 0.375, 0.625, -0.125, -0.375, -0.625),
    *(1.0, 1.25, 1.5, 1.75, -1.0, -1.25, -1.5, -1.75),
    *(0.0250244140625, -0.0250244140625, 1.8515625, -1.8515625, 1.625, -1.625, 1.375, -1.375),
]


def matrices() -> dict[str, np.ndarray]:
    """float32 [out, in] matrices, exact in bf16."""
    edge = uniform("int4/edge", (8, 96)) * np.float32(0.05)
    edge[0, :32] = 0  # a group of zeros: the library stores the dtype's eps as its scale
    edge[1, 32:64] = -np.abs(edge[1, 32:64])  # one sign only
    edge[2, 70] = 6.5  # an outlier flattens its group
    edge[3] *= np.float32(2.0**-100)  # tiny, but normal in bf16
    edge[4] *= np.float32(2.0**60)  # huge
    edge[5, 64:] = edge[5, 64]  # constant group
    return {
        "worked": np.array([WORKED_EXAMPLE], np.float32),
        "uniform": round_bf16(uniform("int4/uniform", (64, 256))),
        "tall": round_bf16(uniform("int4/tall", (40, 32)) * uniform("int4/tall/rows", (40, 1))),
        "edge": round_bf16(edge),
    }


def bits(t: torch.Tensor) -> np.ndarray:
    """bf16 tensor as its uint16 bit patterns: NumPy has no bf16."""
    return t.contiguous().view(torch.int16).numpy().view(np.uint16)


def quantise(matrix: np.ndarray) -> dict[str, np.ndarray]:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = torch.from_numpy(matrix).to(torch.bfloat16)
    groups = w.reshape(w.shape[0], -1, GROUP)
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    packed = PackedQuantizationCompressor.compress(
        {"weight": w, "weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}, scheme
    )
    back = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
    codes = unpack_from_int32(packed["weight_packed"], 4, w.shape)
    return {
        "weight": bits(w),
        "packed": packed["weight_packed"].numpy(),
        "scale": bits(packed["weight_scale"]),
        "shape": packed["weight_shape"].numpy(),
        "codes": codes.numpy(),
        "dequantised": bits(back),
    }


def pack_only(name: str, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Codes packed without scales: the library packs any width, but quantises in groups only whole ones."""
    count = shape[0] * shape[1]
    codes = ((random_bits(name, count) >> np.uint64(60)).astype(np.int8) - np.int8(8)).reshape(shape)
    packed = pack_to_int32(torch.from_numpy(codes), 4)
    return {"codes": codes, "packed": packed.numpy(), "shape": np.array(shape, np.int64)}


def main() -> None:
    cases = {name: quantise(m) for name, m in matrices().items()}
    cases |= {"ragged": pack_only("int4/ragged", (3, 10)), "narrow": pack_only("int4/narrow", (5, 3))}
    arrays: dict[str, np.ndarray] = {f"{case}/{k}": v for case, fields in cases.items() for k, v in fields.items()}
    np.savez_compressed(HERE / "int4.npz", allow_pickle=False, **arrays)
    for case, fields in cases.items():
        print(case, {k: (v.dtype.name, v.shape) for k, v in fields.items()}, "lowest code", fields["codes"].min())
    print((HERE / "int4.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
