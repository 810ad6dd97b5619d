"""What a run optimises: the models that it needs, the experience it makes of episodes, and its loss on the ranks."""

from trainer.config import RoleSpec
from trainer.objectives.base import Computation, Experience, Objective, Outputs, make_objective

__all__ = ["Experience", "Objective", "Outputs", "RoleSpec", "Computation", "make_objective"]
