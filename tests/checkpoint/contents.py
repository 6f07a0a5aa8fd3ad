"""Contents of checkpoints for the tests: tensors of every kind that a run has."""

from __future__ import annotations

import torch

RECORD = {
    "update": 7,
    "round": 0,
    "cursor": {"file": 3, "sample": 12},
    "loss_scale": 65536.0,
    "name": "ein Lauf",
    "x": None,
}


def every_kind(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every dtype a run may hold, 0-d, empty, strided and expanded tensors, and names with odd characters."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(40, 30, generator=generator)
    return {
        "weights/h.0.attn.weight": whole,
        "weights/bf16": torch.randn(7, 3, generator=generator).bfloat16(),
        "weights/f16": torch.randn(5, generator=generator).half(),
        "weights/f64": torch.randn(5, generator=generator).double(),
        "weights/f8": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
        "weights/complex": torch.randn(2, dtype=torch.complex64, generator=generator),
        "weights/of a 'model'\n\"/\\..//é漢\x00": torch.randn(3, generator=generator),
        "weights/view": whole[3:9, ::2],
        "weights/transposed": whole.t(),
        "weights/expanded": torch.randn(1, 4, generator=generator).expand(3, 4),
        "weights/parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
        "weights/tied": whole,
        "slots/step/w": torch.tensor(float(seed)),
        "states/mask": torch.rand(9, generator=generator) > 0.5,
        "states/empty": torch.empty(0, 3),
        "states/i64": torch.randint(-(2**62), 2**62, (3,), generator=generator),
        "states/u16": torch.arange(5).to(torch.uint16),
        "random/torch": generator.get_state(),
        "": torch.arange(3),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*flat)


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New tensors of the same names, shapes and dtypes."""
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
