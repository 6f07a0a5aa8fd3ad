"""If, Loop and Scan: nested graphs called as often as the data say.

A nested graph arrives as a callable: `body(*inputs)` gives a tuple. Gradients flow through every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from onward.errors import ModelError
from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.kernels.scanning import Tensors, have_same_shapes, is_scanned, results_apart, scan_steps
from onward.lowering.program import Nested
from onward.lowering.registry import lowers

Branch = Callable[..., tuple[Any, ...]]


@lowers("If", host=("cond",))
def if_(cond: HostValue, *, then_branch: Branch, else_branch: Branch, output_count: int) -> tuple[Any, ...]:
    """https://onnx.ai/onnx/operators/onnx__If.html; only the branch that is taken runs.

    Raises:
        ModelError: in a trace with open sizes, these decide: the trace would have one branch for all of them.
    """
    taken = numbers_of(cond)[0]
    if isinstance(taken, torch.SymBool) and not _is_decided(taken):
        raise ModelError(
            f"a node If takes one branch or the other by a size that is open ({taken}), and a training graph has one."
        )
    return then_branch() if taken else else_branch()


def _is_decided(condition: torch.SymBool) -> bool:
    """Whether a condition on open sizes holds for all of them, or for none."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long; traces have it loaded

    return statically_known_true(condition) or statically_known_true(torch.sym_not(condition))  # type: ignore[no-untyped-call]


@lowers("Loop", host=("M", "cond"))
def loop(
    M: HostValue | None = None,
    cond: HostValue | None = None,
    *v_initial: Any,
    body: Branch,
    output_count: int,
    device: torch.device,
) -> tuple[Any, ...]:
    """https://onnx.ai/onnx/operators/onnx__Loop.html; runs while fewer than M rounds are done and cond holds."""
    limit = None if M is None else numbers_of(M)[0]
    going = True if cond is None else bool(numbers_of(cond)[0])
    flag = torch.full((), going, device=device)
    carried = tuple(v_initial)
    if is_scanned(limit) and going and _ends_by_count(body, flag, carried):
        return _scan_rounds(body, limit, flag, carried)
    collected: list[list[Tensor]] = [[] for _ in range(output_count - len(carried))]
    done = 0
    while going and (limit is None or done < limit):
        results = body(torch.full((), done, device=device), flag, *carried)
        carried = results[1 : 1 + len(carried)]
        collected = _append(collected, results[1 + len(carried) :])
        if results[0] is not flag:
            flag, going = results[0], bool(results[0])
        done += 1
    if not done and collected:
        probe = _probe(body, torch.full((), 0, device=device), flag, *carried)
        return (*carried, *(value.new_zeros((0, *value.shape)) for value in probe[1 + len(carried) :]))
    return (*carried, *(torch.stack(values) for values in collected))


def _ends_by_count(body: Branch, flag: Tensor, carried: tuple[Any, ...]) -> bool:
    """Whether the body passes its condition on, and keeps the shapes and types of what it carries."""
    results = results_apart(body, torch.full((), 0, device=flag.device), flag, *carried)
    return results[0] is flag and have_same_shapes(carried, results[1 : 1 + len(carried)])


