"""What `onward lr-find` does: the range test on a run, as a table and a picture; the run itself stays as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from onward.checkpoint.run_checkpoints import RunCheckpoints
from onward.commands.loaders import training_loader
from onward.commands.pictures import checked_image, write_image
from onward.commands.rehearsal import without_traces
from onward.data.loader import DataLoader
from onward.engine.building.assembly import assemble
from onward.engine.building.preparation import check_dimensions, feature_ranges, plan_run, read_training_graph
from onward.engine.building.rounds import make_steps
from onward.engine.loop import closing_batches
from onward.engine.network.precision_choice import settled_precision
from onward.engine.range_test import Point, RangeTest, rates, run_range_test
from onward.environment import Environment
from onward.errors import ParametersError
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Checkpoint, Distributed, Parameters
from onward.plan.report.drawing import WIDTH, Shape
from onward.report.phases import Phases

_ROWS = 20
_LEFT, _TOP, _HEIGHT = 90, 60, 320


def find_rate(
    file: str | Path,
    overrides: Mapping[str, str] | None = None,
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    updates: int = 100,
    image: str | Path | None = None,
    checkpoint: str | Path | None = None,
    phases: Phases | None = None,
) -> str:
    """Runs the range test; returns the table and the suggestion.

    Args:
        file: RUN.yaml.
        overrides: fields of it.
        lowest, highest: the rates to try, from and to.
        updates: weight updates at most.
        image: where a picture goes, .svg or .png.
        checkpoint: whose weights to begin with; None: those of the model.
        phases: announce what takes long.

    Raises:
        UserError: of any kind, each with what to do.
    """
    if not 0 < lowest < highest < math.inf:
        raise ParametersError(
            f"--from is {lowest:g} and --to is {highest:g}; expected rates above 0, with --to above --from."
        )
    if updates < 10:
        raise ParametersError(f"--steps is {updates}; expected at least 10.")
    target = None if image is None else checked_image(Path(image))
    asked = Parameters.load(file, overrides)
    parameters = replace(
        without_traces(asked, updates * asked.training.gradient_accumulation_steps), distributed=Distributed()
    )
    loader = training_loader(parameters)
    try:
        found = _test(parameters, loader, rates(lowest, highest, updates), checkpoint, phases or Phases.silent())
    finally:
        loader.close()
    text = describe(found, asked.learning_rate.initial_lr)
    if target is not None:
        shapes, height = picture(found)
        write_image(target, shapes, height)
        text += f"\nwrote {target}"
    return text


def _test(
    parameters: Parameters, loader: DataLoader, tried: Sequence[float], checkpoint: str | Path | None, phases: Phases
) -> RangeTest:
    environment = Environment.of(parameters.machine)
    environment.apply()
    torch.manual_seed(parameters.training.seed)
    mesh = in_world_of_one(environment.device_kind)
    parameters, _ = settled_precision(parameters, environment.device_kind)
    phases.begin(f"reading {parameters.paths.model_path or 'the model'}")
    graph, specs = read_training_graph(parameters), loader.feature_specs()
    phases.begin("building the network")
    plan = plan_run(parameters, mesh.topology, graph, specs)
    check_dimensions(parameters.training.mapped_dimensions, graph)
    assembly = assemble(parameters, mesh, graph, plan, lambda _: None, specs)
    if checkpoint is not None:
        RunCheckpoints(mesh).resume(Checkpoint(checkpoint_to_load_path=Path(checkpoint)), assembly.state)
    training = parameters.training
    steps = make_steps(parameters, assembly, training.mapped_dimensions, feature_ranges(parameters.loss, graph))
    phases.begin(f"training {len(tried)} updates at rising learning rates")
    with closing_batches(loader.batches(training.batch_size)) as batches:
        return run_range_test(steps, batches, tried)


def describe(found: RangeTest, present: float) -> str:
    """The curve as a table, and what to do.

    Args:
        found: by the test.
        present: `learning_rate.initial_lr` of the run.
    """
    points = found.points
    lines = [f"{'learning rate':>13}  {'loss':>10}  {'smoothed':>10}"]
    shown = sorted({round(k * (len(points) - 1) / (_ROWS - 1)) for k in range(_ROWS)}) if points else []
    rows = dict.fromkeys(shown, "")
    marks = ((found.steepest, "steepest descent"), (found.lowest, "lowest loss"), (found.suggestion, "suggested"))
    for rate, mark in marks:
        if rate is not None:
            index = _nearest(points, rate)
            rows[index] = f"{rows[index]}, {mark}" if rows.get(index) else f"  <- {mark}"
    for index in sorted(rows):
        point = points[index]
        lines.append(f"{point.learning_rate:>13.3g}  {point.loss:>10.4g}  {point.smoothed:>10.4g}{rows[index]}")
    if found.diverged:
        last = f"at {points[-1].learning_rate:.3g}" if points else "in the first step"
        lines.append(f"the loss diverged {last}; the test stopped there.")
    if found.suggestion is None:
        lines.append(
            "the loss did not fall at any rate, so there is no suggestion. Try other rates (--from, --to) or more "
            "steps (--steps), and check the data and the loss."
        )
    else:
        lines.append(f"suggested: learning_rate.initial_lr: {_yaml(found.suggestion)} (now {present:g})")
    return "\n".join(lines)


def _nearest(points: Sequence[Point], rate: float) -> int:
    return min(range(len(points)), key=lambda index: abs(math.log(points[index].learning_rate / rate)))


def _yaml(rate: float) -> str:
    text = f"{rate:.2g}"
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


def picture(found: RangeTest) -> tuple[list[Shape], int]:
    """The curve over the logarithm of the rate, and how high the picture is."""
    points = found.points
    shapes = [Shape(x=20, y=14, text="Learning-rate range test", size=18)]
    if len(points) < 2:
        return [*shapes, Shape(x=20, y=_TOP, text="no points: the loss is not finite")], 120
    width = WIDTH - _LEFT - 40
    smoothed = [point.smoothed for point in points]
    low = min(smoothed)
    high = min(max(point.loss for point in points), max(smoothed[0], low) + 1.2 * (max(smoothed[0], low) - low) + 1e-12)
    span = max(high - low, 1e-12)
    ends = [math.log10(points[0].learning_rate), math.log10(points[-1].learning_rate)]

    def x(rate: float) -> float:
        return _LEFT + (math.log10(rate) - ends[0]) / max(ends[1] - ends[0], 1e-12) * width

    def y(loss: float) -> float:
        return _TOP + (1 - min(max((loss - low) / span, -0.05), 1.0)) * _HEIGHT

    for exponent in range(math.ceil(ends[0]), math.floor(ends[1]) + 1):
        place = x(10.0**exponent)
        shapes += [
            Shape(x=place, y=_TOP, width=1, height=_HEIGHT, color="#e4e4e4"),
            Shape(x=place - 14, y=_TOP + _HEIGHT + 10, text=f"1e{exponent}"),
        ]
    for share in (0.0, 0.5, 1.0):
        loss = low + share * span
        shapes += [
            Shape(x=_LEFT, y=y(loss), width=width, height=1, color="#e4e4e4"),
            Shape(x=20, y=y(loss) - 6, text=f"{loss:.3g}"),
        ]
    shapes += [
        Shape(x=x(point.learning_rate) - 1.5, y=y(point.loss) - 1.5, width=3, height=3, color="#b8c9dc")
        for point in points
    ]
    shapes += _line([(x(point.learning_rate), y(point.smoothed)) for point in points])
    if found.suggestion is not None:
        place = x(found.suggestion)
        shapes += [
            Shape(x=place - 1, y=_TOP, width=2, height=_HEIGHT, color="#b00020"),
            Shape(x=place + 6, y=_TOP + 4, text=f"suggested: {found.suggestion:.2g}", color="#b00020"),
        ]
    shapes.append(Shape(x=_LEFT + width / 2 - 40, y=_TOP + _HEIGHT + 30, text="learning rate"))
    return shapes, _TOP + _HEIGHT + 60


def _line(corners: Sequence[tuple[float, float]]) -> list[Shape]:
    """A line as small squares, which is all that a picture is made of."""
    shapes = []
    for (x, y), (right, bottom) in pairwise(corners):
        count = max(1, round(max(abs(right - x), abs(bottom - y)) / 1.5))
        for k in range(count):
            share = k / count
            shapes.append(
                Shape(x=x + (right - x) * share - 1, y=y + (bottom - y) * share - 1, width=2, height=2, color="#3b6ea5")
            )
    return shapes
