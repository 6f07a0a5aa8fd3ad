"""Trigonometric and hyperbolic functions and their inverses, element by element."""

from __future__ import annotations

import torch

from onward.lowering.registry import lowers

for _op_type in ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan"):
    lowers(_op_type, since=7, inputs=("input",))(getattr(torch, _op_type.lower()))
for _op_type in ("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"):
    lowers(_op_type, since=9, inputs=("input",))(getattr(torch, _op_type.lower()))
