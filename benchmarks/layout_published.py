"""The price model of `onward plan --ranks` against published runs: `python -m benchmarks.layout_published`.

The transformers are written down as the arrays that a graph would be counted into, layer by layer. Printed is, for
every published run, the step time forecast for its layout, and the layout that the search chooses for the same
ranks, samples and memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onward.plan.search.choosing import choose_layout
from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.network import NetworkWork
from onward.plan.search.pricing import Pricing


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a decoder.

    Attributes:
        layers, width, heads, vocabulary, tokens: of the network; tokens of a sample.
        hidden: of the MLP.
        key_heads: heads of keys and values; None: as many as there are of queries.
        is_gated: whether the MLP has a gate, and the norms no bias, as in Llama.
        attention: whether its scores are `kept` for the backward pass, `recomputed`, or never written (`fused`).
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 51200
    tokens: int = 2048
    hidden: int = 0
    key_heads: int | None = None
    is_gated: bool = False
    attention: str = "kept"

    def operators(self) -> Iterator[dict[str, float]]:
        """Of one sample, in bf16: activations count two bytes; bytes of kept tensors as Korthikanti et al. do."""
        s, h, f = self.tokens, self.width, self.hidden or 4 * self.width
        keys = h * (self.key_heads or self.heads) // self.heads
        # Llama has no dropout; norms and SwiGLU are computed again where a matmul reads them (`cheap_activations`).
        matrices, norm, read = (3, 2 * s * h, 0) if self.is_gated else (2, 5 * s * h, 2 * s)
        yield {"trained": self.vocabulary * h, "split": 1, **dict.fromkeys(("moved", "made", "forward_sum"), 2 * s * h)}
        for _ in range(self.layers):
            yield from self._attention(s, h, keys, read * h)
            yield {"moved": 8 * s * h, "kept": norm}
            yield _matmul(s, h, f * (matrices - 1)) | {"kept": read * h, "backward_sum": 2 * s * h}
            yield {"moved": 2 * s * f * matrices, "kept": 2 * s * f * (matrices - 1), "split": 1}
            yield _matmul(s, f, h) | {"kept": read * f, "forward_sum": 2 * s * h}
            yield {"moved": 8 * s * h, "kept": norm, "ends": 1}
        yield _matmul(s, h, self.vocabulary) | {"kept": read * h, "backward_sum": 2 * s * h}
        yield {"moved": 12 * s * self.vocabulary, "kept": 4 * s * self.vocabulary, "split": 1}

    def _attention(self, s: int, h: int, keys: int, read: int) -> Iterator[dict[str, float]]:
        yield _matmul(s, h, h + 2 * keys) | {"kept": read, "backward_sum": 2 * s * h}
        scores = self.heads * s * s
        core = {"forward": 4.0 * s * s * h, "kept": 2 * s * (h + 2 * keys), "moved": 2 * s * (h + 2 * keys), "split": 1}
        core["backward"] = 2 * core["forward"]
        if self.attention == "fused":  # half of the scores are never computed; the backward pass computes them again
            yield core | {"forward": core["forward"] / 2, "backward": 1.25 * core["forward"]}
        elif self.attention == "recomputed":
            yield core | {"backward": 3 * core["forward"], "moved": core["moved"] + 12 * scores}
        else:
            yield core | {"kept": core["kept"] + 5 * scores, "moved": core["moved"] + 12 * scores}
        yield _matmul(s, h, h) | {"kept": 2 * s * h, "forward_sum": 2 * s * h}

    def work(self, tokens_shared: bool = True) -> NetworkWork:
        """As `count_work` would count a graph of it."""
        rows = list(self.operators())
        ends = np.array([bool(row.get("ends")) for row in rows])
        block = np.concatenate([[0], np.cumsum(ends)[:-1]])

        def column(name: str) -> np.ndarray:
            return np.array([float(row.get(name, 0.0)) for row in rows])

        split = column("split") > 0
        count = int(block[-1]) + 1
        return NetworkWork(
            block=block,
            forward=column("forward"),
            backward=column("backward"),
            moved=column("moved"),
            kept=column("kept"),
            kept_exactly=np.zeros(len(rows)),
            kept_once=np.zeros(len(rows)),
            made=column("made"),
            made_once=np.zeros(len(rows)),
            read=2 * column("trained"),
            is_differentiated=column("kept") + column("backward") > 0,
            is_split=split,
            is_token_split=np.ones(len(rows), dtype=bool),
            is_ahead=np.zeros(len(rows), dtype=bool),
            trained=column("trained"),
            trained_split=column("trained") * split,
            frozen=np.zeros(len(rows)),
            reduced_forward=column("forward_sum"),
            reduced_backward=column("backward_sum"),
            sent=np.append(np.full(count - 1, 2.0 * self.tokens * self.width), 0.0),
            is_narrow=np.append(np.ones(count - 1, dtype=bool), False),
            tensor_sizes=tuple(n for n in range(1, 9) if (self.key_heads or self.heads) % n == 0),
            token_size=self.tokens if tokens_shared else 1,
            width=2.0,
        )


def _matmul(rows: int, width: int, out: int) -> dict[str, float]:
    forward = 2.0 * rows * width * out
    elements = float(width * out)
    moved = 2.0 * rows * (width + out)
    return {"forward": forward, "backward": 2 * forward, "trained": elements, "moved": moved, "split": 1}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run that somebody measured.

    Attributes:
        name: of the model.
        network: of it.
        gpu: as `KNOWN` has it.
        layout: of the run.
        seconds: of an update.
        is_sequence_parallel: whether their trainer could share tokens.
    """

    name: str
    network: Transformer
    gpu: str
    layout: Layout
    seconds: float
    is_sequence_parallel: bool = False

    def settings(self) -> Settings:
        """Of the search, with the same ranks and samples."""
        one = self.layout
        return Settings(
            ranks=one.ranks,
            samples=one.data * one.batch_size * one.micro_batches,
            memory_bytes=KNOWN[self.gpu].device.memory_bytes,
            precision="bf16",
            schedules=("1F1B", "Interleaved1F1B"),
            holds_received=False,  # Megatron uses its buffers again
            fuses_accumulation=True,
        )


