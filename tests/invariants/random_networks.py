"""Networks drawn at random for the speed-ups to stumble over: values read twice, tied weights, sums with themselves.

Images go through convolutions, norms, activations, pools, residuals and excitations, in any order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from tests.graph.fusion.pairs import parse

IMAGE, CLASSES = 8, 5

Shape = tuple[int, int]


@dataclass
class Drawing:
    """A graph as it grows.

    Attributes:
        seed: of all choices and numbers.
        dtype: of weights and activations.
        lines: of the graph's text.
        stored: initializers by name.
        values: images so far: (name, (channels, height and width)).
    """

    seed: int
    dtype: Any
    lines: list[str] = field(default_factory=list)
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    values: list[tuple[str, Shape]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)

    def weight(self, *shape: int, around: float = 0.0) -> str:
        """A new weight; the same numbers whatever the type."""
        name = f"w{len(self.stored)}"
        fan = max(1, int(np.prod(shape[1:])))
        drawn = around + self.numbers.normal(0, (1.0 if len(shape) > 1 else 0.3) / fan**0.5, shape)
        self.stored[name] = np.asarray(drawn).astype(np.float32).astype(self.dtype)
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.stored)}"
        array = np.asarray(value)
        self.stored[name] = array.astype(self.dtype) if array.dtype.kind == "f" else array
        return name

    def node(self, call: str) -> str:
        """A line of the text, `Op<...>(...)`, and the name of its result."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {call}")
        return name

    def push(self, name: str, shape: Shape) -> None:
        self.values.append((name, shape))

    @property
    def last(self) -> tuple[str, Shape]:
        return self.values[-1]

    def alike(self, shape: Shape) -> list[str]:
        """Values of this shape, the newest more often than others."""
        found = [name for name, other in self.values if other == shape]
        return found + found[-2:]

    def chance(self, share: float) -> bool:
        return self.source.random() < share


def _shared(draw: Drawing, kind: str, *shape: int, around: float = 0.0) -> str:
    """A weight of its own, or now and then one that another place reads, too."""
    name = f"w_{kind}_{'x'.join(map(str, shape))}"
    if draw.chance(0.2) and name in draw.stored:
        return name
    made = draw.weight(*shape, around=around)
    if name not in draw.stored:
        draw.stored[name] = draw.stored.pop(made)
        return name
    return made


