"""What a pipeline stage computes of a micro-batch: the values asked for, and the loss weighed where it is to be."""

from __future__ import annotations

import torch

from onward.engine.building.pipelined import StageCompute
from onward.engine.micro_batches import SHARES
from onward.engine.network.forward import Forward
from onward.engine.network.network import Network, unsplit_network
from onward.engine.network.precision import Precision
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.parallel.pipeline.stage import MINIMIZED
from tests.plan.staged_models import batch_of, graph_of

PLAIN = Precision(None)


def last_stage() -> tuple[Network, StageCompute, str]:
    network = unsplit_network(OnnxModule(graph_of("mlp")))
    names = network.net.graph.loss_names
    assert names is not None
    compute = StageCompute(network, PLAIN, names, ())
    compute.begin_round((names.loss,), None)
    return network, compute, names.loss


def test_values_are_those_of_a_forward_pass_and_nothing_is_asked_of_nobody() -> None:
    network, compute, loss = last_stage()
    batch = batch_of("mlp", 0)
    expected = Forward(network, ("relu0", loss), PLAIN)(batch)
    found = compute(batch, ("relu0", loss))
    assert found.keys() == expected.keys() == {"relu0", loss}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert compute(batch, ()) == {}


def test_the_loss_to_minimize_is_weighed_where_its_share_came_with_the_features() -> None:
    network, compute, loss = last_stage()
    batch = batch_of("mlp", 0)
    expected = Forward(network, ("logits", loss), PLAIN)(batch)
    weighed = compute({**batch, SHARES: torch.tensor([0.25])}, ("logits", loss))
    assert float(weighed[MINIMIZED]) == 0.25 * float(expected[loss])
    # Who watches the loss by its name sees the graph's own value, as without a pipeline.
    assert torch.equal(weighed[loss], expected[loss])
    assert torch.equal(weighed["logits"], expected["logits"])
    assert float(compute({**batch, SHARES: torch.tensor([0.0])}, (loss,))[MINIMIZED]) == 0.0
    assert not torch.equal(expected[loss], torch.tensor(0.0))


def test_programs_are_instrumented_when_a_pass_asks_for_it() -> None:
    _, compute, loss = last_stage()
    seen: list[Program] = []

    def instrument(program: Program) -> Program:
        seen.append(program)
        return program

    batch = batch_of("mlp", 0)
    compute(batch, (loss,))
    assert not seen
    compute.begin_round((loss,), instrument)
    compute(batch, (loss,))
    assert len(seen) == 1
    with torch.no_grad():  # evaluation, and finding out the shapes of what travels, are no step's
        compute(batch, (loss,))
    assert len(seen) == 1
