"""Models for checks of gradients of operators of which the standard has no case in floats, or none of a single node."""

from __future__ import annotations

from typing import Any

import torch


def _model(signature: str, body: str, opset: int, domain: str = "", stored: str = "") -> str:
    imports = f'"" : {opset}' + (f', "{domain}" : 1' if domain else "")
    return f"<ir_version: 8, opset_import: [{imports}]> g {signature} <{stored}> {{ {body} }}"


_X = "(double[n, c, h, w] x) => (double[a, b, d, e] y)"
_PAIR = "(double[n] a, double[n] b) => (double[m] y)"
_TRAINING = "ai.onnx.preview.training"

SUPPLEMENTS: tuple[tuple[tuple[str, str], str, tuple[Any, ...]], ...] = (
    *((("", "GlobalLpPool"), _model(_X, f"y = GlobalLpPool<p = {p}>(x)", v), ((2, 2, 3, 2),)) for p in (1, 2, 3)
      for v in (2, 22)),
    (("", "GlobalLpPool"), _model(_X, "y = GlobalLpPool<p = 2.0>(x)", 1), ((2, 2, 3, 2),)),
    *((("", "Trilu"), _model("(double[n, m] x) => (double[n, m] y)", f"y = Trilu<upper = {upper}>(x)", 14), ((3, 4),))
      for upper in (0, 1)),
    *((("", "MaxRoiPool"),
       _model("(double[n, c, h, w] x, double[r, 5] rois) => (double[r, c, a, b] y)",
              f"y = MaxRoiPool<pooled_shape = [2, 2], spatial_scale = {scale}>(x, rois)", v),
       ((1, 2, 6, 6), torch.tensor([[0.0, 1, 1, 4, 5], [0, 0, 2, 3, 3]])))
      for scale in ("1.0", "0.5") for v in (1, 22)),
    *((("", "If"),
       _model("(bool c, double[n] a) => (double[n] y)",
              "y = If(c) <then_branch = t () => (double[n] p) { p = Neg(a) }, "
              "else_branch = e () => (double[n] q) { q = Mul(a, a) }>", v),
       (torch.tensor(flag), (3,)))
      for flag in (True, False) for v in (1, 11, 13, 16, 21, 25)),
    (("", "SequenceConstruct"), _model(_PAIR, "s = SequenceConstruct(a, b) i = Constant<value_int = 1>() "
                                       "y = SequenceAt(s, i)", 13), ((3,), (3,))),
    (("", "SequenceAt"), _model(_PAIR, "s = SequenceConstruct(a, b) i = Constant<value_int = 0>() "
                                "y = SequenceAt(s, i)", 13), ((3,), (3,))),
    (("", "SequenceInsert"), _model(_PAIR, "s = SequenceConstruct(a) t = SequenceInsert(s, b) "
                                    "i = Constant<value_int = 1>() y = SequenceAt(t, i)", 13), ((3,), (3,))),
    (("", "SequenceErase"), _model(_PAIR, "s = SequenceConstruct(a, b) i = Constant<value_int = 0>() "
                                   "t = SequenceErase(s, i) y = SequenceAt(t, i)", 13), ((3,), (3,))),
    *((("", "ConcatFromSequence"),
       _model("(double[n] a, double[n] b) => (double[m, k] y)",
              f"s = SequenceConstruct(a, b) y = ConcatFromSequence<axis = {axis}, new_axis = 1>(s)", 13),
       ((3,), (3,)))
      for axis in (0, 1, -1)),
    (("", "ConcatFromSequence"), _model(_PAIR, "s = SequenceConstruct(a, b) y = ConcatFromSequence<axis = 0>(s)", 13),
     ((3,), (2,))),
    *((("", "Optional"), _model("(double[n] a) => (double[n] y)", "o = Optional(a) y = OptionalGetElement(o)", v),
       ((3,),)) for v in (15, 18)),
    (("", "LayerNormalization"),
     _model("(double[n, m] x, double[m] s, double[m] b) => (double[n, m] y)",
            "y = LayerNormalization<axis = -1, stash_type = 11>(x, s, b)", 13), ((2, 4), (4,), (4,))),
    (("", "SimplifiedLayerNormalization"),
     _model("(double[n, m] x, double[m] s) => (double[n, m] y)",
            "y = SimplifiedLayerNormalization<axis = -1, stash_type = 11>(x, s)", 17), ((2, 4), (4,))),
    *((("", "Resize"), _model(_X, f"y = Resize<mode = \"{mode}\">(x, k)", 10, stored="float[4] k = {1, 1, 2, 1.5}"),
       ((1, 2, 2, 2),)) for mode in ("nearest", "linear")),
    *((("", "Upsample"), _model(_X, f"y = Upsample<mode = \"{mode}\", scales = [1.0, 1.0, 2.0, 3.0]>(x)", 7),
       ((1, 2, 2, 2),)) for mode in ("nearest", "linear")),
    *((("", "Upsample"),
       _model(_X, f"y = Upsample<mode = \"{mode}\", height_scale = 2.0, width_scale = 3.0>(x)", 1), ((1, 2, 2, 2),))
      for mode in ("nearest", "bilinear")),
    (("", "Pad"), _model("(double[n, m] x) => (double[a, b] y)", "y = Pad<paddings = [0, 1, 2, 0]>(x)", 1), ((2, 2),)),
    (("", "Tile"), _model("(double[n, m] x) => (double[a, b] y)", "y = Tile(x, t, u)", 1,
                          stored="float t = {2}, float u = {1}"), ((2, 2),)),
    (("", "Cast"), _model("(double[n] x) => (double[n] y)", "y = Cast<to = \"DOUBLE\">(x)", 1), ((3,),)),
    *((("", "PRelu"), _model("(double[n, c, m] x, double[k] s) => (double[n, c, m] y)",
                             "z = Sub(x, h) y = PRelu(z, s)", v,
                             stored="double[2, 3, 2] h = {" + ", ".join(["0.3", "0.7"] * 6) + "}"),
       ((2, 3, 2), (size,))) for size in (1, 3) for v in (1, 6)),
    *((("", "GroupNormalization"),
       _model("(double[n, c, m] x, double[g] s, double[g] b) => (double[n, c, m] y)",
              f"y = GroupNormalization<num_groups = {groups}>(x, s, b)", 18), ((2, 4, 3), (groups,), (groups,)))
      for groups in (1, 2, 4)),
    *((("", "RoiAlign"),
       _model("(double[n, c, h, w] x, double[r, 4] rois, int64[r] i) => (double[r, c, a, b] y)",
              f"y = RoiAlign<mode = \"{mode}\", output_height = 2, output_width = 2, sampling_ratio = 2>(x, rois, i)",
              10),
       ((1, 2, 6, 6), torch.tensor([[1.0, 1, 4, 5], [2, 0, 3, 3]]), torch.tensor([0, 0]))) for mode in ("avg", "max")),
    (("", "Split"), _model("(double[n] x) => (double[a] y, double[b] z)", "y, z = Split<axis = 0, split = [1, 2]>(x)",
                           1), ((3,),)),
    *((("", op), _model("(double[n, m] x, double[m] b) => (double[n, m] y)",
                        f"y = {op}<broadcast = 1, axis = 1>(x, b)", v),
       ((2, 3), (3,))) for op in ("Add", "Sub", "Mul", "Div", "Pow") for v in (1, 6)),
    (("", "Gemm"), _model("(double[n, k] a, double[k, m] b, double[m] c) => (double[n, m] y)",
                          "y = Gemm<alpha = 0.5, beta = 2.0, broadcast = 1>(a, b, c)", 6), ((2, 3), (3, 4), (4,))),
    (("ai.onnx.ml", "ArrayFeatureExtractor"),
     _model("(double[n, m] x) => (double[n, k] y)", "y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", 17, "ai.onnx.ml",
            "int64[3] i = {2, 0, 2}"), ((2, 3),)),
    ((_TRAINING, "Gradient"),
     _model("(double[n] a, double[n] b) => (double[n] y)",
            "p = Sin(a) q = Mul(p, b) o = ReduceSum<keepdims = 0>(q) "
            f"y = {_TRAINING}.Gradient<xs = [\"a\"], zs = [\"b\"], y = \"o\">(a, b)", 13, _TRAINING),
     ((3,), (3,))),
)  # fmt: skip
"""(domain, operator), model in onnx's textual form, and for every input a shape of random numbers or the tensor."""

