"""A virtual environment with the package verifiers, and tasksets of it, for tests."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tests.support import packages

REQUIREMENTS = Path(__file__).with_name("verifiers-requirements.txt")

GUESS = '''
import os

import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: str

class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace):
        return float(self.data.secret in trace.branches[-1].messages[-1].content)

    @vf.reward(weight=0.5)
    async def short(self, task, trace):
        return float(len(trace.branches[-1].messages[-1].content) < 5)

    @vf.metric
    async def replies(self, task, trace):
        return float(trace.num_turns)

class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            data = Data(prompt=f"Guess {number}.", system_prompt="Play.", secret=str(number))
            yield GuessTask(data, self.config.task)

class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[GuessConfig]):
    """A user who says no until the number is right. Its first start fails if there is no file FIRST_START."""

    def serving(self, *args, **kwargs):
        first = os.environ.get("FIRST_START")
        if first and not os.path.exists(first):
            open(first, "w").close()
            raise OSError("not yet")
        return super().serving(*args, **kwargs)

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and task.data.secret not in segment.last_reply:
                segment = await interaction.turn("No.")

__all__ = ["Guess", "GuessEnv"]
'''

BASKET = '''
import verifiers.v1 as vf

class Spent(vf.State):
    total: int = 0

class Basket(vf.Toolset[vf.ToolsetConfig, Spent]):
    """A process for each episode."""

    async def setup_task(self, task):
        self.most = task.budget

    @vf.tool
    async def buy(self, price: int) -> str:
        """Buy something at its price."""
        if self.state.total + price > self.most:
            raise ValueError("too expensive")
        self.state.total += price
        return f"spent {self.state.total}"

if __name__ == "__main__":
    Basket.run()
'''
PRICES = '''
import verifiers.v1 as vf

class Prices(vf.Toolset[vf.SharedToolsetConfig]):
    """A process for all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    async def price(self, item: str) -> str:
        """Return the price of an item."""
        return {"pen": "3", "cup": "5"}[item]

if __name__ == "__main__":
    Prices.run()
'''
SHOP = """
import verifiers.v1 as vf
from shop_basket import Basket, Spent
from shop_prices import Prices

class Data(vf.TaskData):
    budget: int
    item: str

class ShopTask(vf.Task[Data, Spent, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Basket(vf.ToolsetConfig())]

    @vf.reward
    async def bought(self, task, trace):
        return float(trace.state.total == {"pen": 3, "cup": 5}[self.data.item])

    @vf.reward(weight=0.5)
    async def says(self, task, trace):
        return float(str(trace.state.total) in trace.branches[-1].messages[-1].content)

    @vf.metric
    async def replies(self, task, trace):
        return float(trace.num_turns)

class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(vf.SharedToolsetConfig())]

    def load(self):
        for item in ("pen", "cup"):
            data = Data(prompt=f"Buy a {item}.", system_prompt="You shop.", item=item, budget=9)
            yield ShopTask(data, self.config.task)

__all__ = ["Shop"]
"""
TASKSETS = {"guess": GUESS, "shop": SHOP, "shop_basket": BASKET, "shop_prices": PRICES}


def shared_venv(directory: Path) -> str:
    """The interpreter of a virtual environment with verifiers, and the tasksets `guess` and `shop`.

    Args:
        directory: of all processes of the test run. The one that comes first makes the environment there.
    """
    venv, made = directory / "verifiers", directory / "verifiers.made"
    with open(directory / "verifiers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            packages.make_venv(venv, "verifiers", REQUIREMENTS)
            (site_packages,) = venv.glob("lib/python*/site-packages")
            for name, source in TASKSETS.items():
                (site_packages / f"{name}.py").write_text(source)
            made.touch()
    return str(venv / "bin/python")
