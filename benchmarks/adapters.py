"""LoRA here against `peft` on the original module: time of an update and memory beside the frozen weights, in one run.

    python -m benchmarks.adapters [--layers 8] [--width 512] [--tokens 256] [--batch 4] [--rank 8]

Both train adapters of the same small Llama with AdamW, each in a process of its own, in turns; medians are compared.
Memory is what the process holds at its peak above what it holds with the network built, so that the frozen weights,
which both hold once, count for neither.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def network(options: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=1024, hidden_size=options.width, num_hidden_layers=options.layers, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=options.width * 3, max_position_embeddings=options.tokens,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


class Logits(nn.Module):
    """The network from tokens to logits."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(tokens, use_cache=False).logits
        return logits


def of_peft(options: argparse.Namespace) -> nn.Module:
    import peft

    net = network(options)
    config = peft.LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=TARGETS)
    net.inner = peft.get_peft_model(net.inner, config)  # type: ignore[arg-type]
    return net


def of_onward(options: argparse.Namespace) -> nn.Module:
    import onward
    from onward.engine.network.network import LinearOptions, Network
    from onward.parameters import Adapter
    from onward.plan.costs.segments import SegmentPlan

    net = onward.to_torch(options.model, adapter=Adapter(rank=options.rank))
    plan = SegmentPlan(count=1, segment_of={}, readers=dict.fromkeys(net.graph.weights, (0,)), recomputed=frozenset())
    return _Run(Network(net, plan, None, LinearOptions(True, True)), net)


class _Run(nn.Module):
    """What a run of one process computes: the network in the form that training has it."""

    def __init__(self, network: Any, net: Any) -> None:
        super().__init__()
        from onward.engine.network.forward import Forward
        from onward.engine.network.precision import Precision

        self.net = net
        self._forward = Forward(network, tuple(str(v.name) for v in net.graph.model.graph.outputs), Precision(None))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        name = str(self.net.graph.model.graph.inputs[0].name)
        values = self._forward({name: tokens})
        result: torch.Tensor = next(iter(values.values()))
        return result


def measure(options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(options.threads)
    net = {"peft": of_peft, "onward": of_onward}[options.side](options)
    net.train()
    own = net.net.weights.values() if isinstance(net, _Run) else net.parameters()
    trained = [parameter for parameter in own if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    tokens = torch.randint(0, 1024, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1))
    before = _held_bytes()
    _reset_peak()
    seconds, losses = [], []
    for _ in range(options.steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds[2:]),
        "bytes": _peak_bytes() - before,
        "parameters": sum(p.numel() for p in trained),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("width", 512), ("tokens", 256), ("batch", 4), ("rank", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", choices=("peft", "onward"))
    parser.add_argument("--model")
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.model = str(Path(folder) / "model.onnx")
        tokens = torch.zeros((options.batch, options.tokens), dtype=torch.int64)
        torch.onnx.export(network(options).eval(), (tokens,), options.model, dynamo=True, verbose=False)
        found: dict[str, list[dict[str, float]]] = {"peft": [], "onward": []}
        for _ in range(options.turns):
            for side, results in found.items():
                command = [sys.executable, "-m", "benchmarks.adapters", "--side", side, "--model", options.model]
                for name in ("layers", "width", "tokens", "batch", "rank", "threads", "steps"):
                    command += [f"--{name}", str(getattr(options, name))]
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                results.append(json.loads(output.splitlines()[-1]))
    medians = {
        side: {name: statistics.median(one[name] for one in results) for name in results[0]}
        for side, results in found.items()
    }
    print(f"{'':8}{'update':>12}{'memory':>14}{'trained':>12}{'first loss':>12}{'last loss':>12}")
    for side, one in medians.items():
        print(
            f"{side:8}{1e3 * one['seconds']:9.0f} ms{one['bytes'] / 1e6:11.0f} MB{one['parameters']:12,.0f}"
            f"{one['first_loss']:12.5f}{one['last_loss']:12.5f}"
        )
    ratios = [medians["onward"][name] / medians["peft"][name] for name in ("seconds", "bytes")]
    print(f"onward / peft: time {ratios[0]:.2f} (goal 1.00), memory {ratios[1]:.2f} (goal 0.80)")


if __name__ == "__main__":
    main()
