"""Every format at the values where its number of digits changes."""

from __future__ import annotations

import math

import pytest

from onward.report import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.12, "5.120"),
        (9.99999, "10.00"),
        (0.99999, "1.000"),
        (12.345, "12.35"),
        (123.45, "123.5"),
        (1234.6, "1235"),
        (98_765.4, "98765"),
        (0.07312, "0.0731"),
        (0.001, "0.0010"),
        (0.0009, "9.0e-04"),
        (1e5, "1.0e+05"),
        (0.0, "0"),
        (-2.5, "-2.500"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_values_keep_four_significant_digits(value: float, text: str) -> None:
    assert formatting.format_value(value) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(3.2e-4, "3.2e-04"), (6e-5, "6.0e-05"), (0.05, "0.05"), (0.1, "0.1"), (1.0, "1"), (0.0, "0")]
)
def test_learning_rates(rate: float, text: str) -> None:
    assert formatting.format_learning_rate(rate) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7.254, "7.25"),
        (9.996, "10.0"),
        (95.04, "95.0"),
        (950, "950"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (999_600, "1.00M"),
        (1.234e9, "1.23G"),
        (5e15, "5000T"),
        (-12_345, "-12.3k"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert formatting.format_count(count) == text


def test_counts_are_at_most_five_characters_over_twelve_decades() -> None:
    widths = {len(formatting.format_count(10 ** (k / 50))) for k in range(0, 12 * 50)}
    assert max(widths) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-1, "0 s"),
        (0.031, "0.03 s"),
        (0.994, "0.99 s"),
        (8.44, "8.4 s"),
        (42.2, "42 s"),
        (59.7, "1m 00s"),
        (187, "3m 07s"),
        (3599.7, "1h 00m"),
        (3723, "1h 02m"),
        (86_399, "23h 59m"),
        (190_800, "2d 05h"),
        (math.inf, "?"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert formatting.format_duration(seconds) == text


def test_loss_scales_are_powers_of_two_where_they_are() -> None:
    assert [formatting.format_loss_scale(s) for s in (65536.0, 1.0, 128.0, 3000.0)] == ["2^16", "1", "128", "3000"]


def test_accuracies_are_percentages() -> None:
    assert formatting.format_metric("accuracy", 0.95125) == "95.12%"
    assert formatting.format_metric("mlm_accuracy", 1.0) == "100.00%"
    assert formatting.format_metric("accuracy_of_last", 0.952) == "95.20%"
    assert formatting.format_metric("mlm_accuracy_of_average", 0.952) == "95.20%"
    assert formatting.format_metric("loss_of_last", 0.952) == "0.9520"
    assert formatting.format_metric("loss", 0.95125) == "0.9513"
    assert formatting.format_metric("accuracy", math.nan) == "nan"


def test_sizes_and_rates() -> None:
    assert formatting.format_rate(1234.0, "tokens") == "1.23k tokens/s"
    sizes = [formatting.format_bytes(b) for b in (0, 512, 1536, 20 * 2**20, 300 * 2**20, -(2**30))]
    assert sizes == ["0 B", "512 B", "1.50 KiB", "20.0 MiB", "300 MiB", "-1.00 GiB"]


def test_long_names_keep_both_ends() -> None:
    assert formatting.shorten_middle("/transformer/h.11/MatMul", 12) == "/tran..atMul"
    assert formatting.shorten_middle("short", 12) == "short"