GPT_175B = Transformer(layers=96, width=12288, heads=96)
GPT_530B = Transformer(layers=105, width=20480, heads=128)
LLAMA_405B = Transformer(
    layers=126, width=16384, heads=128, key_heads=8, hidden=53248, vocabulary=128256, tokens=8192, is_gated=True,
    attention="fused",
)  # fmt: skip


def _narayanan() -> Iterator[Published]:
    """Table 2 of arXiv 2104.04473: everything recomputed; seconds are those of its operations at its TFLOP/s a GPU."""
    rows = [(GPT_175B, "GPT-3 175B", 12, 1536, {384: 153, 768: 149, 1536: 141}),
            (GPT_530B, "GPT 530B", 35, 2240, {560: 171, 1120: 167, 2240: 159})]  # fmt: skip
    for network, name, pipeline, samples, measured in rows:
        n, s, h, v = network.layers, network.tokens, network.width, network.vocabulary
        operations = 96.0 * samples * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
        for ranks, teraflops in measured.items():
            data = ranks // (8 * pipeline)
            layout = Layout(data=data, horizontal=8, pipeline=pipeline, micro_batches=samples // data, kept=0.0)
            yield Published(
                name=name, network=network, gpu="a100", layout=layout, seconds=operations / (ranks * teraflops * 1e12)
            )


def _korthikanti() -> Iterator[Published]:
    """Table 5 of arXiv 2205.05198: iteration times with everything recomputed, and with sequence parallelism and
    attention recomputed."""
    rows = [
        ("GPT 22B", Transformer(layers=48, width=6144, heads=64), Layout(horizontal=8, batch_size=4), 1.42, 1.10),
        ("GPT-3 175B", GPT_175B, Layout(horizontal=8, pipeline=8, stages_per_rank=3, micro_batches=64), 18.13, 13.75),
        ("GPT 530B", GPT_530B, Layout(horizontal=8, pipeline=35, stages_per_rank=3, micro_batches=280), 49.05, 37.83),
        ("GPT 1T", Transformer(layers=128, width=25600, heads=160),
         Layout(horizontal=8, pipeline=64, micro_batches=512), 94.42, 71.49),
    ]  # fmt: skip
    for name, network, layout, full, selective in rows:
        layout = replace(layout, schedule="Interleaved1F1B" if layout.stages_per_rank > 1 else "1F1B")
        yield Published(name=name, network=network, gpu="a100", layout=replace(layout, kept=0.0), seconds=full)
        yield Published(
            name=name,
            network=replace(network, attention="recomputed"),
            gpu="a100",
            layout=replace(layout, sequence_parallel=True),
            seconds=selective,
            is_sequence_parallel=True,
        )


def _llama() -> Iterator[Published]:
    """Table 4 of arXiv 2407.21783: 16 Mi tokens an update at 430 and 400 TFLOP/s a GPU."""
    for ranks, teraflops in ((8192, 430), (16384, 400)):
        data = ranks // 128
        layout = Layout(
            data=data, horizontal=8, pipeline=16, stages_per_rank=4, schedule="Interleaved1F1B", zero_stage=1,
            micro_batches=2048 // data, sequence_parallel=True,
        )  # fmt: skip
        operations = LLAMA_405B.work().operations(2048)
        attention = 0.25 * 4.0 * 8192**2 * 16384 * 126 * 2048  # computed again in the backward pass: no model FLOPs
        yield Published(
            name="Llama 3 405B",
            network=LLAMA_405B,
            gpu="h100",
            layout=layout,
            seconds=(operations - attention) / (ranks * teraflops * 1e12),
            is_sequence_parallel=True,
        )


def published() -> tuple[Published, ...]:
    """All runs."""
    return (*_narayanan(), *_korthikanti(), *_llama())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| model | GPUs | layout | published s | forecast s | chosen by the search | forecast s |")
    print("|---|---|---|---|---|---|---|")
    for run in published():
        work, cluster = run.network.work(run.is_sequence_parallel), KNOWN[run.gpu]
        priced = Pricing(work, cluster, run.settings()).estimate(run.layout)
        chosen = choose_layout([work], cluster, run.settings()).chosen
        print(
            f"| {run.name} | {run.layout.ranks} {run.gpu} | {run.layout} | {run.seconds:.2f} | "
            f"{priced.total_seconds:.2f} ({priced.total_seconds / run.seconds - 1:+.0%}) | {chosen.layout} | "
            f"{chosen.total_seconds:.2f} |"
        )


if __name__ == "__main__":
    main()
