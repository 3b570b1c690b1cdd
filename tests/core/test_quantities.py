from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.core.errors import ConfigError
from outcore.core.quantities import align_up, format_bytes, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4097, 4097),
        ("17", 17),
        ("17B", 17),
        ("1 kb", 1000),
        ("1KiB", 1024),
        (" 20GiB ", 20 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("2.3GB", 2_300_000_000),  # 2.3 * 1e9 is 2299999999.9999995 in floating point
        ("0.5tib", 2**39),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: no float holds it
    ],
)
def test_reads(text, nbytes):
    assert parse_bytes(text, what="a size") == nbytes


@pytest.mark.parametrize(
    "bad", [-1, True, 1.5, None, [], "", "GiB", "-1GiB", "1 GiBs", "1e9", "1,5GB", "1 G", "nan", "9" * 5000]
)
def test_refuses(bad):
    with pytest.raises(ConfigError, match="Budget\\(device=\\): expected bytes"):
        parse_bytes(bad, what="Budget(device=)")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * 2**20, "1.50 GiB"), (2**50, "1024.00 TiB")],
)
def test_writes(nbytes, text):
    assert format_bytes(nbytes) == text


@settings(deadline=None, max_examples=100)
@given(nbytes=st.integers(0, 2**48))
def test_a_need_that_is_read_again_suffices(nbytes):
    again = parse_bytes(format_bytes(nbytes, is_need=True), what="a size")
    assert nbytes <= again <= nbytes * 1.01 + 1


@settings(deadline=None, max_examples=50)
@given(value=st.integers(0, 2**60), alignment=st.sampled_from([1, 3, 256, 4096]))
def test_aligns_to_the_next_multiple(value, alignment):
    up = align_up(value, alignment)
    assert up % alignment == 0
    assert 0 <= up - value < alignment


@pytest.mark.parametrize(("per_s", "text"), [(0.3026, "0.3"), (9.96, "10"), (16.7, "17"), (1234.5, "1,234")])
def test_a_slow_rate_is_not_zero(per_s, text):
    assert format_rate(per_s) == text
