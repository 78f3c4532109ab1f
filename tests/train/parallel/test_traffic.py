"""Communication read from profiles: made-up traces with known answers; a real one is in test_run.py."""

from __future__ import annotations

from typing import Any

import pytest

from penjing.train.parallel.traffic import traffic_of


def event(name: str, start: float, end: float, kind: str = "cpu_op", **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start, "args": arguments}


def gloo(name: str, start: float, end: float, values: int, kind: str = "float") -> dict[str, Any]:
    arguments = {"Input Dims": [[values]], "Input type": [kind]}
    return event(f"gloo:{name}", start, end, "user_annotation", **arguments)


def test_the_share_beside_arithmetic_is_a_measure_of_intervals():
    traffic = traffic_of(
        [
            gloo("all_reduce", 10, 20, 100_000),
            gloo("all_reduce", 15, 30, 50_000),  # together 10 … 30
            gloo("all_gather", 100, 200, 100_000),  # no reduction
            gloo("all_reduce", 300, 400, 3),  # the loop's own
            event("aten::mm", 0, 12),
            event("aten::mul", 11, 14),  # 10 … 14 is 4 of 20
            event("aten::add", 25, 27),  # and 2
            event("c10d::allreduce_", 14, 30),  # waiting is no arithmetic
            {"ph": "i", "name": "aten::instant", "ts": 28},
        ]
    )
    assert traffic.overlap == pytest.approx(6 / 20)
    assert [(one.name, one.size) for one in traffic.collectives] == [
        ("all_reduce", 400_000), ("all_reduce", 200_000), ("all_gather", 400_000),
    ]  # fmt: skip
    assert traffic.bandwidth(4) == pytest.approx(1.5 * 600_000 / 25e-6)
    assert traffic.lines(2)[1].startswith("all_reduce: 1 a step, 0.29 MiB")


def test_kernels_count_where_there_are_any():
    message = {"Collective name": "_reduce_scatter_base", "In msg nelems": 8192, "dtype": "BFloat16"}
    traffic = traffic_of(
        [
            event("ncclDevKernel_ReduceScatter_Sum", 0, 10, "kernel", **message),
            event("sm90_gemm", 5, 20, "kernel"),
            event("aten::mm", 0, 10),
        ]
    )
    assert traffic.overlap == pytest.approx(0.5)
    assert traffic.collectives[0].size == 16384


def test_nothing_exchanged_is_no_overlap():
    assert traffic_of([event("aten::mm", 0, 1)]).overlap is None
    assert traffic_of([]).bandwidth(2) is None
