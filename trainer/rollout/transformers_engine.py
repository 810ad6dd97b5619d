"""transformers' `generate` as an engine: slower than vLLM, and everywhere where transformers runs."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from trainer.config import RolloutConfig
from trainer.parallel.shard import param_dtype
from trainer.rollout.engine import Completion, Request, Sampling
from trainer.rollout.weight_sync import WeightSource


class KeyedGumbel(LogitsProcessor):
    """Adds Gumbel noise from each row's own generator, so that the arg max is a sample of softmax(scores).

    A row's draws depend on its seed alone: not on the rows beside it, nor on the global generator.
    """

    def __init__(self, seeds: Sequence[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=g) for g in self._generators])
        return scores - noise.to(scores.device).log()


class Temper(LogitsProcessor):
    """Divides the scores by the temperature and keeps them: completions report log-probs of these."""

    def __init__(self, temperature: float):
        self._temperature = temperature
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self._temperature
        self.steps.append(scores.log_softmax(dim=-1))
        return scores


class TransformersEngine:
    """See `trainer.rollout.engine.Engine` and `trainer.rollout.vllm_engine.VLLMEngine` for the arguments."""

    def __init__(self, model_path: str, *, dtype: str, seed: int, rollout: RolloutConfig, device: str,
                 weight_version: int = 0):  # fmt: skip
        self._device = device
        self._max_num_seqs = rollout.max_num_seqs
        self._version = weight_version
        self._asleep = False
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=param_dtype(dtype, device)).to(device)
        self._model.eval()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests; requests of similar length run together."""
        assert not self._asleep, "wake the engine before generating"
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_token_ids))
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self._max_num_seqs):
            chosen = order[start : start + self._max_num_seqs]
            completions.update(zip(chosen, self._generate([requests[i] for i in chosen], sampling), strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.no_grad()
    def _generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        width = max(len(request.prompt_token_ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            prompt = torch.tensor(list(request.prompt_token_ids))
            ids[row, width - len(prompt) :] = prompt
            attention[row, width - len(prompt) :] = 1
        temper = Temper(sampling.temperature or 1.0)
        processors = LogitsProcessorList([temper])
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.temperature > 0:
            processors.append(KeyedGumbel([request.seed for request in requests]))
        output = self._model.generate(
            ids.to(self._device),
            attention_mask=attention.to(self._device),
            logits_processor=processors,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(sampling.stop_token_ids),
            pad_token_id=sampling.stop_token_ids[0],
        )
        tokens = output[:, width:].cpu()
        logprobs = torch.stack(temper.steps, dim=1).cpu().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return [self._completion(t, p, sampling) for t, p in zip(tokens.tolist(), logprobs.tolist(), strict=True)]

    def _completion(self, tokens: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        for end, token in enumerate(tokens, start=1):
            if token in sampling.stop_token_ids:
                return Completion(tokens[:end], logprobs[:end], "stop", self._version)
        return Completion(tokens, logprobs, "length", self._version)

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Copy the weights of `source` over the old ones, file by file."""
        from safetensors.torch import load_file

        own = self._model.state_dict()  # tied tensors appear under both names and share storage
        for file in glob.glob(os.path.join(source.path, "*.safetensors")):
            for name, tensor in load_file(file).items():
                own[name].copy_(tensor)
        self._version = version

    def set_version(self, version: int) -> None:
        self._version = version

    def sleep(self) -> None:
        """Move the weights to host memory."""
        self._model.to("cpu")
        self._asleep = True

    def wake(self) -> None:
        self._model.to(self._device)
        self._asleep = False

    def shutdown(self) -> None:
        del self._model
