"""Networks of sequences drawn at random, in opsets 11 to 22: what fused operators and joined layers are made of.

Lookups, norms, activations, attention, recurrent layers, products with rows, in any order; values are read twice,
weights are shared, and inner values are outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from tests.graph.fusion.pairs import parse
from tests.invariants.random_networks import Drawing, _shared

STEPS, WIDTH, HEADS, CLASSES = 5, 8, 2, 300


class Sequences(Drawing):
    """Values are [batch, STEPS, WIDTH]."""

    opset: int = 18

    @property
    def x(self) -> str:
        return self.last[0]

    def keep(self, name: str) -> None:
        self.push(name, (STEPS, WIDTH))

    def calls(self, first: str, *kinds: str) -> str:
        """Several operators of one operand, one after the other."""
        for kind in kinds:
            first = self.node(kind.format(first))
        return first

    def reduced(self, kind: str, name: str, axis: int) -> str:
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.node(f"{kind}<keepdims=1>({name}, {self.constant([axis])})")
        return self.node(f"{kind}<axes=[{axis}],keepdims=1>({name})")

    def without_axis(self, name: str, axis: int) -> str:
        if self.opset >= 13:
            return self.node(f"Squeeze({name}, {self.constant([axis])})")
        return self.node(f"Squeeze<axes=[{axis}]>({name})")

    def either(self, kind: str, one: str, other: str) -> str:
        """A sum or a product, its operands in any order."""
        pair = [one, other]
        self.source.shuffle(pair)
        return self.node(f"{kind}({pair[0]}, {pair[1]})")

    def product(self, name: str, outputs: int = WIDTH) -> str:
        found = self.node(f"MatMul({name}, {_shared(self, 'm', WIDTH, outputs)})")
        return self.either("Add", found, self.weight(outputs)) if self.chance(0.5) else found


def _rms_norm(draw: Sequences) -> None:
    x, two = draw.x, draw.constant(2.0)
    square = draw.node(f"Pow({x}, {two})" if draw.chance(0.5) else f"Mul({x}, {x})")
    mean = draw.reduced("ReduceMean", square, -1)
    root = draw.node(f"Sqrt({draw.either('Add', mean, draw.constant(1e-5))})")
    normed = (
        draw.node(f"Div({x}, {root})") if draw.chance(0.5) else draw.either("Mul", x, draw.node(f"Reciprocal({root})"))
    )
    draw.keep(draw.either("Mul", normed, _shared(draw, "scale", WIDTH, around=1.0)))


def _layer_norm(draw: Sequences) -> None:
    x, scale, shift = draw.x, _shared(draw, "scale", WIDTH, around=1.0), _shared(draw, "shift", WIDTH)
    if draw.opset >= 17 and draw.chance(0.5):
        return draw.keep(draw.node(f"LayerNormalization<axis=-1>({x}, {scale}, {shift})"))
    centered = draw.node(f"Sub({x}, {draw.reduced('ReduceMean', x, -1)})")
    variance = draw.reduced("ReduceMean", draw.node(f"Mul({centered}, {centered})"), -1)
    root = draw.node(f"Sqrt({draw.either('Add', variance, draw.constant(1e-5))})")
    scaled = draw.either("Mul", draw.node(f"Div({centered}, {root})"), scale)
    return draw.keep(draw.either("Add", scaled, shift))


def _activation(draw: Sequences) -> None:
    x, kind = draw.x, draw.source.choice(["erf", "tanh", "Gelu", "SiLU", "bounds", "Relu", "Softplus", "Sigmoid"])
    if kind in ("erf", "Gelu") and (kind == "erf" or draw.opset < 20):
        one = draw.either("Add", draw.calls(x, f"Div({{}}, {draw.constant(2**0.5)})", "Erf({})"), draw.constant(1.0))
        found = draw.either("Mul", draw.either("Mul", x, one), draw.constant(0.5))
    elif kind == "tanh":
        cube = draw.either("Mul", draw.node(f"Pow({x}, {draw.constant(3.0)})"), draw.constant(0.044715))
        inner = draw.either("Mul", draw.either("Add", x, cube), draw.constant((2 / np.pi) ** 0.5))
        one = draw.either("Add", draw.node(f"Tanh({inner})"), draw.constant(1.0))
        found = draw.either("Mul", draw.either("Mul", x, draw.constant(0.5)), one)
    elif kind == "SiLU":
        found = draw.either("Mul", x, draw.node(f"Sigmoid({x})"))
    elif kind == "bounds":
        found = draw.node(f"Clip({x}, {draw.constant(-0.4)}, {draw.constant(0.9)})")
    else:
        found = draw.node(f"{kind}({x})")
    draw.keep(found)


def _linear(draw: Sequences) -> None:
    draw.keep(draw.product(draw.x))


def _by_gemm(draw: Sequences) -> None:
    rows = draw.node(f"Reshape({draw.x}, {draw.constant([-1, WIDTH])})")
    weight, bias = _shared(draw, "m", WIDTH, WIDTH), draw.weight(WIDTH)
    found = draw.node(f"Gemm<transB={draw.source.choice([0, 1])}>({rows}, {weight}, {bias})")
    draw.keep(draw.node(f"Reshape({found}, {draw.constant([-1, STEPS, WIDTH])})"))


def _gated(draw: Sequences) -> None:
    gate, value = draw.product(draw.x), draw.product(draw.x)
    bent = draw.either("Mul", gate, draw.node(f"Sigmoid({gate})"))
    draw.keep(draw.product(draw.either("Mul", bent, value)))
    if draw.chance(0.2):
        draw.keep(gate)  # what the fused operator would not give


def _attention(draw: Sequences) -> None:
    x, size = draw.x, WIDTH // HEADS
    heads = draw.constant([0, STEPS, HEADS, size])
    q, k, v = (draw.node(f"Reshape({draw.product(x)}, {heads})") for _ in range(3))
    q, v = (draw.node(f"Transpose<perm=[0,2,1,3]>({one})") for one in (q, v))
    k = draw.node(f"Transpose<perm=[0,2,3,1]>({k})")
    scores = draw.either("Mul", draw.node(f"MatMul({q}, {k})"), draw.constant(size**-0.5))
    mask = draw.source.choice(["none", "causal", "learned", "learned for all"])
    if mask == "causal":
        scores = draw.either("Add", scores, draw.constant(np.triu(np.full((STEPS, STEPS), -1e4), 1)))
    elif mask != "none":
        shape = (HEADS, STEPS, STEPS) if mask == "learned" else (1, STEPS)
        scores = draw.either("Add", scores, draw.weight(*shape))
    shares = draw.node(f"Softmax<axis=-1>({scores})")
    found = draw.node(f"Transpose<perm=[0,2,1,3]>({draw.node(f'MatMul({shares}, {v})')})")
    draw.keep(draw.product(draw.node(f"Reshape({found}, {draw.constant([0, STEPS, WIDTH])})")))


def _thin(draw: Sequences) -> None:
    """An outer product, a product of a matrix and a vector, or a weight from the left."""
    x, mean = draw.x, draw.reduced("ReduceMean", draw.x, 1)
    column = draw.node(f"MatMul({x}, {draw.weight(WIDTH, 1)})")
    kind = draw.source.choice(["outer", "vector", "left"])
    if kind == "outer":
        found = draw.node(f"MatMul({column}, {mean})")
    elif kind == "vector":
        turned = draw.node(f"Transpose<perm=[0,2,1]>({mean})")
        found = draw.either("Mul", draw.node(f"MatMul({x}, {turned})"), x)
    else:
        found = draw.node(f"MatMul({draw.weight(STEPS, STEPS)}, {x})")
    draw.keep(found)


def _recurrent(draw: Sequences) -> None:
    kind, gates = draw.source.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    x = draw.node(f"Transpose<perm=[1,0,2]>({draw.x})")
    rows = gates * WIDTH
    weights = f"{draw.weight(1, rows, WIDTH)}, {draw.weight(1, rows, WIDTH)}, {draw.weight(1, 2 * rows)}"
    found = draw.without_axis(draw.node(f"{kind}<hidden_size={WIDTH}>({x}, {weights})"), 1)
    draw.keep(draw.node(f"Transpose<perm=[1,0,2]>({found})"))


def _convolution(draw: Sequences) -> None:
    weight = _shared(draw, "k", WIDTH, WIDTH, 3)
    turn = "Transpose<perm=[0,2,1]>({})"
    draw.keep(draw.calls(draw.x, turn, f"Conv<pads=[1,1]>({{}}, {weight})", turn))


def _sum(draw: Sequences) -> None:
    choices = draw.alike((STEPS, WIDTH))
    one, other = draw.source.choice(choices), draw.source.choice(choices)
    draw.keep(draw.node(f"{draw.source.choice(['Add', 'Add', 'Add', 'Mul'])}({one}, {other})"))


def _broadcast(draw: Sequences) -> None:
    shape = draw.source.choice([(WIDTH,), (1, 1, WIDTH), (STEPS, 1), (STEPS, WIDTH)])
    draw.keep(draw.either(draw.source.choice(["Add", "Mul"]), draw.x, draw.weight(*shape)))


def _lookup(draw: Sequences) -> None:
    draw.keep(draw.either("Add", draw.x, draw.node("Gather(w_table, ids)")))


_PARTS = [_rms_norm, _layer_norm, _activation, _activation, _linear, _linear, _by_gemm, _gated, _attention, _attention,
          _thin, _recurrent, _convolution, _sum, _sum, _broadcast, _lookup]  # fmt: skip


def draw_sequences(seed: int, dtype: Any = np.float32) -> onnx.ModelProto:
    """A network of ids and x [batch, 5, 8] with result `logits` [batch, 300] and, now and then, an inner value."""
    draw = Sequences(seed, dtype)
    draw.opset = draw.source.randint(11, 22)
    draw.stored["w_table"] = draw.stored.pop(draw.weight(CLASSES, WIDTH))
    draw.keep(draw.either("Add", draw.node("Gather(w_table, ids)"), "x"))
    for _ in range(draw.source.randint(3, 8)):
        draw.source.choice(_PARTS)(draw)
    mean = draw.without_axis(draw.reduced("ReduceMean", draw.x, 1), 1)
    if draw.chance(0.4):
        turned = draw.node("Transpose<perm=[1,0]>(w_table)")
        draw.lines.append(f"logits = MatMul({mean}, {turned})")
    else:
        draw.lines.append(f"logits = Gemm<transB=1>({mean}, {draw.weight(CLASSES, WIDTH)}, {draw.weight(CLASSES)})")
    kind = "double" if dtype is np.float64 else "float"
    outputs = f"{kind}[batch,{CLASSES}] logits"
    inner = draw.source.choice(draw.values)[0]
    if draw.chance(0.3):
        outputs += f", {kind}[batch,{STEPS},{WIDTH}] {inner}"
    inputs = f"int64[batch,{STEPS}] ids, {kind}[batch,{STEPS},{WIDTH}] x"
    return parse(inputs, outputs, "\n".join(draw.lines), draw.stored, draw.opset)


def sequence_data(samples: int, dtype: Any = np.float32) -> Mapping[str, np.ndarray]:
    """Ids count from the end of the table, too."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(samples, STEPS, WIDTH)).astype(np.float32).astype(dtype)
    ids = numbers.integers(-CLASSES, CLASSES, (samples, STEPS))
    ids[:, :2] = 7
    return {"ids": ids, "x": x, "labels": numbers.integers(0, CLASSES, samples)}
