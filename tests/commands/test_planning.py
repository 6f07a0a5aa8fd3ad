"""`onward plan`: what it prints, draws and refuses."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onward.cli import main
from onward.commands import calibration
from onward.models import create_model
from onward.parallel.communication_trial import CommunicationSpeed
from tests.mlp import write_shards
from tests.plan.staged_models import first_stage, second_stage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = create_model("gpt2", size="tiny", layers=2, heads=2, width=16, vocab_size=64, context_length=8, dropout=0.0)
    ir.save(model, tmp_path / "model.onnx")
    path = tmp_path / "run.yaml"
    path.write_text(
        """
paths: {model_path: model.onnx}
loss: {type: softmax_cross_entropy, prediction: logits, label: labels}
training: {batch_size: 2, num_train_steps: 4, gradient_accumulation_steps: 4, mapped_dimensions: {sequence: 8}}
learning_rate: {initial_lr: 0.001}
optimizer: {training_optimizer_name: AdamW}
"""
    )
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", *map(str, arguments)]) == 2
    return capsys.readouterr().err.strip()


EIGHT = (
    "--distributed.data_parallel_size=2", "--distributed.horizontal_parallel_size=2",
    "--distributed.pipeline_parallel_size=2", "--distributed.zero_stage=2",
)  # fmt: skip


def test_one_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run)
    assert "ranks        1 = 1 data x 1 tensor x 1 pipeline; 4 micro-batches per update" in text
    assert re.search(r"h\.\*\.mlp\.c_fc\.weight +2 +16x64 +2,048 +unsharded +- +-", text)
    assert "none: there is one rank" in text
    assert "Peak tensor memory: " in text
    assert "(rank 0). Pass --memory-gb to check whether it fits." in text
    assert re.search(r"^  rank 0 holds \d+ tensors, [\d,.]+( M)? parameters$", text, re.MULTILINE)
    assert "Schedule" not in text


def test_eight_ranks_are_planned_without_starting_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, *EIGHT)
    assert "8 = 2 data x 2 tensor x 2 pipeline; 4 micro-batches per update; 1F1B over 2 stages; ZeRO 2" in text
    line = next(line for line in text.splitlines() if "attn.c_attn.weight" in line)
    assert "axis 1 in 2 (3 blocks)" in line
    assert "moments, gradients: 8 of 16 rows each" in line
    assert re.search(r"ranks 0-3 hold \d+ tensors, [\d,]+ parameters each", text)
    assert "tied weights: 'wte.weight' is stored on stages 0-1" in text
    kinds = ("weights gathered (ZeRO)", "gradients, reduce-scattered", "tensor-parallel all-reduce")
    between_stages = ("activations to the next stage", "gradients to the previous stage", "gradients of tied weights")
    for what in (*kinds, *between_stages):
        assert what in text
    assert "rank  1 |" in text
    assert "(the paper's formula)" in text
    assert "every rank computes in full: " in " ".join(text.split())


def test_every_weight_is_in_the_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, *EIGHT)
    head = text.splitlines().index(next(line for line in text.splitlines() if line.startswith("  weights  ")))
    rows = [line.split() for line in text.splitlines()[head + 1 : text.splitlines().index("", head)]]
    counted = sum(int(row[1]) for row in rows)
    assert f"{counted} trainable weights" in text


def test_a_weight_that_shares_its_row_with_no_other_stands_under_its_own_name(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = create_model("gpt2", size="tiny", layers=1, heads=2, width=16, vocab_size=64, context_length=8, dropout=0.0)
    ir.save(model, run.with_name("model.onnx"))
    text = printed(capsys, run)
    assert re.search(r"^  h\.0\.mlp\.c_fc\.weight +1 ", text, re.MULTILINE)
    assert re.search(r"^  h\.\*\.ln_\*\.weight +2 ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("1", "Fits 1 GB: the highest peak tensor memory (rank 0) is"),
        ("0.0001", "Does not fit 100 kB: the highest peak tensor memory (rank 0)"),
    ],
)
def test_the_verdict(run: Path, capsys: pytest.CaptureFixture[str], limit: str, words: str) -> None:
    text = printed(capsys, run, "--memory-gb", limit)
    assert words in " ".join(text.split())
    if limit != "1":
        assert "times as much, mostly" in " ".join(text.split())


def test_recompute_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(
        r"recompute: [1-9]\d* of \d+ segments of the network", printed(capsys, run, "--recompute.segments=true")
    )
    assert "recompute.attention: nothing to do. All 2 attentions" in printed(capsys, run, "--recompute.attention=true")


def test_units_of_zero_are_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of width 16 has 12 w^2 + 13 w numbers in fp32."""
    asked = ("--distributed.data_parallel_size", "2", "--distributed.zero_stage", "3")
    text = " ".join(printed(capsys, run, *asked).split())
    assert (
        "ZeRO all-gathers weights and reduce-scatters gradients in 2 units of up to 13.1 kB, and one more on each stage"
        in text
    )
    assert "ZeRO all-gathers" not in printed(capsys, run)


