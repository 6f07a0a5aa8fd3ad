"""Exit codes of exceptions, and which of them only follow from the end of another rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from onward.errors import DataError, Interrupted, OnwardError
from onward.parallel.watch.ending import exit_code_of, is_echo, notify, words


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError("x"), 2), (Interrupted("x"), 3), (OnwardError("x"), 1), (ValueError("x"), 1), (KeyboardInterrupt(), 1)],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("x"), RuntimeError("[gloo] Connection closed by peer"), RuntimeError("Broken pipe"),
        RuntimeError("Timed out waiting 5ms for recv"), RuntimeError("NCCL error"),
    ],
)  # fmt: skip
def test_echoes(error: BaseException) -> None:
    assert is_echo(error)
    outer = ValueError("outer")
    outer.__cause__ = error
    assert is_echo(outer)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("gloo"), NotImplementedError("nccl"), None]
)
def test_causes(error: BaseException | None) -> None:
    assert not is_echo(error)


def test_words_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert words(ValueError("a")) == "a"
    assert words(KeyboardInterrupt()) == "KeyboardInterrupt"
    notify("rank 1 ended.")
    assert capsys.readouterr().err == "onward: rank 1 ended.\n"
