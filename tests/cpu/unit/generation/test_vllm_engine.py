"""What the vLLM engine says when vLLM refuses to start. Nothing here starts or imports vLLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from trainer.errors import UserError, WorkerError
from trainer.generation.vllm_engine import _OCCUPIED, start_failure


def test_memory_of_other_processes_is_the_machine_s_fault_and_a_wrong_setting_the_user_s():
    occupied = start_failure(ValueError(f"{_OCCUPIED} cuda:0 (10.0/79.1 GiB) on startup is less than"), "model")
    assert (
        isinstance(occupied, WorkerError) and occupied.cause == "gpu_memory_in_use" and "10.0/79.1 GiB" in str(occupied)
    )
    refused = start_failure(ValueError("max_model_len is too large"), "model")
    assert isinstance(refused, UserError) and "max_model_len" in str(refused)


def test_a_model_that_needs_torchvision_is_named_where_it_is_left_out():
    complaint = "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected. Please check the logs."
    refused = start_failure(ValueError(complaint), "qwen")
    assert isinstance(refused, UserError) and "torchvision" in str(refused) and "rollout=transformers" in str(refused)
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    assert "to be inspected. Please" in (Path(spec.origin).parent / "model_executor/models/registry.py").read_text()


def test_vllm_begins_its_complaint_like_this():
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "v1/worker/utils.py").read_text()
    _, *complaints = source.split(f'f"{_OCCUPIED} ')
    assert any("is less than desired GPU memory utilization" in complaint[:500] for complaint in complaints)
