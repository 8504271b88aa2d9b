"""Datasheets of GPUs: what the vendor promises, which models and prices go by where nothing was measured.

Sources, all NVIDIA's, dense rates (where a sheet prints those with sparsity, half of them):

    A100    "NVIDIA A100 Tensor Core GPU" datasheet: bf16 312, TF32 156, FP32 19.5, FP64 9.7 TFLOP/s; 80 GB SXM 2,039 GB/s
    H100    "NVIDIA H100 Tensor Core GPU" datasheet: SXM5 bf16 1,979 and TF32 989 with sparsity, FP32 67, FP64 34; 3.35 TB/s;
            PCIe bf16 1,513 and TF32 756 with sparsity, FP32 51, FP64 26; 2 TB/s
    H200    "NVIDIA H200 Tensor Core GPU" datasheet: as H100 SXM; 4.8 TB/s
    L4      "NVIDIA L4 Tensor Core GPU" datasheet: bf16 242 and TF32 120 with sparsity, FP32 30.3; 300 GB/s; FP64 is 1/64 of
            FP32 ("NVIDIA Ada GPU Architecture" whitepaper)
    4090    "NVIDIA Ada GPU Architecture" whitepaper, appendix A: bf16 with FP32 accumulate 165.2, TF32 82.6, FP32 82.6, FP64
            1.29; 1,008 GB/s
    B200    "NVIDIA HGX B200" datasheet, an eighth of eight GPUs: bf16 36 PFLOP/s and TF32 18 with sparsity, FP32 600 TFLOP/s,
            FP64 296 TFLOP/s; 8 TB/s a GPU
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tracefuse.optimizers.costs.cost import Peaks


@dataclass(frozen=True)
class DataSheet:
    """One GPU: memory in bytes per second, matmuls in FLOP/s by precision, dense. `tf32` are float32 matmuls on tensor cores,
    `fp32` those without, `memory_bytes` is how much memory it has. `name` is what `source` calls it."""

    name: str
    bytes_per_s: float
    bf16: float
    tf32: float
    fp32: float
    fp64: float
    memory_bytes: float

    @property
    def source(self) -> str:
        return f"{self.name} datasheet"

    def peaks(self, tf32: bool, convolutions: bool = True) -> Peaks:
        """What a roofline takes; with `tf32` the tensor cores multiply float32, as a program may have allowed, and with
        `convolutions` they convolve it, as torch allows by default."""
        rates = ((torch.float32, self.tf32 if tf32 else self.fp32), (torch.float64, self.fp64))
        halves = ((torch.bfloat16, self.bf16), (torch.float16, self.bf16))
        convolved = self.tf32 if convolutions else self.fp32
        return Peaks(self.bytes_per_s, self.bf16, self.source, halves + rates, convolved, convolutions)


TARGETS = {
    "A100": DataSheet("A100 SXM 80 GB", 2.039e12, 312e12, 156e12, 19.5e12, 9.7e12, 80e9),
    "H100": DataSheet("H100 SXM", 3.35e12, 989e12, 494.7e12, 67e12, 34e12, 80e9),
    "H200": DataSheet("H200", 4.8e12, 989e12, 494.7e12, 67e12, 34e12, 141e9),
    "L4": DataSheet("L4", 0.3e12, 121e12, 60e12, 30.3e12, 30.3e12 / 64, 24e9),
    "RTX 4090": DataSheet("RTX 4090", 1.008e12, 165.2e12, 82.6e12, 82.6e12, 1.29e12, 24e9),
    "B200": DataSheet("B200", 8e12, 2250e12, 1125e12, 75e12, 37e12, 180e9),
}
"""The GPUs that everything can be priced for, by the name that `tracefuse.target` and `--target` take."""

_OTHERS = (
    DataSheet("H100 PCIe", 2.0e12, 756e12, 378e12, 51e12, 26e12, 80e9),
    replace(TARGETS["A100"], name="A100 SXM 40 GB", bytes_per_s=1.555e12, memory_bytes=40e9),
    replace(TARGETS["A100"], name="A100 PCIe 80 GB", bytes_per_s=1.935e12),
    replace(TARGETS["A100"], name="A100 PCIe 40 GB", bytes_per_s=1.555e12, memory_bytes=40e9),
)

DATASHEETS = {
    "H100 80GB HBM3": TARGETS["H100"],
    "H100 PCIe": _OTHERS[0],
    "H200": TARGETS["H200"],
    "A100-SXM4-80GB": TARGETS["A100"],
    "A100-SXM4-40GB": _OTHERS[1],
    "A100 80GB PCIe": _OTHERS[2],
    "A100-PCIE-40GB": _OTHERS[3],
    "L4": TARGETS["L4"],
    "GeForce RTX 4090": TARGETS["RTX 4090"],
    "B200": TARGETS["B200"],
}
"""By the name that `torch.cuda.get_device_name` gives, without the vendor's."""


def sheet_of(gpu: str) -> DataSheet | None:
    """The sheet of the GPU that torch calls `gpu`; None for one whose sheet is not known here."""
    return DATASHEETS.get(gpu.removeprefix("NVIDIA "))


def datasheet_of(gpu: str, tf32: bool = False, convolutions: bool = True) -> Peaks | None:
    """The figures of the GPU that torch calls `gpu`; None for one whose datasheet is not known here."""
    found = sheet_of(gpu)
    return None if found is None else found.peaks(tf32, convolutions)


def promised(gpu: str | None, tf32: bool = False, convolutions: bool = True) -> Peaks:
    """The figures to model with: those of the GPU that torch calls `gpu`, else of an H100, and `source` says whose they are.

    None stands for no GPU at all: an H100 as an example, of the same rates as the one that is chosen by its name.
    """
    example = TARGETS["H100"].peaks(tf32, convolutions)
    if gpu is None:
        return example
    unknown = replace(example, source=f"{example.source} (unknown device: {gpu})")
    return datasheet_of(gpu, tf32, convolutions) or unknown