def _scan_rounds(body: Branch, count: Any, flag: Tensor, carried: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """`loop` as a scan of rounds."""
    body_of, shared = _unbound(body)

    def step(states: Tensors, now: Tensors, read: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
        results = body_of(read)(now[0], torch.ones((), dtype=torch.bool, device=flag.device), *states)
        return results[1 : 1 + len(states)], results[1 + len(states) :]

    finals, outputs = scan_steps(step, carried, (torch.arange(count, device=flag.device),), shared)
    return (*finals, *outputs)


def _scan_steps(body: Branch, states: Tensors, slices: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    """`_run_scan` as a scan of steps, along first axes."""
    body_of, shared = _unbound(body)

    def step(states: Tensors, now: Tensors, read: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
        results = body_of(read)(*states, *now)
        return results[: len(states)], results[len(states) :]

    return scan_steps(step, states, tuple(slices), shared)


def _unbound(body: Branch) -> tuple[Callable[[tuple[Any, ...]], Branch], tuple[Any, ...]]:
    """A nested graph as a function of what it reads from outside, and what that is, without its nesting."""
    if not isinstance(body, Nested):
        return lambda read: body, ()
    values, structure = tree_flatten(body.captured)
    return lambda read: body.reading(tree_unflatten(list(read), structure)), tuple(values)


def _append(collected: Sequence[list[Tensor]], values: Sequence[Tensor]) -> list[list[Tensor]]:
    """The lists with one more value each; there may be more values than outputs that are read."""
    rows = list(collected) or [[] for _ in values]
    return [[*row, value] for row, value in zip(rows, values, strict=False)]


def _probe(body: Branch, *inputs: Any) -> tuple[Any, ...]:
    """Results of a round that does not count: shapes and types of what no round has made."""
    with torch.no_grad():
        return body(*inputs)


@lowers("Scan", since=9)
def scan(
    *initial_state_and_scan_inputs: Tensor,
    body: Branch,
    num_scan_inputs: int,
    scan_input_axes: tuple[int, ...] = (),
    scan_input_directions: tuple[int, ...] = (),
    scan_output_axes: tuple[int, ...] = (),
    scan_output_directions: tuple[int, ...] = (),
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Scan.html; one round for each position of the scanned axes."""
    count = len(initial_state_and_scan_inputs) - num_scan_inputs
    states, scanned = initial_state_and_scan_inputs[:count], initial_state_and_scan_inputs[count:]
    axes = scan_input_axes or (0,) * num_scan_inputs
    length = scanned[0].shape[axes[0]]
    if any(value.shape[axis] != length for value, axis in zip(scanned, axes, strict=True)):
        sizes = [value.shape[axis] for value, axis in zip(scanned, axes, strict=True)]
        raise ValueError(f"the scanned axes have different sizes: {sizes}.")
    directions = _padded(scan_input_directions, num_scan_inputs)
    if is_scanned(length):
        firsts = [value.movedim(axis, 0) for value, axis in zip(scanned, axes, strict=True)]
        firsts = [value.flip(0) if backwards else value for value, backwards in zip(firsts, directions, strict=True)]
        if have_same_shapes(states, results_apart(body, *states, *(value[0] for value in firsts))[:count]):
            states, found = _scan_steps(body, states, firsts)
            ways = _padded(scan_output_directions, len(found))
            found = tuple(value.flip(0) if backwards else value for value, backwards in zip(found, ways, strict=True))
            places = _padded(scan_output_axes, len(found))
            return (*states, *(value.movedim(0, axis) for value, axis in zip(found, places, strict=True)))
    slices = [
        tuple(reversed(value.unbind(axis))) if backwards else value.unbind(axis)
        for value, axis, backwards in zip(scanned, axes, directions, strict=True)
    ]
    states, collected = _run_scan(body, states, slices, length)
    if not length:
        blanks = [value.new_zeros(_without(value.shape, axis)) for value, axis in zip(scanned, axes, strict=True)]
        probe = _probe(body, *states, *blanks)
        collected = [[value.new_zeros((0, *value.shape))] for value in probe[count:]]
    outputs = []
    for place, values in enumerate(collected):
        axis = scan_output_axes[place] if place < len(scan_output_axes) else 0
        if not length:
            outputs.append(values[0].movedim(0, axis))
            continue
        backwards = place < len(scan_output_directions) and scan_output_directions[place]
        outputs.append(torch.stack(values[::-1] if backwards else values, axis))
    return (*states, *outputs)


def _padded(directions: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(directions) + (0,) * (count - len(directions))


def _without(shape: Sequence[int], axis: int) -> list[int]:
    sizes = list(shape)
    sizes.pop(axis)
    return sizes


def _run_scan(
    body: Branch, states: tuple[Tensor, ...], slices: Sequence[Sequence[Tensor]], length: int
) -> tuple[tuple[Tensor, ...], list[list[Tensor]]]:
    """Runs the rounds; gives the last states and, for each scan output, its values in order."""
    collected: list[list[Tensor]] = []
    for step in range(length):
        results = body(*states, *(values[step] for values in slices))
        states = results[: len(states)]
        collected = _append(collected, results[len(states) :])
    return states, collected


@lowers("Scan", since=8, host=("sequence_lens",))
def scan_8(
    sequence_lens: HostValue | None = None,
    *initial_state_and_scan_inputs: Tensor,
    body: Branch,
    num_scan_inputs: int,
    directions: tuple[int, ...] = (),
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Scan.html; version 8 scans axis 1 of each sample of a batch."""
    count = len(initial_state_and_scan_inputs) - num_scan_inputs
    scanned = initial_state_and_scan_inputs[count:]
    batch, longest = scanned[0].shape[0], scanned[0].shape[1]
    lengths = [longest] * batch if sequence_lens is None else numbers_of(sequence_lens)
    rows = []
    for sample in range(batch):
        length = lengths[sample]
        slices = []
        for value, backwards in zip(scanned, _padded(directions, num_scan_inputs), strict=True):
            steps = value[sample, :length].unbind(0)
            slices.append(tuple(reversed(steps)) if backwards else steps)
        states = tuple(value[sample] for value in initial_state_and_scan_inputs[:count])
        final, collected = _run_scan(body, states, slices, length)
        stacked = [torch.stack(values) for values in collected]
        filled = [torch.cat([v, v.new_zeros((longest - length, *v.shape[1:]))]) for v in stacked]
        rows.append((*final, *filled))
    return tuple(torch.stack(values) for values in zip(*rows, strict=True))
