"""What is noted of tensors."""

from __future__ import annotations

import torch

from onward.lowering.building.tensor_facts import TensorFact, fact_of


def test_facts_are_of_strided_tensors_and_of_tuples_of_them() -> None:
    one = torch.zeros(2, 3, dtype=torch.float64)
    assert fact_of(one) == TensorFact((2, 3), torch.float64)
    assert fact_of((one, one[0])) == (TensorFact((2, 3), torch.float64), TensorFact((3,), torch.float64))
    assert [fact_of(value) for value in (3, (), (one, 3), one.to_sparse())] == [None] * 4
    assert TensorFact((2, 3), torch.float64).nbytes == 48
