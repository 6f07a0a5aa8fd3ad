"""What torch's compiler takes for the strides of results, of images with the channels last, is what kernels give.

Compiled code checks the strides of what it calls at each step, and a run would end in its first backward pass.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_utils import CrossRefFakeMode

from tests.conformance.cases import load_cases
from tests.conformance.checking import net_of, to_torch_value
from tests.conformance.exceptions import reason_for

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CASES_OF_AN_OPERATOR = 4
TYPES_MIXED = ("attention_4d_padded_kv", "attention_4d_causal_padded_kv", "attention_4d_gqa_causal_nonpad_decode")
"""Cases that torch's own kernel refuses, whatever the strides: those of generated code take them."""


def test_results_have_the_strides_that_the_compiler_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    done, failed = Counter[str](), dict[str, str]()
    for case in load_cases("node"):
        kind = case.model.graph.node[0].op_type + str(case.model.graph.node[-1].attribute[:1])
        if done[kind] == CASES_OF_AN_OPERATOR or reason_for(case.name) is not None or "_expanded" in case.name:
            continue
        given = [to_torch_value(value) for value in case.data_sets[0][0]]
        if kind.startswith("Pad"):
            given[0] = given[0].float()  # the standard pads integers
        images = [x for x in given if isinstance(x, Tensor) and x.dim() in LAST and x.is_floating_point()]
        if not images or any(name in case.name for name in TYPES_MIXED):
            continue
        done[kind] += 1
        inputs = tuple(
            x.to(memory_format=LAST[x.dim()]).requires_grad_() if any(x is one for one in images) else x for x in given
        )
        net = net_of(case)
        try:
            with CrossRefFakeMode(ignore_op_fn=lambda op: op is torch.ops.aten.item.default, check_strides=True):
                results = [
                    x for x in net.run(inputs, net.tensors_by_name()) if isinstance(x, Tensor) and x.requires_grad
                ]
                wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
                if results:
                    torch.autograd.grad(results, wanted, [torch.ones_like(x) for x in results], allow_unused=True)
        except Exception as error:
            failed[case.name] = str(error)[:300]
    assert len(done) > 40
    assert not failed
