"""Memory of tensors over time."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory import allocator_peak
from trainer.plan.meter import MemoryMeter


def test_it_counts_what_lives():
    before = torch.ones(100)
    with MemoryMeter() as meter:
        a = torch.zeros(1000)
        assert meter.now == 4000
        view = a[10:].view(-1, 9)
        before.add_(1)
        assert meter.now == 4000
        b = a + 1
        assert meter.now == meter.peak == 8000
        del a
        assert meter.now == 8000  # the view keeps it
        del view, b
        assert (meter.now, meter.peak) == (0, 8000)
        meter.reset_peak()
        torch.ones(1)
    assert meter.peak == 4


def test_fake_tensors_count_like_real_ones():
    def work() -> None:
        x = torch.zeros(64, 32, requires_grad=True)
        w = torch.zeros(32, 256, requires_grad=True)
        ((x @ w).relu() @ w.T).square().sum().backward()

    with MemoryMeter() as real:
        work()
    with FakeTensorMode(), MemoryMeter() as fake:
        work()
    assert fake.peak == real.peak
    assert abs(allocator_peak(work) - real.peak) < 0.02 * real.peak


def test_bytes_that_operators_move_count_but_for_views():
    a, b = torch.zeros(100, 10), torch.zeros(10, 50)
    with MemoryMeter() as meter:
        product = a @ b
        product.T.view(50, 100)
        torch.empty(7)
    assert meter.moved == a.nbytes + b.nbytes + product.nbytes
    with MemoryMeter() as meter:
        product.add_(1)
    assert meter.moved == 2 * product.nbytes
    with MemoryMeter() as meter:
        _ = product * product
    assert meter.moved == 3 * product.nbytes


def test_numbers_in_half_precision_count_as_float32_but_in_products():
    a, b = torch.zeros(100, 10, dtype=torch.bfloat16), torch.zeros(10, 50, dtype=torch.bfloat16)
    with MemoryMeter() as meter:
        product = a @ b
    assert meter.moved == a.nbytes + b.nbytes + product.nbytes
    with MemoryMeter() as meter:
        _ = product * product
    assert meter.moved == 3 * 2 * product.nbytes
    with MemoryMeter() as meter:
        product.float()
    assert meter.moved == 2 * 2 * product.nbytes
    numbers = torch.zeros(8, dtype=torch.int8)
    with MemoryMeter() as meter:
        _ = numbers + numbers
    assert meter.moved == 3 * 8
