"""Errors of user code and of the machine, as a user reads them."""

from __future__ import annotations

import pytest
import torch

from trainer.errors import describe_error, memory_ran_out, one_line


class Rude(Exception):
    def __str__(self) -> str:
        raise SystemExit("my text is my own")


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (KeyError("oh"), "KeyError: 'oh'"),
        (ValueError(), "ValueError"),
        (ValueError("two\nlines\tand \x1b[2J"), "ValueError: two lines and ?[2J"),
        (Rude(), "Rude: its text cannot be read"),
    ],
)
def test_any_error_is_one_printable_line(error, description):
    assert describe_error(error) == description


def test_a_long_text_is_shortened():
    assert one_line("x" * 10**6) == "x" * 199 + "…"
    assert one_line("x" * 200) == "x" * 200


def test_errors_that_say_that_memory_ran_out_are_known():
    with pytest.raises(RuntimeError) as of_the_cpu:
        torch.empty(2**60)
    of_vllm = RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), of_the_cpu.value, of_vllm):
        assert memory_ran_out(error)
    assert not memory_ran_out(RuntimeError("shapes do not match"))
