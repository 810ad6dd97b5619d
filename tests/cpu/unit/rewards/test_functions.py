"""Reward functions: which completions they accept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.rewards import REWARDS, resolve

GSM8K = Path(__file__).resolve().parents[4] / "../shared/data/gsm8k"
gsm8k, math = REWARDS["gsm8k"], REWARDS["math"]


# gsm8k


def test_gsm8k_accepts():
    for completion, answer in [
        ("#### 72", "#### 72"),
        ("####72", "72"),
        ("She sold 48+24=72.\n#### 72\n", "48+24 = <<48+24=72>>72 clips.\n#### 72"),
        ("#### 72.00", "72"),
        ("#### 72.", "72"),
        ("#### 072", "72"),
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### 1,234,567.50", "1234567.5"),
        ("#### $72", "72"),
        ("#### $ 72", "72"),
        ("#### US$1,000", "1000"),
        ("#### 72€", "72"),
        ("#### 72 dollars", "72"),
        ("#### 72km in 3 hours", "72"),
        ("#### 5%", "5"),
        ("#### .5", "0.5"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### **72**", "72"),
        ("#### \\boxed{72}", "72"),
        ("#### The answer is 72, not 70", "72"),
        ("#### 1\nno, wait\n#### 72", "72"),
        ("The answer is 72.", "72"),
        ("First 24, then 48, so 72 clips", "72"),
        ("10-3=7", "7"),
        ("5 apples for her\n- 18 for him", "18"),
        ("from 10-18", "18"),
        ("x=-5", "-5"),
        ("(72)", "72"),
        ("72 m^2", "72"),
        ("an area of 72 m^12.", "72"),
        ("1, 2, 3", "3"),
        ("(3, 4)", "4"),
        *(
            (form, "1000")
            for form in (
                "1{,}000",
                "1\\,000",
                "1\\ 000",
                "1,\\!000",
                "1\\!000",
                "1~000",
                "1 000",
                "1\u00a0000",
                "1\u202f000",
                "#### 1 000",
                "$1,000.00",
                "\\$1{,}000",
                "#### 1 000 km",
                "1,000.",
                "\\boxed{1{,}000}",
                "$\\boxed{1\\,000}$",
                "\\boxed{1000} after 3 days",
                "\\boxed{1000\\text{ m}^{2}}",
                "\\boxed{x_1 = 1000}",
                "<answer>1000</answer>",
                "#### 1000</answer>",
                "#### 1000 #### ",
                "####1000####",
                "#### 1000 ####\n####\n",
                "**1,000**",
                "1000\\%",
            )
        ),
        ("12 345 678.5", "12345678.5"),
        ("1{,}234{,}567", "1234567"),
        ("1.000", "1"),
        ("#### -\\$5", "-5"),
    ]:
        assert gsm8k(completion, answer) == 1.0


def test_gsm8k_refuses():
    for completion, answer in [
        ("#### 73", "#### 72"),
        ("#### 72.5", "72"),
        ("#### -72", "72"),
        ("#### 7", "72"),
        ("#### 720", "72"),
        ("72 it is\n#### 73", "72"),
        ("#### 72\n#### 73", "72"),
        ("72 ####", "72"),
        ("72, or rather 73", "72"),
        ("#### seventy-two", "72"),
        ("no number", "72"),
        ("", "72"),
        ("", "none either"),
        ("#### ", "####"),
        *(
            (form, wrong)
            for form, wrongs in {
                "1 2": ("12", "1", "2"),
                "#### 1 2": ("12", "1", "2"),
                "1,00": ("100", "1", "0"),
                "1,2,3": ("123", "3", "1"),
                "#### 1,00": ("100", "1", "0"),
                "1,000,00": ("100000", "1000", "0"),
                "1.000": ("1000",),
                "1.000.000": ("1",),
                "1.000,50": ("1000.5", "1", "50"),
                "0 100": ("100", "0"),
                "1 0000": ("10000", "1", "0"),
                "1_000": ("1", "0"),
                "1\\,00": ("100", "1"),
                "1000 000": ("1000000",),
                "1,000 000": ("1000000",),
                "1/2": ("1", "2", "0.5"),
                "#### 1/2": ("1", "2"),
                "\\boxed{\\frac{1}{2}}": ("1", "2"),
                "#### \\frac{1}{2}": ("1", "2"),
                "2 1/2": ("2",),
                "1e3": ("1", "3"),
                "1e-3": ("1", "3", "-3"),
                "10^3": ("10", "3"),
                "1.5\\times 10^3": ("10", "3"),
                "x^{2}": ("2",),
                "3:30": ("3", "30"),
                "#### 3:30": ("3",),
                "\\boxed{41} or 42": ("42",),
                "#### 72 #### x": ("72",),
            }.items()
            for wrong in wrongs
        ),
    ]:
        assert gsm8k(completion, answer) == 0.0


@settings(deadline=None)  # the machine may be busy
@given(
    number=st.integers(-(10**12), 10**12),
    marker=st.sampled_from(["", "#### "]),
    before=st.text(alphabet="abc 123.\n", max_size=20),
    after=st.sampled_from(["", ".", " dollars", "%", " km.", "\n"]),
    write=st.sampled_from([str, "{:,}".format, "${}".format, "{}.00".format, "${:,}".format, " {}".format]),
)
def test_gsm8k_reads_any_number_as_written(number, marker, before, after, write):
    completion = f"{before}\n{marker}{write(number)}{after}"
    assert gsm8k(completion, str(number)) == 1.0
    assert gsm8k(completion, str(number + 1)) == 0.0


@settings(deadline=None)  # the machine may be busy
@given(st.text(), st.text())
def test_gsm8k_takes_any_text(completion, answer):
    assert gsm8k(completion, answer) in (0.0, 1.0)


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_knows_every_reference_answer(split):
    if not GSM8K.exists():
        pytest.skip("the GSM8K files are not beside this checkout")
    answers = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()]
    assert len(answers) == {"train": 7473, "test": 1319}[split]
    for answer in answers:
        solution, number = answer.split("####")
        changed = int(number.replace(",", "")) + 1
        assert gsm8k(answer, answer) == 1.0
        assert gsm8k(f"The answer is ${number.strip()}.", answer) == 1.0
        assert gsm8k(f"{solution}#### {changed}", answer) == 0.0
        assert gsm8k(f"The answer is {changed:,}", answer) == 0.0


# math


def test_math_accepts():
    for completion, answer in [
        (r"so it is \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{1/2}", r"$\frac{1}{2}$"),
        (r"\boxed{\dfrac12}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        (r"\boxed{1+x^2}", "x^2+1"),
        ("$x^2+1$", "x^2+1"),
        ("x^2+1", "x^2+1"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{\$5}", r"\$5"),
        ("The answer is 5.", "5"),
    ]:
        assert math(completion, answer) == 1.0


def test_math_refuses():
    for completion, answer in [
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}"),
        (r"\boxed{x^2-1}", "x^2+1"),
        (r"\boxed{6}", "5"),
        (r"\boxed{}", "5"),
        (r"\boxed{\frac{1}{", "5"),
        ("no mathematics", "5"),
        ("\x00}{$$\\frac", "5"),
        ("", ""),
    ]:
        assert math(completion, answer) == 0.0


PAGE = Path(__file__).resolve().parents[4] / "docs/rewards.md"
TABLE = re.findall(r"^\| `(.+?)` \| `(.+?)` \| ([01]) \|", PAGE.read_text(), re.MULTILINE)


def test_math_decides_as_the_page_says():
    for completion, answer, reward in TABLE:
        assert math(completion, answer) == float(reward) and len(TABLE) == 18


def test_math_reads_what_the_library_alone_would_not():
    for completion, answer, reward in [
        (r"\boxed{50\%}", "50%", 1.0),
        (r"\boxed{0.5\%}", "0.5", 0.0),
        (r"So it is 0.5\%", "0.5", 0.0),
        (r"So it is 0.5%", r"0.5\%", 1.0),
        (r"\boxed{1{,}000\%}", "10", 1.0),
        ("5", "<answer>5</answer>", 1.0),
        ("<answer>x^2+1</answer>", "1+x^2", 1.0),
        (r"hm 6<answer>\boxed{5}</answer> not 6", "5", 1.0),
        ("<answer>4</answer> or <answer>5", "5", 1.0),
        ("<answer>6</answer> and not 5", "5", 0.0),
        ("</think>42", "42", 1.0),
        ("<|channel|>final<|message|>42", "42", 1.0),
        ("[THINK]1[/THINK]42", "42", 1.0),
        (r"\boxed{1<x<2}", "1<x<2", 1.0),
        (r"\boxed{0}", r"0.\overline{3}", 0.0),
        (r"\boxed{1/6}", r"0.1\overline{6}", 1.0),
        (r"-0.\dot{3}", "-1/3", 1.0),
        ("0.5", "−0.5", 0.0),
        (r"\boxed{0}", r"1\,000", 0.0),
        (r"\boxed{0}", "1 000", 0.0),
        (r"\boxed{1 000}", "1000", 1.0),
        ("1{,}000", "1000", 1.0),
        (r"It costs \$1000.", "1000", 1.0),
        (r"\boxed{1000}", "1,00", 0.0),
    ]:
        assert math(completion, answer) == reward


# arithmetic, reverse_text


@pytest.mark.parametrize(
    "answer",
    [
        "The answer is {}",
        "answer: 1+({})",
        "\\boxed{{{}}}",
        "$\\text{{{}}}+1$",
        '$\\operatorname{{exec}}("{}")$',
        "\\boxed{{\\{{1, \\text{{{}}}\\}}}}",
    ],
)
def test_math_runs_no_code_of_an_answer(tmp_path, answer):
    code = f"__import__('os').mkdir('{tmp_path}/made')"
    assert math(answer.format(code), "5") == 0.0
    assert not (tmp_path / "made").exists()


def test_arithmetic_wants_the_number_alone():
    for completion, reward in [("7", 1.0), (" 7\n", 1.0), ("7.", 0.0), ("17", 0.0), ("", 0.0)]:
        assert REWARDS["arithmetic"](completion, "7") == reward


def test_reverse_text_is_a_similarity():
    reward = REWARDS["reverse_text"]
    assert reward("dcba", "dcba") == 1.0
    assert reward(" dcba\n", "dcba") == 1.0
    assert reward("dcb", "dcba") == pytest.approx(2 * 3 / 7)
    assert reward("xyz", "dcba") == 0.0
    assert reward("", "dcba") == 0.0


# resolve


def test_unknown_rewards_are_refused():
    for name, message in [
        ("gsm9k", "choose one of gsm8k, math, arithmetic, reverse_text, reasoning_gym, remote, or an import path"),
        (":f", "choose one of"),
        ("os:", "choose one of"),
        ("no.such.module:f", "cannot be imported.*no"),
        (".relative:f", "cannot be imported"),
        ("no.such.module.f", "an import path has a colon before the function; write no.such.module:f"),
        ("os:no_such", "os has no function no_such"),
        ("os:name", "os has no function name"),
    ]:
        with pytest.raises(UserError, match=f"reward.name={name}: {message}"):
            resolve(name)


def test_a_built_in_reward_has_an_import_path_too():
    assert resolve("trainer.rewards.functions:gsm8k") is gsm8k


def test_a_module_with_a_mistake_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mistaken_rewards.py").write_text("import os\nos.no_such\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(UserError, match="cannot be imported .AttributeError: .*no_such"):
        resolve("mistaken_rewards:f")
