"""Which nodes read an adapted weight."""

from __future__ import annotations

import pytest

from tests.graph.adapters.nets import adapted
from tests.graph.adapters.readings import KINDS, READINGS


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", READINGS)
def test_every_node_is_read(name: str, kind: str):
    graph = adapted(READINGS[name].model(), **KINDS[kind]).graph.model.graph
    unread = [n.name for n in graph if not any(v.uses() or v.is_graph_output() for v in n.outputs)]
    assert unread == []
    # onnx-ir leaves such a value out of the file, and reports each.
    assert [v.name for n in graph for v in n.outputs if v.shape is not None and v.type is None] == []
