import logging

import pytest
import torch

from headrace import precision


def test_float32_is_as_fast_as_itself_and_a_narrow_dtype_is_timed():
    assert precision.slowdown("float32") == 1.0
    for dtype in ("bfloat16", "float16"):
        assert precision.slowdown(dtype) > 0.05
        if torch.cuda.is_available():
            assert precision.slowdown(dtype) == 1.0


@pytest.mark.parametrize(("times", "warnings"), [(99.0, 1), (1.2, 0)])
def test_a_dtype_that_is_only_emulated_is_warned_of(monkeypatch, caplog, times, warnings):
    monkeypatch.setattr(precision, "slowdown", lambda dtype: times)
    with caplog.at_level(logging.WARNING):
        precision.warn_if_slow("bfloat16")
    assert len(caplog.records) == warnings
    assert all("99 times as long in bfloat16" in record.message for record in caplog.records)
