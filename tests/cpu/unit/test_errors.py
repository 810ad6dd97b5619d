"""Errors of user code and of the machine, as a user reads them."""

from __future__ import annotations

import pytest
import torch

from trainer.config import Config
from trainer.config.fields import walk_keys
from trainer.errors import describe_error, describe_with_place, did_you_mean, is_out_of_memory, is_unreachable, one_line


class Rude(Exception):
    def __str__(self) -> str:
        raise SystemExit("my text is my own")


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ("reset raised ConnectionRefusedError: [Errno 111] Connection refused in shop.py:7", True),
        ("raised ClientConnectorError: Cannot connect to host judge:80", True),
        ("no answer within reward.timeout_s=3 (the last: ConnectError: All connection attempts failed)", True),
        ("raised KeyError: 'connection'", False),
        ("raised ValueError: no grade in the answer", False),
    ],
)
def test_a_service_that_cannot_be_reached_is_told_from_other_failures(text, is_it):
    assert is_unreachable(text) == is_it


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


def test_the_line_of_user_code_in_the_traceback_of_a_worker_is_named():
    error = KeyError("oh")
    error.add_note(
        f'in rank 0; its own traceback:\n  File "{Config.task.fget.__code__.co_filename}", line 3, in task\n'
        '  File "/home/me/dpo.py", line 7, in loss\n'
        f'  File "{torch.__file__}", line 9, in sum\nKeyError: oh'
    )
    assert describe_with_place(error) == "KeyError: 'oh' (/home/me/dpo.py:7, in loss)"


def test_a_long_text_is_shortened():
    assert one_line("x" * 10**6) == "x" * 199 + "…"
    assert one_line("x" * 200) == "x" * 200


def test_errors_that_say_that_memory_ran_out_are_known():
    with pytest.raises(RuntimeError) as of_the_cpu:
        torch.empty(2**60)
    of_vllm = RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), of_the_cpu.value, of_vllm):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


KEYS = [key for key, *_ in walk_keys(Config())]


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("trainer.total_step", ["trainer.total_steps"]),
        ("total_step", ["trainer.total_steps"]),
        ("algorithm.total_steps", ["trainer.total_steps"]),
        ("model_path", ["model.path", "reward.model.path"]),
        ("TRAINER.SEED", ["trainer.seed"]),
        ("lr", ["trainer.policy.optimizer.lr", "trainer.critic.optimizer.lr", "sft.optimizer.lr"]),
        ("batch_size", ["sft.batch_size", "trainer.train_batch_size", "trainer.mini_batch_size"]),
        ("clip_hi", ["algorithm.clip_high"]),
        ("lora_rank", ["trainer.policy.lora.rank"]),
    ],
)
def test_the_names_most_like_the_wrong_one_come_first(wrong, meant):
    assert did_you_mean(wrong, KEYS) == f"did you mean {', or '.join(meant)}?"


@pytest.mark.parametrize("wrong", ["nothing", "trainer.zzzz", "", ".", "*", "trainer."])
def test_nothing_is_suggested_where_no_name_is_alike(wrong):
    assert did_you_mean(wrong, KEYS) == ""
    assert did_you_mean(wrong, []) == ""
