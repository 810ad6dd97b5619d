"""Lets vLLM look at a class of models in this process.

vLLM starts another process for that, so that its own does not initialise CUDA. That process imports vLLM, for 9 CPU
seconds. vLLM keeps what it has seen in the cache of the user, which is empty on a new machine.
"""

from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda look: look()
