"""What an agent is."""

from __future__ import annotations

import functools

import pytest

from tests.support.retry import RetryEnv
from trainer.environments import Endpoint
from trainer.environments.base import find_environment
from trainer.errors import UserError
from trainer.import_utils import is_agent


class Runs:
    def run(self, row, seed, endpoint):
        return 1


class WithoutSeed:
    def run(self, row, endpoint):
        return 1


class WithoutReply(RetryEnv):
    def step(self):
        """Does not take the reply."""


def with_client(method):
    """Decorate a method: it gets a client first."""

    @functools.wraps(method)
    def call(self, *arguments):
        return method(self, "client", *arguments)

    return call


class WithClient(RetryEnv):
    @with_client
    def step(self, client, reply):
        return super().step(reply)


class Both(RetryEnv):
    def run(self):
        """Of its own."""


def test_a_class_that_has_run_and_not_step_is_an_agent():
    for kind, expected in [(Runs, True), (RetryEnv, False), (Both, False), (Runs(), False)]:
        assert is_agent(kind) == expected


def test_an_agent_is_found_by_its_import_path():
    assert find_environment(f"{__name__}:Runs") is Runs


@pytest.mark.parametrize(
    "kind, problem",
    [
        (WithoutSeed, "run: too many positional arguments; it gets row, seed, endpoint"),
        (WithoutReply, "step: too many positional arguments; it gets reply"),
    ],
)
def test_a_method_that_does_not_take_its_arguments_is_refused(kind, problem):
    with pytest.raises(UserError, match=f"^environment.name={__name__}:{kind.__name__}: {problem}$"):
        find_environment(f"{__name__}:{kind.__name__}")


def test_a_decorator_may_pass_a_method_more_than_it_gets():
    assert find_environment(f"{__name__}:WithClient") is WithClient


def test_clients_in_other_processes_find_the_endpoint_in_variables():
    variables = Endpoint("http://x/v1", "key", "policy").variables
    assert (variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]) == ("http://x/v1", "key")
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_API_KEY"]) == ("http://x", "key")
    assert variables["ANTHROPIC_SMALL_FAST_MODEL"] == "policy-side"
