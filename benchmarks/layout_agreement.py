"""Does the search of a layout count what its plan counts? `python -m benchmarks.layout_agreement [MODEL ...]`.

The search prices thousands of layouts from one count of the network; a plan runs the stages of one layout on fake
tensors. For held-out models in many layouts, the peak memory of the fullest rank, the bytes that a rank sends and the
share of time that a pipeline waits are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.network_work import count_network, search_settings, with_context
from onward.engine.forecast.plan_forecast import forecast
from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.plan.search.hardware import KNOWN, Cluster, Link
from onward.plan.search.layout import Layout
from onward.plan.search.network import NetworkWork
from onward.plan.search.pricing import Pricing
from onward.plan.topology import Topology

LAYOUTS = {
    "1": Layout(),
    "d4": Layout(data=4),
    "d4 ZeRO 1": Layout(data=4, zero_stage=1),
    "d4 ZeRO 2, 2 micro-batches": Layout(data=4, zero_stage=2, micro_batches=2),
    "d4 ZeRO 3": Layout(data=4, zero_stage=3),
    "d4 ZeRO 3 in groups of 2": Layout(data=4, zero_stage=3, zero_group=2),
    "experts over 2 of 4": Layout(data=4, experts=2),
    "t2": Layout(horizontal=2),
    "t2 sequence parallel": Layout(horizontal=2, sequence_parallel=True),
    "d2 t2 ZeRO 1": Layout(data=2, horizontal=2, zero_stage=1),
    "c2": Layout(context=2),
    "p2 1F1B": Layout(pipeline=2, micro_batches=4),
    "p2 interleaved": Layout(pipeline=2, schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=4),
    "d2 p2 ZeRO 2": Layout(data=2, pipeline=2, micro_batches=4, zero_stage=2),
    "recompute": Layout(kept=0.0),
}  # fmt: skip
"""Layouts with batches of one sample, which `agreement` replaces."""

_UNLIMITED = 1e30
COUNTING: Cluster = dataclasses.replace(
    KNOWN["h100"],
    device=dataclasses.replace(
        KNOWN["h100"].device, operations_per_second={"fp32": 1e12, "bf16": 1e12}, bytes_per_second=_UNLIMITED,
        operator_seconds=0.0,
    ),
    ranks_of_node=2**20, inside=Link(1.0, 0.0), between=Link(1.0, 0.0), overlap=0.0,
)  # fmt: skip
"""Hardware on which the seconds of communication are its bytes."""

_COMMUNICATION = ("tensor parallel", "tensor and context parallel", "expert parallel", "replicas")
_BETWEEN_STAGES = ("activations to the next stage", "gradients to the previous stage")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The search's count and the plan's, of one layout.

    Attributes:
        memory: bytes of the rank that needs most.
        sent: bytes that the rank that sends most sends in an update, but for what stages send each other.
        bubble: share of the time that ranks of a pipeline wait.
    """

    memory: tuple[float, float]
    sent: tuple[float, float]
    bubble: tuple[float, float]

    def __str__(self) -> str:
        """Memory and bytes as times the plan's, and both bubbles."""
        sent = "nothing" if self.sent[1] < 1 else f"{self.sent[0] / self.sent[1]:.2f}"
        bubbles = f"{self.bubble[0]:.2f} {self.bubble[1]:.2f}"
        return f"memory {self.memory[0] / self.memory[1]:.2f}, sent {sent}, bubble {bubbles}"


def work_for(layout: Layout, works: tuple[NetworkWork, ...]) -> NetworkWork | None:
    """The form of a network that a layout is priced in; None: the network cannot be shared so."""
    for work in works:
        is_shared = layout.horizontal in work.tensor_sizes and (
            not layout.sequence_parallel or work.token_size % layout.horizontal == 0
        )
        if is_shared and layout.experts in (1, *work.expert_sizes) and layout.context in (1, *work.context_sizes):
            return work
    return None


def agreement(parameters: Parameters, layout: Layout, works: tuple[NetworkWork, ...]) -> Agreement | None:
    """Both counts for the samples of the parameters; None: the network cannot be shared so.

    Args:
        parameters: of a run of one process.
        layout: with micro-batches of one sample.
        works: the network as `count_network` counts it.

    Raises:
        ParametersError: the plan refuses the layout.
    """
    work, size = work_for(layout, works), parameters.training.batch_size
    if work is None:
        return None
    layout = dataclasses.replace(layout, batch_size=size)
    sections = layout.sections()
    run = dataclasses.replace(
        parameters, **{name: dataclasses.replace(getattr(parameters, name), **one) for name, one in sections.items()}
    )
    graph, topology = read_training_graph(run), Topology.of_sizes(run.distributed)
    planned = forecast(run, graph, plan_run(run, topology, graph, {}), {})
    settings = search_settings(parameters, graph, layout.ranks, _UNLIMITED, torch.__version__)
    found = Pricing(work, COUNTING, settings).estimate(layout)
    idle = found.seconds["pipeline bubble"]
    busy = found.seconds["compute"] + found.seconds["recompute"]
    sent = [sum(one.sent for one in rank.traffic if one.what not in _BETWEEN_STAGES) for rank in planned.ranks]
    return Agreement(
        memory=(found.total_bytes, max(rank.memory.total for rank in planned.ranks)),
        sent=(sum(found.seconds.get(kind, 0.0) for kind in _COMMUNICATION), max(sent)),
        bubble=(idle / (idle + busy), 0.0 if planned.timeline is None else planned.timeline.bubble_share),
    )


def agreements(parameters: Parameters) -> Iterator[tuple[str, Agreement | str]]:
    """Of every layout that the network allows, or why its plan refuses it."""
    works = count_network(parameters, {}, 4)
    with contextlib.suppress(ParametersError):  # no sequences can be shared
        works = with_context(parameters, {}, 4, works)
    for name, layout in LAYOUTS.items():
        try:
            found = agreement(parameters, layout, works)
        except ParametersError as error:
            yield name, f"refused: {error}"
            continue
        if found is not None:
            yield name, found


def parameters_of(model: ir.Model, folder: Path, loss: Mapping[str, Any], **training: Any) -> Parameters:
    """A run of one process with Adam."""
    path = folder / "model.onnx"
    ir.save(model, path)
    return Parameters.from_mapping(
        {
            "paths": {"model_path": str(path)}, "loss": loss, "learning_rate": {"initial_lr": 0.1},
            "training": {"batch_size": 8, "num_train_steps": 8, **training},
            "optimizer": {"training_optimizer_name": "AdamW"},
        }
    )  # fmt: skip


def main() -> None:
    from benchmarks.held_out_exports import LOSS, MODELS

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    asked = arguments.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in asked.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            for layout, found in agreements(parameters_of(MODELS[name].model(4), Path(folder), LOSS)):
                print(f"{name:<24}{layout:<30}{found}", flush=True)


if __name__ == "__main__":
    main()
