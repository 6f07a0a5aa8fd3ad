"""What becomes of every operator of the standard: computed, expanded to simpler ones, or refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from onward.graph.classical.passes import is_rewritten
from onward.graph.nodes.structure import ML_DOMAIN
from onward.graph.reading.expansion import is_expandable
from onward.lowering.lowered_operators import has_lowering

_STRINGS = "it computes with strings, which torch tensors cannot hold; prepare text before the model"

_MAPS = "it computes with maps, which torch has no type for; give the model the tensor that the map stands for"

REFUSED: Mapping[tuple[str, str], str] = {
    (ML_DOMAIN, "CastMap"): _MAPS,
    (ML_DOMAIN, "CategoryMapper"): _STRINGS,
    (ML_DOMAIN, "DictVectorizer"): _MAPS,
    ("", "ImageDecoder"): "it decodes image files; decode them while packing the data",
    ("", "RegexFullMatch"): _STRINGS,
    ("", "StringConcat"): _STRINGS,
    ("", "StringNormalizer"): _STRINGS,
    ("", "StringSplit"): _STRINGS,
}
"""(domain, operator) -> why it is not computed."""

REFUSED_DOMAINS: Mapping[str, str] = {
    "com.microsoft.nchwc": "onnxruntime saved the model in the blocked layout of one kind of processor; save it with "
    "ORT_ENABLE_EXTENDED instead of ORT_ENABLE_ALL",
}
"""Domain -> why none of its operators are computed, unless one has a lowering."""

Fate = Literal["lowered", "expanded", "refused", "missing"]


def why_refused(domain: str, op_type: str) -> str | None:
    """Why an operator without a lowering is not computed; None if nothing is known of it."""
    return REFUSED.get((domain, op_type)) or REFUSED_DOMAINS.get(domain)


def fate_of(domain: str, op_type: str, version: int) -> Fate:
    """What becomes of an operator at an opset version of its domain."""
    if has_lowering(domain, op_type, version):
        return "lowered"
    if is_rewritten(domain, op_type) or is_expandable(domain, op_type, version):
        return "expanded"
    return "missing" if why_refused(domain, op_type) is None else "refused"