def _convolution(draw: Drawing) -> None:
    name, (channels, size) = draw.last
    kernel = draw.source.choice([1, 1, 3, 3])
    stride = draw.source.choice([1, 1, 1, 2]) if size > 2 else 1
    dilation = draw.source.choice([1, 1, 2]) if kernel == 3 else 1
    filters = draw.source.choice([channels, channels, 4, 6])
    group = draw.source.choice([1, 1, channels]) if filters == channels else 1
    pad = dilation * (kernel // 2)
    weight = _shared(draw, "k", filters, channels // group, kernel, kernel)
    bias = f", {draw.weight(filters)}" if draw.chance(0.5) else ""
    draw.push(
        draw.node(
            f"Conv<pads=[{pad},{pad},{pad},{pad}],strides=[{stride},{stride}],dilations=[{dilation},{dilation}],"
            f"group={group}>({name}, {weight}{bias})"
        ),
        (filters, (size - 1) // stride + 1),
    )


def _norm(draw: Drawing) -> None:
    name, shape = draw.last
    channels = shape[0]
    scale, shift = _shared(draw, "scale", channels, around=1.0), _shared(draw, "shift", channels)
    if draw.chance(0.1):
        shift = scale
    mean, variance = f"mean{len(draw.stored)}", f"variance{len(draw.stored) + 1}"
    draw.stored[mean], draw.stored[variance] = np.zeros(channels, draw.dtype), np.ones(channels, draw.dtype)
    draw.push(draw.node(f"BatchNormalization({name}, {scale}, {shift}, {mean}, {variance})"), shape)


def _activation(draw: Drawing) -> None:
    name, shape = draw.last
    kind = draw.source.choice(["Relu", "Relu", "Relu", "Clip", "HardSwish", "SiLU", "LeakyRelu", "bound", "Sigmoid"])
    if kind == "Clip":
        call = f"Clip({name}, {draw.constant(0.0)}, {draw.constant(1.5)})"
    elif kind == "SiLU":
        call = f"Mul({name}, {draw.node(f'Sigmoid({name})')})"
    elif kind == "bound":
        call = f"Clip({name}, {_shared(draw, 'low')})"
    else:
        call = f"{kind}({name})"
    draw.push(draw.node(call), shape)


def _sum(draw: Drawing) -> None:
    _, shape = draw.last
    choices = draw.alike(shape)
    one, other = draw.source.choice(choices), draw.source.choice(choices)
    kind = draw.source.choice(["Add", "Add", "Add", "Add", "Sub", "Mul", "Sum", "Max"])
    if kind == "Sub" and one == other:
        kind = "Add"  # the norm of a map of zeros would make anything of rounding errors
    draw.push(draw.node(f"{kind}({one}, {other})"), shape)


def _broadcast(draw: Drawing) -> None:
    """A sum with a map that is the same for every image, itself normalized now and then."""
    name, (channels, size) = draw.last
    extent = draw.source.choice([1, size])
    other = draw.weight(1, channels, extent, extent)
    if draw.chance(0.4) and extent > 1:
        draw.push(other, (channels, size))
        _norm(draw)
        other = draw.values.pop()[0]
        draw.values.pop()
    draw.push(draw.node(f"{draw.source.choice(['Add', 'Mul'])}({name}, {other})"), (channels, size))


def _pool(draw: Drawing) -> None:
    name, (channels, size) = draw.last
    if size < 3:
        return
    kernel, stride, pad, dilation, ceiling = draw.source.choice(
        [(2, 2, 0, 1, 0), (3, 1, 1, 1, 0), (3, 2, 1, 1, 0), (3, 2, 0, 1, 1), (2, 1, 0, 2, 0), (3, 1, 1, 1, 1)]
    )
    kind = draw.source.choice(["MaxPool", "MaxPool", "AveragePool"])
    if kind == "AveragePool":
        dilation = 1
    reach = dilation * (kernel - 1) + 1
    along = size + 2 * pad - reach
    count = (-(-along // stride) if ceiling else along // stride) + 1
    if along < 0 or (ceiling and (count - 1) * stride >= size + pad):
        return
    counts = draw.source.choice([0, 1])
    more = f"dilations=[{dilation},{dilation}]" if kind == "MaxPool" else f"count_include_pad={counts}"
    window = f"kernel_shape=[{kernel},{kernel}],strides=[{stride},{stride}],pads=[{pad},{pad},{pad},{pad}]"
    name = draw.node(f"{kind}<{window},{more},ceil_mode={ceiling}>({name})")
    if kind == "MaxPool" and draw.chance(0.2):  # with the places, too, which nobody reads
        draw.lines[-1] = draw.lines[-1].replace(" =", f", {name}_places =", 1)
    draw.push(name, (channels, count))


def _excitation(draw: Drawing) -> None:
    """Squeeze and excitation: channels weighed by what their means tell."""
    name, (channels, size) = draw.last
    mean = draw.node(f"GlobalAveragePool({name})")
    inner = draw.node(f"Conv({mean}, {draw.weight(2, channels, 1, 1)}, {draw.weight(2)})")
    if draw.chance(0.3):
        draw.push(inner, (2, 1))
        _norm(draw)
        inner = draw.last[0]
        del draw.values[-2:]
    bent = draw.node(f"Relu({inner})")
    gate = draw.node(f"Sigmoid({draw.node(f'Conv({bent}, {draw.weight(channels, 2, 1, 1)})')})")
    draw.push(draw.node(f"Mul({name}, {gate})"), (channels, size))


def _concatenation(draw: Drawing) -> None:
    _, (channels, size) = draw.last
    parts = [draw.source.choice(draw.alike((channels, size))) for _ in range(2)]
    if draw.chance(0.7):
        parts = [draw.node(f"Relu({part})") for part in parts]
    joined = draw.node(f"Concat<axis=1>({', '.join(parts)})")
    draw.push(draw.node(f"Conv({joined}, {draw.weight(4, 2 * channels, 1, 1)})"), (4, size))


def _block(draw: Drawing) -> None:
    _convolution(draw)
    _norm(draw)
    if draw.chance(0.7):
        _activation(draw)


def _residual(draw: Drawing) -> None:
    """What ResNets are made of, so that chains of sums come about."""
    name, (channels, size) = draw.last
    weight = draw.weight(channels, channels, 3, 3)
    draw.push(draw.node(f"Conv<pads=[1,1,1,1]>({name}, {weight})"), (channels, size))
    _norm(draw)
    pair = [name, draw.last[0]]
    draw.source.shuffle(pair)
    draw.push(draw.node(f"Add({pair[0]}, {pair[1]})"), (channels, size))
    if draw.chance(0.8):
        draw.push(draw.node(f"Relu({draw.last[0]})"), (channels, size))


_PARTS = [_block, _block, _block, _residual, _residual, _norm, _activation, _sum, _sum, _broadcast, _pool, _excitation,
          _concatenation, _convolution]  # fmt: skip


def draw_images(seed: int, dtype: Any = np.float32) -> onnx.ModelProto:
    """A network of images x [batch, 3, 8, 8] with result `logits` [batch, 5] and, now and then, `also`."""
    draw = Drawing(seed, dtype)
    draw.push("x", (3, IMAGE))
    _convolution(draw)
    for _ in range(draw.source.randint(3, 9)):
        draw.source.choice(_PARTS)(draw)
        if draw.chance(0.1) and len(draw.values) > 2:
            shape = draw.last[1]
            draw.push(draw.source.choice(draw.alike(shape)), shape)
    name, (channels, _) = draw.last
    pooled = draw.node(f"Flatten({draw.node(f'GlobalAveragePool({name})')})")
    draw.lines.append(f"logits = Gemm<transB=1>({pooled}, {draw.weight(CLASSES, channels)}, {draw.weight(CLASSES)})")
    kind = "double" if dtype is np.float64 else "float"
    outputs = f"{kind}[batch,{CLASSES}] logits"
    if draw.chance(0.3):
        chosen = draw.source.choice([value for value in draw.values if value[0] != "x"])
        if chosen[0].startswith("v"):
            outputs += f", {kind}[batch,{chosen[1][0]},{chosen[1][1]},{chosen[1][1]}] {chosen[0]}"
    return parse(f"{kind}[batch,3,{IMAGE},{IMAGE}] x", outputs, "\n".join(draw.lines), draw.stored, 18)


def image_data(samples: int, dtype: Any = np.float32) -> Mapping[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(samples, 3, IMAGE, IMAGE)).astype(np.float32).astype(dtype)
    return {"x": x, "labels": numbers.integers(0, CLASSES, samples)}
