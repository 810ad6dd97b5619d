"""A language model as the judge, behind any server with OpenAI's chat protocol (OpenAI, vLLM, llama.cpp, …).

The environment says where: JUDGE_BASE_URL (such as http://localhost:8000/v1), JUDGE_MODEL, and JUDGE_API_KEY if the
server wants one. The key stays in the environment: it is in no config and in no checkpoint.
"""

from __future__ import annotations

import os
import re

import httpx
import tenacity

INSTRUCTION = """Judge the answer of a student.

Question:
{prompt}

Reference answer:
{answer}

Answer of the student:
{completion}

Say how good the answer is, from 0 (wrong) to 10 (as good as the reference). Write the number alone."""

KEY = os.environ.get("JUDGE_API_KEY")
CLIENT = httpx.AsyncClient(
    base_url=os.environ.get("JUDGE_BASE_URL", "http://localhost:8000/v1"),
    headers={"Authorization": f"Bearer {KEY}"} if KEY else {},
    timeout=20,
)


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


@tenacity.retry(
    retry=tenacity.retry_if_exception(_may_pass),
    wait=tenacity.wait_exponential(multiplier=0.25, max=10) + tenacity.wait_random(0, 0.25),
    stop=tenacity.stop_after_attempt(5),
    reraise=True,
)
async def ask(question: str) -> str:
    """Return the judge's answer."""
    request = {
        "model": os.environ.get("JUDGE_MODEL", "judge"),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 8,
    }
    response = await CLIENT.post("chat/completions", json=request)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


async def score(prompt: str, completion: str, answer: str) -> float:
    """The judge's grade, between 0 and 1. A judge that gives no grade is an error, and counts as a failed reward."""
    text = await ask(INSTRUCTION.format(prompt=prompt, answer=answer, completion=completion))
    grade = re.fullmatch(r"\s*(10|[0-9](?:\.[0-9]+)?)(?:\s*/\s*10)?\.?\s*", text)
    if grade is None:
        raise ValueError(f"the judge gives no grade: {text[:80]!r}")
    return float(grade[1]) / 10
