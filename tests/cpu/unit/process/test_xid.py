"""Texts of the NVIDIA driver and of CUDA, as users have posted them, and the logs that hold them."""

from __future__ import annotations

import os
import time

import pytest

from trainer.process import xid
from trainer.process.xid import GpuError, gpu_error_in, gpu_lines

OFF_THE_BUS = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
BROKEN, MACHINE, PROGRAM = (True, True), (False, True), (False, False)


@pytest.mark.parametrize(
    "text, kind, cause",
    [
        (OFF_THE_BUS, BROKEN, "GPU error (Xid 79)"),
        (f"[111111111.111] {OFF_THE_BUS}", BROKEN, "GPU error (Xid 79)"),
        ("Okt 06 17:59:27 balrog kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", BROKEN, "GPU error"),
        ("NVRM: fallen off the bus and is not responding to commands.", BROKEN, "GPU error"),
        (
            "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000)",
            BROKEN,
            "GPU error (Xid 149)",
        ),
        (
            "NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
            BROKEN,
            "GPU error (Xid 149)",
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=4711, name=python, DBE (double bit error)", BROKEN, "GPU error (Xid 48)"),
        ("NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error", MACHINE, "GPU error (Xid 94)"),
        (
            "NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: ENGINE "
            "GRAPHICS GPC2 GPCCLIENT_T1_7 faulted @ 0x2b57_b3000000. Fault is of type FAULT_PDE",
            PROGRAM,
            "GPU error (Xid 31)",
        ),
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
            "asynchronously reported at some other API call,so the stacktrace below might be incorrect.",
            BROKEN,
            "GPU error",
        ),
        (
            "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
            BROKEN,
            "GPU error",
        ),
        (
            "Unable to determine the device handle for GPU 0000:06:00.0: GPU is lost.  Reboot the system",
            BROKEN,
            "GPU error",
        ),
        (
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            MACHINE,
            "GPU error",
        ),
        (
            f"NVRM: Xid (PCI:0000:05:00): 31, pid=1, MMU Fault\n{OFF_THE_BUS}\nNVRM: Xid (PCI:0000:05:00): 94, pid=1",
            BROKEN,
            "GPU error (Xid 79)",  # the worst, wherever it stands
        ),
        ("NVRM: Xid (PCI:0000:05:00): 31\nNVRM: Xid (PCI:0000:05:00): 94", MACHINE, "GPU error (Xid 94)"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", MACHINE, "GPU error"),
        ("CUDA error: an illegal memory access was encountered", PROGRAM, "CUDA error"),
        ("CUDA error: device-side assert triggered", PROGRAM, "CUDA error"),
    ],
)
def test_a_text_names_a_broken_gpu_a_failure_of_the_machine_or_a_faulty_program(text, kind, cause):
    assert gpu_error_in(text) == GpuError(*kind, cause)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
        "NVRM: Xid (PCI:0000:9b:00): 63, pid=1234, name=python3, Row Remapper: New row marked for remapping",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: unspecified launch failure",
    ],
)
def test_other_texts_name_no_error_of_a_gpu(text):
    assert gpu_error_in(text) is None


def test_the_lines_of_the_last_seconds_are_read_from_a_log(tmp_path, monkeypatch):
    log, now = tmp_path / "kern.log", time.clock_gettime(time.CLOCK_MONOTONIC)
    entries = [(now - 100, OFF_THE_BUS), (now - 5, "NVRM: a"), (now - 4, "eth0: link up"), (now + 9000, "NVRM: before")]
    lines = [f"Nov 22 08:00:00 host kernel: [{uptime:12.6f}] {text}" for uptime, text in entries]
    log.write_text("\n".join([*lines, "NVRM: without a time"]) + "\n")
    monkeypatch.setattr(xid, "KERNEL_LOGS", [str(tmp_path / "missing"), str(log)])
    assert gpu_lines(200) == [OFF_THE_BUS, "NVRM: a"] and gpu_lines(50) == ["NVRM: a"]
    monkeypatch.setattr(xid, "KERNEL_LOGS", [str(tmp_path)])
    assert gpu_lines(200) == [], "what cannot be read says nothing"


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel does not let this process read its log")
def test_the_records_of_the_kernel_are_read():
    uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    records = list(xid._records("/dev/kmsg"))
    assert all(0 <= stamp <= uptime + 5 for stamp, _ in records) and all(text for _, text in records[:20])
    assert gpu_lines(uptime) == [text for _, text in records if "NVRM" in text]
