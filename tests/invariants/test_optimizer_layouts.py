"""Every optimizer follows one process in every kind of layout, and resumes in every bit, there and in another layout.

The optimizers that do not update element by element are those at risk: a rank has shards of the full weights. In 64
bits, since Lion takes signs and Muon rounds to bf16: the last bit of a gradient may decide how far an element moves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.invariants.cases import CASES, gpt2, in_float64
from tests.invariants.layouts import Layout, Result, assert_follows, tensor_difference, train
from tests.invariants.rank_pool import end_ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    # The gradient of the keys' bias is zero, and its sign that of the rounding.
    "Lion": {"optimizer_attributes": [{"lambda": 0.1}, {"weights": "*c_attn.bias", "learning_rate_factor": 0.0}]},
    "Muon": {"optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]},
    "torch.optim.RAdam": {"optimizer_attributes": [{"options": {"weight_decay": 0.1}}]},
    "AdamWScheduleFree": {"optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]},
    "Adafactor": {"optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]},
}
LAYOUTS = {
    "ZeRO 1": Layout(2, 1, 1, {"zero_stage": 1}),
    "ZeRO 2": Layout(2, 1, 1, {"zero_stage": 2}),
    "ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "ZeRO 3 in groups": Layout(4, 1, 1, {"zero_stage": 3, "zero_group_size": 2}),
    "replicas": Layout(2, 1, 1),
    "horizontal": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
}
OF_LOSSES, OF_WEIGHTS = 1e-6, 1e-6
"""Relative; losses are reported in fp32."""


def all_counted(samples: int) -> dict[str, np.ndarray]:
    """Weights of micro-batches that count unequal numbers of labels would be rounded to fp32."""
    data = CASES["gpt2"].data(samples)
    return {**data, "labels": np.maximum(data["labels"], 0)}


CASE = dataclasses.replace(CASES["gpt2"], model=lambda: in_float64(gpt2()), data=all_counted)
QUICK = {
    ("Muon", "ZeRO 2"), ("Muon", "horizontal"), ("Adafactor", "ZeRO 3"), ("Adafactor", "horizontal"),
    ("AdamWScheduleFree", "pipeline"), ("Lion", "ZeRO 1"), ("torch.optim.RAdam", "ZeRO 3"),
}  # fmt: skip
"""An optimizer and a layout each; the others are slow tests."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def run(name: str, layout: Layout, updates: int = 4, folder: Path | None = None) -> Result:
    sections: dict[str, Any] = {
        "optimizer": {"training_optimizer_name": name, **OPTIMIZERS[name]},
        "learning_rate": {"initial_lr": 1e-4 if name == "Lion" else 3e-3},
    }
    if folder is not None:
        sections["checkpoint"] = {"checkpoints_dir": str(folder / "checkpoints"), "max_num_checkpoints": 1}
    return train(
        CASE,
        layout,
        updates=updates,
        updates_of_data=4,
        accumulation=2,
        sections=sections,
        folder=None if folder is None else str(folder),
    )


@functools.cache
def one_process(name: str) -> Result:
    return run(name, Layout())


CASES_TO_RUN = [
    pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow, id=f"{name} {layout}")
    for layout in LAYOUTS
    for name in OPTIMIZERS
]


@pytest.mark.parametrize(("name", "layout"), CASES_TO_RUN)
def test_any_layout_follows_one_process(name: str, layout: str) -> None:
    result = run(name, LAYOUTS[layout])
    assert_follows(result, one_process(name), OF_LOSSES, OF_WEIGHTS)
    assert tensor_difference(result, one_process(name), ("slots/",)) < OF_WEIGHTS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """In one process; and what it saved resumes on replicas with ZeRO 3 to 1e-5."""
    whole = one_process(name)
    run(name, Layout(), 2, tmp_path)
    result = run(name, Layout(), 4, tmp_path)
    assert len(result.losses) == 2
    assert result.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(result.tensors[key], tensor) for key, tensor in whole.tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_any_layout_to_one_process(name: str, layout: str, tmp_path: Path) -> None:
    run(name, LAYOUTS[layout], 2, tmp_path)
    result = run(name, Layout(), 4, tmp_path)
    assert len(result.losses) == 2
    assert tensor_difference(result, one_process(name), ("weights/",)) < OF_WEIGHTS


# ------------------------------------------------------------------------------------------------- what is trained

CHOICES: dict[str, dict[str, Any]] = {
    "unfreeze": {
        "training": {
            "unfreeze": [
                {"after_updates": 1, "weights": "h.1.*"},
                {"after_updates": 2, "weights": ["w?e.weight", "h.0.*"]},
            ]
        }
    },
    "last block, decayed rates": {
        "training": {"train_last": 1},
        "optimizer": {"training_optimizer_name": "AdamW", "layer_decay": 0.5},
    },
}


def run_choice(choice: str, layout: Layout, updates: int = 4, folder: Path | None = None) -> Result:
    sections = dict(CHOICES[choice])
    if folder is not None:
        sections["checkpoint"] = {"checkpoints_dir": str(folder / "checkpoints"), "max_num_checkpoints": 1}
    where = None if folder is None else str(folder)
    options: dict[str, Any] = {"updates": updates, "updates_of_data": 4, "accumulation": 2}
    return train(CASES["gpt2"], layout, sections=sections, folder=where, **options)


@functools.cache
def choice_in_one_process(choice: str) -> Result:
    return run_choice(choice, Layout())


@pytest.mark.parametrize("layout", ["replicas", "ZeRO 3", "horizontal", "pipeline"])
@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_trained_is_the_same_in_every_layout(choice: str, layout: str) -> None:
    result, expected = run_choice(choice, LAYOUTS[layout]), choice_in_one_process(choice)
    assert_follows(result, expected, 1e-6, 1e-5)
    assert tensor_difference(result, expected, ("slots/step",)) == 0
    assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    assert not [message for message in result.messages if "no gradient" in message]


@pytest.mark.parametrize("saved", [1, 2])
def test_resumed_across_an_unfreezing_it_ends_with_the_same_bits(saved: int, tmp_path: Path) -> None:
    run_choice("unfreeze", Layout(), saved, tmp_path)
    result = run_choice("unfreeze", Layout(), 4, tmp_path)
    assert len(result.losses) == 4 - saved
    expected = choice_in_one_process("unfreeze").tensors
    assert all(torch.equal(result.tensors[name], tensor) for name, tensor in expected.items())
