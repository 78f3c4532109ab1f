"""The cases that a GPU is measured with run, in small, on any machine; without a GPU their rows say why."""

import pytest
import torch
from lib.kernels_gpu_ops import cases, op_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_every_case_runs_and_its_row_has_a_reason() -> None:
    names = []
    for case in cases("cpu", small=True):
        case.run()
        if case.peer is not None:
            case.peer()
        assert case.work > 0
        names.append(case.name)
    assert len(set(names)) == len(names)
    rows = op_rows()
    assert [row.metric for row in rows] == names
    assert all(row.value is None and row.reason for row in rows)
