"""The GPUs that plans are made for: what bounds a step on them, and what a compiler must know of them.

Memory, bandwidth and dense bf16 rates (float32 accumulation) are those of NVIDIA's data sheets: H200 SXM, HGX B200, and
RTX PRO 6000 Blackwell Workstation Edition. SMs, shared memory and clocks are those of the same chips in XLA's own
target descriptions. What one collective of a decoding step takes, some tens of kB over eight GPUs, is an assumption:

    NVLink  8 µs: XLA's one-shot kernel; a fused all-reduce of such sizes was measured at 10.9 µs on eight GB200
    PCIe   25 µs: NCCL, measured at 24 to 26 µs on eight RTX PRO 6000; kernels that push to their peers reach 8
"""

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    label: str  # as drivers call it
    memory: int  # bytes
    bandwidth: float  # bytes/s
    bf16: float  # FLOP/s, dense
    has_nvlink: bool
    collective_seconds: float  # assumed, see the module
    compute_capability: tuple[int, int]
    n_sms: int
    shared_memory: int  # bytes of an SM
    block_shared_memory: int  # bytes that one block may ask for
    sm_threads: int
    l2: int  # bytes
    clock_ghz: float

    def seconds(self, nbytes: float, flops: float, n_collectives: float) -> float:
        """A step's floor: reading or multiplying, whichever is longer, and what is waited for others."""
        return max(nbytes / self.bandwidth, flops / self.bf16) + n_collectives * self.collective_seconds


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="H200",
            label="NVIDIA H200",
            memory=141_000_000_000,
            bandwidth=4.8e12,
            bf16=989e12,
            has_nvlink=True,
            collective_seconds=8e-6,
            compute_capability=(9, 0),
            n_sms=132,
            shared_memory=233_472,
            block_shared_memory=232_448,
            sm_threads=2048,
            l2=52_428_800,
            clock_ghz=1.98,
        ),
        Gpu(
            name="RTX-PRO-6000",
            label="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            memory=96_000_000_000,
            bandwidth=1.792e12,
            bf16=503.8e12,
            has_nvlink=False,
            collective_seconds=25e-6,
            compute_capability=(12, 0),
            n_sms=188,
            shared_memory=102_400,
            block_shared_memory=101_376,
            sm_threads=1536,
            l2=134_217_728,
            clock_ghz=2.6,
        ),
        Gpu(
            name="B200",
            label="NVIDIA B200",
            memory=180_000_000_000,
            bandwidth=8e12,
            bf16=2250e12,
            has_nvlink=True,
            collective_seconds=8e-6,
            compute_capability=(10, 0),
            n_sms=148,
            shared_memory=233_472,
            block_shared_memory=232_448,
            sm_threads=2048,
            l2=132_644_864,
            clock_ghz=1.965,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """By its name, in any case. ConfigError: not among them."""
    for gpu in GPUS.values():
        if gpu.name.lower() == name.lower():
            return gpu
    raise ConfigError("gpu", name, "one of " + ", ".join(GPUS))
