"""Datasheets of GPUs: what the vendor promises, which models and prices go by where nothing was measured.

Sources are NVIDIA's datasheets of the H100 Tensor Core GPU, the H200 Tensor Core GPU and the A100 Tensor Core GPU: memory
bandwidth, and the rate of bf16 on tensor cores without sparsity, which is half of what the first two print.
"""

from __future__ import annotations

from dataclasses import replace

from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks

DATASHEETS = {
    "H100 80GB HBM3": H100_SXM_DATASHEET,
    "H100 PCIe": Peaks(2.0e12, 756e12, "H100 PCIe datasheet"),
    "H200": Peaks(4.8e12, 989e12, "H200 datasheet"),
    "A100-SXM4-80GB": Peaks(2.039e12, 312e12, "A100 SXM 80 GB datasheet"),
    "A100-SXM4-40GB": Peaks(1.555e12, 312e12, "A100 SXM 40 GB datasheet"),
    "A100 80GB PCIe": Peaks(1.935e12, 312e12, "A100 PCIe 80 GB datasheet"),
    "A100-PCIE-40GB": Peaks(1.555e12, 312e12, "A100 PCIe 40 GB datasheet"),
}
"""By the name that `torch.cuda.get_device_name` gives, without the vendor's."""


def datasheet_of(gpu: str) -> Peaks | None:
    """The figures of the GPU that torch calls `gpu`; None for one whose datasheet is not known here."""
    return DATASHEETS.get(gpu.removeprefix("NVIDIA "))


def promised(gpu: str | None) -> Peaks:
    """The figures to model with: those of the GPU that torch calls `gpu`, else of an H100, and `source` says whose they are.

    None stands for no GPU at all.
    """
    if gpu is None:
        return H100_SXM_DATASHEET
    example = replace(H100_SXM_DATASHEET, source=f"{H100_SXM_DATASHEET.source} (unknown device: {gpu})")
    return datasheet_of(gpu) or example
