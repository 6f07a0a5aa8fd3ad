"""What fusing mixtures of experts gains: `python -m benchmarks.experts [--experts 8] [--width 128] [FORM ...]`.

Exports a mixture in each form in which people write them (`tests/graph/mixtures.py`), and prints the median CPU time of
a forward and backward pass without and with the fusion, taken in turns in one process, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tests.graph import mixtures

import onward
from onward.lowering.module import OnnxModule


def seconds(net: OnnxModule, x: torch.Tensor) -> float:
    """CPU time of a pass in both directions."""
    net.zero_grad()
    started = time.process_time()
    net(x).square().mean().backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", metavar="FORM", default=[kind.__name__ for kind in mixtures.MIXTURES])
    for name, default in (("experts", 8), ("width", 128), ("hidden", 256), ("tokens", 512), ("steps", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    mixtures.EXPERTS, mixtures.WIDTH, mixtures.HIDDEN = arguments.experts, arguments.width, arguments.hidden
    print(f"{'form':<16}{'unfused ms':>12}{'fused ms':>12}{'ratio':>8}")
    for kind in mixtures.MIXTURES:
        if kind.__name__ not in arguments.forms:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = mixtures.exported(kind, Path(folder) / "m.onnx", torch.float32)
            nets = [onward.to_torch(path, fusions_off=off) for off in (("experts",), ())]
        x = torch.randn(-(-arguments.tokens // 6), 6, arguments.width)
        times: list[list[float]] = [[seconds(net, x) for net in nets] for _ in range(arguments.steps + 2)][2:]
        plain, fused = (statistics.median(one) * 1e3 for one in zip(*times, strict=True))
        print(f"{kind.__name__:<16}{plain:>12.2f}{fused:>12.2f}{fused / plain:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
