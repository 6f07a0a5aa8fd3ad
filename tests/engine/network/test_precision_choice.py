"""What auto chooses, that it says so, and that rounds and resumed runs keep it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.network import precision_choice
from onward.engine.network.precision_choice import settled_precision
from onward.errors import OnwardError
from onward.parameters import MixedPrecision
from tests.mlp import assert_same_bits, data, save_mlp, start, state_bits
from tests.ranks import run_on_ranks

AUTO = {"use_mixed_precision": "auto"}
BF16 = {"use_mixed_precision": True, "use_bfloat16": True}
ADAMW = {"training_optimizer_name": "AdamW"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A CPU whose matmuls are so many times as fast in bf16 as in fp32."""

    def of(ratio: float) -> None:
        monkeypatch.setattr(
            precision_choice,
            "matmul_rate",
            lambda device, dtype, seconds: 2e11 * (ratio if dtype is torch.bfloat16 else 1.0),
        )

    return of


def test_a_cpu_computes_in_bf16_where_its_matmuls_are_faster(tmp_path: Path, machine: Callable[[float], None]) -> None:
    """Bit by bit as if it had been asked for, with a note that has the rates."""
    save_mlp(tmp_path)
    for ratio, asked, said in ((2.0, BF16, "bf16, since"), (0.5, {}, "the model's own types, since")):
        machine(ratio)
        runner, recorder = start(tmp_path, optimizer=ADAMW, mixed_precision=AUTO)
        runner.run(InMemoryDataLoader(data(32)))
        explicit, _ = start(tmp_path, optimizer=ADAMW, mixed_precision=asked)
        explicit.run(InMemoryDataLoader(data(32)))
        assert_same_bits(state_bits(runner), state_bits(explicit))
        (note,) = [one for one in recorder.messages if "auto" in one]
        assert note == (
            f"mixed_precision.use_mixed_precision: auto: {said} matmuls reach {ratio * 200:,.1f} GFLOP/s in bf16 and "
            f"200.0 GFLOP/s in fp32 on this CPU, {ratio:.2f} times; bf16 is chosen from 1.25 on."
        )
        assert runner.parameters.mixed_precision == MixedPrecision(**asked)


def test_a_resumed_run_keeps_what_its_checkpoint_was_trained_with(
    tmp_path: Path, machine: Callable[[float], None]
) -> None:
    """On a machine that would choose otherwise, bit by bit as if it had not been interrupted."""
    save_mlp(tmp_path)
    machine(4.0)
    fields = {"optimizer": ADAMW, "mixed_precision": AUTO}
    through, _ = start(tmp_path, training={"num_train_steps": 8}, **fields)
    through.run(InMemoryDataLoader(data(32)))
    checkpoint = {"checkpoints_dir": tmp_path / "checkpoints", "checkpoint_period": 4}
    first, _ = start(tmp_path, training={"num_train_steps": 4}, checkpoint=checkpoint, **fields)
    first.run(InMemoryDataLoader(data(32)))
    first.wait_for_checkpoint()
    machine(0.5)
    resumed, recorder = start(tmp_path, training={"num_train_steps": 8}, checkpoint=checkpoint, **fields)
    assert [one for one in recorder.messages if "auto" in one] == [
        "mixed_precision.use_mixed_precision: auto: bf16, which the checkpoint was trained with."
    ]
    (changed,) = [one for one in recorder.messages if "was trained with other fields" in one]
    assert "mixed_precision" not in changed
    resumed.run(InMemoryDataLoader(data(32)))
    assert_same_bits(state_bits(resumed), state_bits(through))


def test_a_run_that_resumes_from_fp16_stays_in_it(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    asked = start(tmp_path, mixed_precision=AUTO)[0]._asked
    before = {"use_mixed_precision": True, "use_bfloat16": False, "loss_scale": 128.0, "float8": False}
    found, note = settled_precision(asked, "cpu", {"parameters": {"mixed_precision": before}})
    assert found.mixed_precision == MixedPrecision(**before)
    assert note == "mixed_precision.use_mixed_precision: auto: fp16, which the checkpoint was trained with."


def test_rounds_keep_the_choice(tmp_path: Path, machine: Callable[[float], None]) -> None:
    save_mlp(tmp_path)
    machine(4.0)
    runner, _ = start(tmp_path, mixed_precision=AUTO)
    asked = runner._asked
    runner.run(InMemoryDataLoader(data(32)))
    machine(0.5)
    runner.update_parameters(asked)
    assert runner.parameters.mixed_precision == MixedPrecision(**BF16)


def test_gpus_choose_by_what_they_compute_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_mlp(tmp_path)
    asked = start(tmp_path, mixed_precision=AUTO)[0]._asked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has_bf16 in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        found, note = settled_precision(asked, "cuda")
        assert found.mixed_precision == MixedPrecision(**(BF16 if has_bf16 else {}))
        assert note is not None
        assert ("which the GPU computes in" in note) == has_bf16


def test_what_auto_decides_by_itself_cannot_be_set(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    for field, value in (("use_bfloat16", True), ("loss_scale", 128.0)):
        with pytest.raises(OnwardError, match=rf"mixed_precision.{field} is set while use_mixed_precision is auto"):
            start(tmp_path, mixed_precision={**AUTO, field: value})
    with pytest.raises(OnwardError, match="expected auto, true or false"):
        start(tmp_path, mixed_precision={"use_mixed_precision": 1})


def _chosen_on_rank(folder: Path) -> tuple[object, list[str]]:
    """On ranks of which each measures what the others do not."""
    rank = torch.distributed.get_rank()

    def rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
        return 8e11 if rank and dtype != torch.float32 else 2e11

    precision_choice.matmul_rate = rate
    runner, recorder = start(folder, optimizer=ADAMW, mixed_precision=AUTO, distributed={"data_parallel_size": 2})
    runner.run(InMemoryDataLoader(data(32)))
    precision = runner.parameters.mixed_precision
    return precision.use_mixed_precision, [one for one in recorder.messages if "auto" in one]


def test_ranks_that_measure_other_rates_take_that_of_the_first(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    (first, notes), (second, silent) = run_on_ranks(2, _chosen_on_rank, tmp_path)
    assert (first, second) == (False, False)
    assert "1.00 times" in notes[0]
    assert silent == []
