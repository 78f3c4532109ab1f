"""What GPUs and their networks can do: data-sheet figures, and the share of them that training reaches."""

from __future__ import annotations

from dataclasses import dataclass

from penjing.core.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links. FLOP/s are dense bfloat16; bandwidths are bytes/s in one direction.

    Attributes:
        efficiency: share of `flops` that wide matrix products and what lies between them reach. Fitted to one published
            row a GPU (train/plan/published.py names it); the other rows there are predictions. B200 and L40S have no
            row there: theirs is assumed.
        node_link: between GPUs of a node, for each.
        network: between nodes, for each GPU.
        link_share: share of either that collectives reach.
        source: where the figures come from.
    """

    name: str
    flops: float
    efficiency: float
    memory: int
    memory_bandwidth: float
    node_link: float
    network: float
    link_share: float
    source: str


_DGX = "https://docs.nvidia.com/dgx"
_HARDWARE = {
    "a100": Hardware(
        "a100", 312e12, 0.68, 80 * GIB, 2.0e12, 300e9, 25e9, 0.8,
        f"data sheet of the A100 80 GB SXM: 312 TFLOP/s, NVLink 600 GB/s in all; {_DGX}/dgxa100-user-guide: 200 Gb/s",
    ),
    "h100": Hardware(
        "h100", 989e12, 0.56, 80 * GIB, 3.35e12, 450e9, 50e9, 0.8,
        f"data sheet of the H100 SXM: 989 TFLOP/s, NVLink 900 GB/s in all; {_DGX}/dgxh100-user-guide: 400 Gb/s",
    ),
    "h200": Hardware(
        "h200", 989e12, 0.72, 141 * 10**9, 4.8e12, 450e9, 50e9, 0.8,
        f"data sheet of the H200 SXM: 989 TFLOP/s, NVLink 900 GB/s in all; {_DGX}/dgxh200-user-guide: 400 Gb/s",
    ),
    "b200": Hardware(
        "b200", 2250e12, 0.56, 180 * 10**9, 8.0e12, 900e9, 50e9, 0.8,
        f"data sheet of the DGX B200: a GPU has 2250 TFLOP/s, 180 GB at 8 TB/s, NVLink 1800 GB/s in all; "
        f"{_DGX}/dgxb200-user-guide: 400 Gb/s; efficiency assumed to be the H100's",
    ),
    "l40s": Hardware(
        "l40s", 362e12, 0.45, 48 * 10**9, 0.864e12, 32e9, 25e9, 0.7,
        "data sheet of the L40S: 362 TFLOP/s, PCIe 4.0 ×16, no NVLink; network assumed 200 Gb/s",
    ),
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """The figures of a GPU.

    Raises:
        ConfigError: lists those that are known.
    """
    if name.lower() not in _HARDWARE:
        raise ConfigError(f"device {name!r} is unknown; choose one of {', '.join(_HARDWARE)}")
    return _HARDWARE[name.lower()]


def known_hardware() -> tuple[str, ...]:
    """The names that `hardware` knows."""
    return tuple(_HARDWARE)