def test_a_picture_as_svg(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "plan.svg"
    text = printed(capsys, run, *EIGHT, "--image", image, "--memory-gb", "1")
    assert f"wrote {image}" in text
    root = ElementTree.parse(image).getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Plan of model.onnx", "ranks 0-3", "ranks 4-7", "forward", "backward"} <= set(words)
    right = max(float(e.get("x", 0)) + float(e.get("width", 0)) for e in root.iter("{http://www.w3.org/2000/svg}rect"))
    assert right <= float(root.get("width", 0))


def test_a_picture_as_png(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    image = tmp_path / "plan.png"
    printed(capsys, run, "--image", image)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_the_best_layout_of_many_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (run, "--training.batch_size=64", "--ranks", "16", "--gpu", "a100")
    text = printed(capsys, *asked)
    assert "ranks        16 on 2 nodes of a100" in text
    assert "update       256 samples, fp32" in text
    chosen = re.search(
        r"chosen +(\d+) data x (\d) tensor x (\d+) pipeline.*, (\d+) micro-batch(?:es)? of (\d+)$", text, re.MULTILINE
    )
    assert chosen is not None
    data, tensor, pipeline, micro_batches, batch = map(int, chosen.groups())
    assert (data * tensor * pipeline, data * micro_batches * batch) == (16, 256)
    assert f"distributed: {{data_parallel_size: {data}, horizontal_parallel_size: {tensor}, " in text
    for title in ("RUN.yaml", "Runners-up", "Why not the obvious", "- ZeRO 3 over all ranks: "):
        assert title in text
    assert "Attainable rates" not in text
    explained = printed(capsys, *asked, "--explain", "--nodes-of", "4", "--distributed.layout=auto", "--memory-gb=60")
    assert "ranks        16 on 4 nodes of a100" in explained
    assert re.search(r"^ +moments +", explained, re.MULTILINE), "of AdamW"
    for title in ("Time of an update", "Peak tensor memory of a rank", "Network", "Attainable rates", "Search"):
        assert f"\n\n{title}\n" in explained


def test_moments_are_those_of_the_optimizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGD without momentum has none; the search counted two whatever the optimizer."""
    asked = (run, "--ranks", "4", "--gpu", "h100", "--explain", "--optimizer.training_optimizer_name=SGDOptimizer")
    text = printed(capsys, *asked)
    assert not re.search(r"^ +moments +", text, re.MULTILINE)
    assert "left for tensors      76.2 GB: 85 GB of a rank, less 6.8 GB (8%) for what allocators round up" in text


def test_a_layout_of_more_replicas_than_files_is_noted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.zeros((8, 8), np.int64)
    shards = write_shards(tmp_path / "data", {"input_ids": tokens, "labels": tokens}, 1)
    asked = (run, "--ranks", "4", "--gpu", "h100", "--training.batch_size=256", f"--paths.train_data_dir={shards}")
    text = " ".join(printed(capsys, *asked).split())
    assert "chosen 4 data x 1 tensor" in text
    assert (
        f"Files of the data The chosen layout has 4 data-parallel ranks, but data directory {str(shards)!r} holds 1 "
        ".pb file, and every one reads its own. Before training, pack the data again with onward pack "
        "--samples-per-file --overwrite."
    ) in text
    assert "at most 1 data-parallel rank were searched" in " ".join(
        printed(capsys, *asked, "--distributed.layout=auto").split()
    )


def test_rates_are_measured_once_and_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "SECONDS", 0.02)
    monkeypatch.setattr(
        calibration,
        "measure_communication",
        lambda count, *_: CommunicationSpeed(
            processes=count,
            backend="gloo",
            bytes_per_second=1e9,
            latency_seconds=8e-5,
            gathered_bytes_per_second=5e8,
            scattered_bytes_per_second=4e8,
        ),
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(calibration, "usable_cores", lambda: 4)
    text = printed(capsys, "--calibrate")
    assert re.search(r"fp32 matmuls +[\d.,e+]+ GFLOP/s", text)
    assert "communication         1 GB/s, 40 us" in text  # of two processes: a step forth and one back
    assert text.endswith(f"wrote {tmp_path / 'cache' / 'hardware.json'}\n")
    assert "inside nodes          1 GB/s, 40 us" in printed(capsys, run, "--ranks", "2", "--explain")
    monkeypatch.setattr(calibration, "measure_communication", lambda *_: 7)
    assert main(["plan", "--calibrate"]) == 1
    assert "2 processes on this machine's cpu cannot communicate (exit code 7). Run `onward doctor`." in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "--ranks is 0; pass the number of processes, at least 1."),
        (["--ranks", "2", "--nodes-of", "0"], "--nodes-of is 0; pass the ranks of a node, at least 1."),
        (
            ["--gpu", "a100"],
            "--gpu, --nodes-of and --explain are about the search of a layout; pass --ranks, too (or, with",
        ),
        (["--ranks", "2", "--image", "a.svg"], "--image and --write show one layout; set the one that --ranks prints"),
        (
            ["--ranks", "8", "--gpu", "h100", "--memory-gb", "1.2"],
            "no memory is left for tensors: 1.2 GB of a rank, less 0.096 GB (8%) for what allocators round up and 2 GB "
            "for the driver and the libraries of collectives, leaves -0.896 GB. Pass or set more (--memory-gb, "
            "machine.memory_gb) than 2.17 GB",
        ),
        (["--distributed.layout=auto"], "distributed.layout is auto; pass --ranks, or set distributed.ranks."),
    ],
)
def test_searches_that_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, run, *arguments)


def test_a_plan_needs_a_file_or_calibrates(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys) == "onward plan: name a RUN.yaml, or pass --calibrate."


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, run, "--image", "plan.gif") == (
        "onward plan: --image 'plan.gif': expected a file that ends in .svg or .png."
    )
    assert refused(capsys, run, "--memory-gb", "0") == (
        "onward plan: --memory-gb is 0; pass the memory of one rank in GB, above 0."
    )
    lost = run / "plan.svg"
    assert refused(capsys, run, "--image", lost) == (
        f"onward plan: --image '{lost}' cannot be written: Not a directory. Name another file."
    )
    model = tmp_path / "model.onnx"
    assert refused(capsys, run, "--write", model) == (
        f"onward plan: --write '{model}' is the model itself; name another file."
    )
    lost = run / "model.onnx"
    assert refused(capsys, run, "--write", lost).startswith(f"onward plan: the model '{lost}' cannot be written: ")
    assert "the sizes of 'sequence' of 'input_ids', 'sequence' of 'labels' are symbolic in the model" in refused(
        capsys, run, "--training.mapped_dimensions={}"
    )


def test_a_png_without_pillow_says_what_to_install(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)  # what an import of a package that is not there meets
    assert refused(capsys, run, "--image", "plan.png") == (
        "onward plan: --image 'plan.png': writing PNG needs pillow. Run pip install pillow, or write an .svg file."
    )
    assert not (run.parent / "plan.png").exists()


def test_annotations_go_into_one_model_only(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, name in ((first_stage(), "a.onnx"), (second_stage(), "b.onnx")):
        ir.save(model, tmp_path / name)
    target = tmp_path / "annotated.onnx"
    cut = [
        "--distributed.pipeline_parallel_size=2",
        f"--distributed.pipeline_stage_paths=[{tmp_path / 'a.onnx'}, {tmp_path / 'b.onnx'}]",
    ]
    loss = ["--loss.type=mean_squared_error", "--loss.label=y", "--training.mapped_dimensions={}"]
    assert refused(capsys, run, *cut, *loss, "--write", target) == (
        "onward plan: --write annotates the model of paths.model_path; pipeline_stage_paths name several."
    )
    assert not target.exists()


def test_a_network_that_needs_its_data_is_estimated_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compress keeps as many rows as a condition on the data says, which no shape tells."""
    from onnx import TensorProto, helper, save

    nodes = [
        helper.make_node("Gemm", ["x", "W"], ["h"]),
        helper.make_node("Greater", ["x0", "zero"], ["some"]),
        helper.make_node("Compress", ["h", "some"], ["kept"], axis=0),
        helper.make_node("ReduceMean", ["kept"], ["loss"], keepdims=0),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3]),
        helper.make_tensor_value_info("x0", TensorProto.FLOAT, [4]),
    ]
    output = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    weights = [
        helper.make_tensor("W", TensorProto.FLOAT, [3, 2], [0.5] * 6),
        helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [output], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "m.onnx")
    run = tmp_path / "run.yaml"
    run.write_text(
        "paths: {model_path: m.onnx}\nloss: {type: output, prediction: loss}\n"
        "training: {batch_size: 4, num_train_steps: 1}\nlearning_rate: {initial_lr: 0.1}\n"
    )
    text = " ".join(printed(capsys, run).split())
    assert "the memory of stage 0 is estimated from the graph, since it cannot run without its data (" in text


def test_models_cut_before_are_planned_but_not_annotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, model in (("first.onnx", first_stage()), ("second.onnx", second_stage())):
        ir.save(model, tmp_path / name)
    run = tmp_path / "run.yaml"
    run.write_text(
        "loss: {type: mean_squared_error, prediction: logits, label: y}\n"
        "training: {batch_size: 2, num_train_steps: 4, gradient_accumulation_steps: 4}\n"
        "learning_rate: {initial_lr: 1}\n"
        "distributed: {pipeline_parallel_size: 2, pipeline_stage_paths: [first.onnx, second.onnx]}\n"
    )
    text = printed(capsys, run)
    assert text.startswith("Plan of first.onnx, second.onnx\n")
    assert "pipeline" in text
    assert "--write annotates the model of paths.model_path; pipeline_stage_paths name several" in refused(
        capsys, run, "--write", tmp_path / "annotated.onnx"
    )
