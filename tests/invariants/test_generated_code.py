"""What torch's compiler makes of entire runs for an H100, on a machine without one: Triton code, PTX and machine code.

The segments of runs on the fake GPU are compiled for forward and backward passes (`tests/fake_gpu/generated.py`).
Nothing is launched: this says what is fused, and that it compiles, not how fast it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_gpu.processes import COMPILER, ask, compile_hooks

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has hooks of its own"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="needs triton, which torch for CPUs does not bring: pip install --no-deps triton==3.7.1 (200 MB)",
    ),
]

GPT2_LAYERS = (
    "LayerNormalization to Add (57): 10, addmm 12, scaled_dot_product_flash_attention 3 | "
    "47, mm 24, scaled_dot_product_flash_attention_backward 3"
)
GPT2_LOSS = "LayerNormalization to LinearCrossEntropy (3): 3, mm 1 | 5, mm 2"
BERT_LAYERS = (
    "Linear to LayerNormalization (60): 9, addmm 18, scaled_dot_product_flash_attention 3 | "
    "55, mm 36, scaled_dot_product_flash_attention_backward 3"
)
BERT_HEAD = "Linear to LayerNormalization (3): 1, addmm 1 | 6, mm 2"
LLAMA_LAYERS = (
    "RMSNormalization to Add (90): 19, mm 21, scaled_dot_product_flash_attention 3 | "
    "29, mm 42, scaled_dot_product_flash_attention_backward 3"
)
RESNET = "Conv to SoftmaxCrossEntropyLoss (30): 43, convolution 8, addmm 1 | 39, mm 2, convolution_backward 8"

EXPECTED = {
    "GPT-2, bf16": [GPT2_LAYERS, GPT2_LOSS],
    "GPT-2, bf16, CUDA graphs": ["Gather to Add (3): 2 | 4", GPT2_LAYERS, GPT2_LOSS],
    "GPT-2, bf16, logits in chunks": [
        GPT2_LAYERS,
        "LayerNormalization to LinearCrossEntropy (3): 6, mm 6 | 5",
    ],
    "GPT-2, float8": [
        "LayerNormalization to Add (57): 83, scaled_mm 12, scaled_dot_product_flash_attention 3 | "
        "88, scaled_mm 24, scaled_dot_product_flash_attention_backward 3",
        GPT2_LOSS,
    ],
    "GPT-2": [
        "LayerNormalization to Add (57): 10, addmm 7, scaled_dot_product_efficient_attention 3, mm 5 | "
        "47, mm 24, scaled_dot_product_efficient_attention_backward 3",
        GPT2_LOSS,
    ],
    "BERT": [
        "Gather to LayerNormalization (4): 1 | 6",
        "Linear to LayerNormalization (60): 9, addmm 13, scaled_dot_product_efficient_attention 3, mm 5 | "
        "55, mm 36, scaled_dot_product_efficient_attention_backward 3",
        BERT_HEAD,
        "Reshape to LinearCrossEntropy (2): 2, addmm 1 | 3, mm 2",
    ],
    "BERT, bf16": [
        "Gather to LayerNormalization (4): 1 | 7",
        BERT_LAYERS,
        BERT_HEAD,
        "Reshape to LinearCrossEntropy (2): 2, addmm 1 | 3, mm 2",
    ],
    "Llama": [
        "RMSNormalization to Add (90): 26, mm 21, bmm 6 | 41, mm 42, bmm 12",
        "RMSNormalization: 1 | 3",
        "Reshape to LinearCrossEntropy (2): 2, mm 1 | 1, mm 2",
    ],
    "Llama, bf16": [LLAMA_LAYERS, "RMSNormalization: 1 | 3", "Reshape to LinearCrossEntropy (2): 3, mm 1 | 2, mm 2"],
    "ResNet": [RESNET],
    "ResNet, bf16": [RESNET],
}
"""Case -> its segments: operators, and what is launched and called in the forward | the backward pass."""

MOST_SPILLED = 16
"""Of a form of a kernel, in bytes: torch takes none for which more registers are stored."""

QUICK = "GPT-2, bf16"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hooks.cpp`, compiled."""
    return compile_hooks(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED if name != QUICK)]
)
def test_segments_are_fused_and_compile(library: Path, tmp_path: Path, name: str) -> None:
    """No piece falls out of a graph, all kernels are machine code, and there are as many as expected."""
    graphs = ask(library, tmp_path, "generated", name)[name]["graphs"]
    errors = [graph["error"] for graph in graphs if graph["error"]]
    assert not errors, errors[0][-3000:]
    for graph in graphs:
        assert not graph["breaks"], graph["operators"]
        assert graph["pieces"] == 1, graph["operators"]
        assert [one["is_backward"] for one in graph["passes"]] == [False, True], graph["operators"]
        assert graph["is_recorded"] == name.endswith("CUDA graphs")
        for one in graph["passes"]:
            assert one["not_recorded"] is None, graph["operators"]
            for kernel in one["kernels"]:
                assert kernel["target"] == "sm_90a", kernel
                assert kernel["machine_code_bytes"] > 0, kernel
                assert kernel["spilled_bytes"] <= MOST_SPILLED, kernel
    assert [summary(graph) for graph in graphs] == EXPECTED[name]


def summary(graph: Mapping[str, Any]) -> str:
    """What a segment computes, and by how many launches of Triton's kernels and calls of torch's own, both ways."""
    operators = graph["operators"]
    label = operators[0] if len(operators) == 1 else f"{operators[0]} to {operators[-1]} ({len(operators)})"
    passes = [
        ", ".join([str(one["launches"]), *(_call(*call) for call in one["calls"].items())]) for one in graph["passes"]
    ]
    return f"{label}: {' | '.join(passes)}"


def _call(name: str, count: int) -> str:
    return f"{name.lstrip('_')} {count}"
