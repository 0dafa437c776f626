"""The kernels that run on GPUs alone, against NumPy and the plain form, each in a process that has the GPU."""

import json
import sys
from pathlib import Path

import pytest

from tests.on_gpu.runs import printed

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "kernel_errors.py"
ROUNDING = {"bfloat16": 2**-8, "float32": 2**-10}
"""Relative; float32 factors are rounded to TensorFloat-32."""


@pytest.fixture(scope="module")
def errors():
    """Relative errors of the kernels, by what is computed and its type."""
    return json.loads(printed([sys.executable, PROGRAM]))


def test_grouped_matmuls_are_those_of_rows_one_by_one(errors):
    found = {name: error for name, error in errors.items() if name.startswith("grouped")}
    assert len(found) == 3 * 3 * 2 * 2
    assert {name: error for name, error in found.items() if error > ROUNDING[name.split()[-1]]} == {}


def test_attention_is_the_plain_form(errors):
    found = {name: error for name, error in errors.items() if name.startswith("attention")}
    assert len(found) == 4 * 4
    assert {name: error for name, error in found.items() if error > 2 * ROUNDING["bfloat16"]} == {}