_IDS = torch.tensor([[0, 2, 1], [3, 0, 2]])
_TABLE = (4, 2)
_PACKED = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
_NORM = {"activation": 1, "groups": 2}
_GROUPED = {
    "q": (1, 2, 8), "k": (1, 2, 4), "v": (1, 2, 4), "past_k": (1, 1, 1, 4), "past_v": (1, 1, 1, 4),
    "last": torch.tensor([2], dtype=torch.int32), "total": torch.tensor(3, dtype=torch.int32),
}  # fmt: skip

MICROSOFT: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    *(("FusedMatMul", {"a": (2, 3, 3), "b": (2, 3, 3)}, {"alpha": 0.5, "transA": a, "transB": b}) for a in (0, 1)
      for b in (0, 1)),
    ("FusedMatMul", {"a": (2, 3, 2), "b": (3, 2, 2)}, {"transBatchA": 1}),
    ("FusedMatMul", {"a": (3, 2, 2), "b": (2, 3, 2)}, {"transBatchB": 1}),
    ("TransposeMatMul", {"a": (2, 3, 2), "b": (2, 3, 4)}, {"transA": 1}),
    *(("FusedMatMulActivation", {"a": (2, 3), "b": (3, 2)}, {"activation": name, "activation_axis": -1})
      for name in ("Softmax", "Tanh", "Sigmoid")),
    *(("FusedGemm", {"a": (2, 3), "b": (3, 2), "c": (2,)}, {"activation": name, **extra}) for name, extra in (
        ("Tanh", {}), ("Sigmoid", {}), ("LeakyRelu", {"activation_alpha": 0.2}), ("Tanh", {"beta": 0.5, "transA": 0}))),
    ("GemmFastGelu", {"x": (2, 3), "w": (3, 4), "bias": (4,)}, {}),
    *(("FusedConv", {"x": (1, 2, 4, 4), "w": (2, 2 // group, 2, 2), "b": (2,), "z": (1, 2, 3, 3)},
       {"activation": name, "group": group}) for name in ("Tanh", "Sigmoid") for group in (1, 2)),
    *(("NhwcConv", {"x": (1, 4, 4, 2), "w": (2, 2, 2, 2), "b": (2,)}, extra) for extra in (
        {}, {"strides": [2, 2]}, {"pads": [1, 0, 0, 1]})),
    ("Gelu", {"x": (3, 2)}, {}),
    ("BiasGelu", {"a": (3, 2), "b": (2,)}, {}),
    ("FastGelu", {"x": (3, 2)}, {}),
    ("FastGelu", {"x": (3, 2), "bias": (2,)}, {}),
    *(("QuickGelu", {"x": (3, 2)}, {"alpha": alpha}) for alpha in (1.0, 1.702)),
    ("BiasSplitGelu", {"x": (2, 2, 8), "bias": (8,)}, {}),
    ("BiasAdd", {"x": (2, 3, 4), "bias": (4,), "skip": (2, 3, 4)}, {}),
    *(("BiasSoftmax", {"data": (2, 3, 2), "bias": (1, 3, 2)}, {"axis": axis, "is_inner_broadcast": 0})
      for axis in (1, 2)),
    ("BiasDropout", {"data": (2, 3), "bias": (3,)}, {}),
    ("BiasDropout", {"data": (2, 3), "bias": (3,), "residual": (2, 3)}, {}),
    ("Inverse", {"x": (2, 2, 2)}, {}),
    ("GridSample", {"X": (1, 2, 4, 3), "Grid": torch.linspace(-0.7, 0.6, 8).reshape(1, 2, 2, 2)}, {"mode": "bilinear"}),
    ("RelativePositionBias", {"table": (8, 2), "queries": torch.tensor([3]), "keys": torch.tensor([5])},
     {"max_distance": 4}),
    *(("Trilu", {"x": (3, 3)}, {"upper": upper}) for upper in (0, 1)),
    ("ExpandDims", {"x": (2, 3), "axis": torch.tensor(1, dtype=torch.int32)}, {}),
    ("SkipLayerNormalization", {"x": (2, 2, 4), "skip": (2, 2, 4), "gamma": (4,), "beta": (4,), "bias": (4,)},
     {"epsilon": 1e-3}),
    ("SkipSimplifiedLayerNormalization", {"x": (2, 2, 4), "skip": (2, 2, 4), "gamma": (4,), "bias": (4,)},
     {"epsilon": 1e-3}),
    *(("GroupNorm", {"x": (1, 2, 2, 4), "gamma": (4,), "beta": (4,)}, {**_NORM, "activation": activation})
      for activation in (0, 1)),
    ("GroupNorm", {"x": (1, 4, 2, 2), "gamma": (4,), "beta": (4,)}, {**_NORM, "channels_last": 0}),
    ("SkipGroupNorm", {"x": (1, 2, 2, 4), "gamma": (4,), "beta": (4,), "skip": (1, 4), "bias": (4,)}, _NORM),
    ("SkipGroupNorm", {"x": (1, 2, 2, 4), "gamma": (4,), "beta": (4,), "skip": (1, 2, 2, 4)}, _NORM),
    ("EmbedLayerNormalization",
     {"ids": _IDS.int(), "segments": (_IDS % 2).int(), "words": (4, 4), "positions": (3, 4), "kinds": (2, 4),
      "gamma": (4,), "beta": (4,)}, {"epsilon": 1e-3}),
    *(("Attention", {"x": (1, 3, 4), "w": (4, 12), "b": (12,)}, {"num_heads": 2, "unidirectional": one})
      for one in (0, 1)),
    *(("MultiHeadAttention", {"q": (1, 2, 4), "k": (1, 3, 4), "v": (1, 3, 4), "b": (12,)}, {"num_heads": 2, **extra})
      for extra in ({}, {"scale": 0.3})),
    *(("RotaryEmbedding", {"x": (2, 3, 8), "places": _IDS, "cos": _TABLE, "sin": _TABLE},
       {"num_heads": 2, "interleaved": one}) for one in (0, 1)),
    *(("GroupQueryAttention", _GROUPED, {"num_heads": 2, "kv_num_heads": 1, **extra}) for extra in (
        {}, {"scale": 0.3}, {"softcap": 2.0}, {"local_window_size": 2})),
    *(("MoE", {"x": (3, 2), "router": (3, 3), "w1": (3, 2, 2), "b1": (3, 2), "w2": (3, 2, 2), "b2": (3, 2)},
       {"k": k, "activation_type": name, "normalize_routing_weights": 1})
      for k in (1, 2) for name in ("gelu", "silu")),
    ("MatMulNBits", {"a": (2, 16), "b": _PACKED, "scales": (6,)}, {"K": 16, "N": 3, "bits": 4, "block_size": 8}),
    ("MatMulBnb4", {"a": (2, 16), "b": _PACKED, "absmax": (3,)}, {"K": 16, "N": 3, "block_size": 16, "quant_type": 1}),
)  # fmt: skip
"""Operator of com.microsoft, for every input a shape of random numbers, a tensor or None, and its attributes."""
