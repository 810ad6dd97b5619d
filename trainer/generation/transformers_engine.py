"""transformers' `generate` as an engine: slower than vLLM, but it runs wherever transformers runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.config import RolloutConfig
from trainer.generation.engine import Completion, Request, Sampling, by_length
from trainer.generation.weight_shards import Shards, close_copies
from trainer.generation.weight_sync import Broadcast, Ipc, SharedMemory, read_weights
from trainer.models.loading import load_pretrained
from trainer.models.weight_deltas import WeightsDigest
from trainer.models.weight_names import module_weights
from trainer.parallel.shard import param_dtype


class KeyedSampler(LogitsProcessor):
    """Draws each row's next token with the row's own generator, and makes `generate` choose it.

    The arg max of log-probabilities plus Gumbel noise is a sample of the distribution. A row's draws depend on
    its seed only, not on other rows or on the global generator.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int]):
        self._temperature = sampling.temperature
        self._warpers = LogitsProcessorList()
        self._generators = []
        if sampling.temperature > 0:
            if sampling.top_k > 0:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
            self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.logprobs: list[Tensor] = []  # log-probs of the tokens drawn, `(B, 1)` for each call

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Turn logits `(B, V)` into scores `(B, V)`: 0 for the token drawn, -inf for all others."""
        logprobs = self._warpers(input_ids, scores.float() / (self._temperature or 1.0)).log_softmax(dim=-1)
        scores = logprobs
        if self._generators:  # add Gumbel noise
            draws = [torch.empty(logprobs.shape[1]).exponential_(generator=one) for one in self._generators]
            noise = -torch.stack(draws).clamp_min(torch.finfo(torch.float32).tiny).log().to(logprobs.device)
            scores = logprobs + noise
        tokens = scores.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, tokens).cpu())
        return torch.full_like(logprobs, -torch.inf).scatter_(-1, tokens, 0.0)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows alone."""
        self._generators = [self._generators[row] for row in rows if self._generators]
        self.logprobs = []


class HalfHaveEnded(StoppingCriteria):
    """Stops `generate` when at most half of the rows continue: it computes all of them until the last one ends."""

    def __init__(self, stop_token_ids: Sequence[int], rows: int):
        self._stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.long)
        self._ended = torch.zeros(rows, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Return for each row `(B,)` whether to stop: for all of them or for none."""
        self._ended |= torch.isin(input_ids[:, -1].cpu(), self._stop_token_ids)
        stop = 2 * int(self._ended.sum()) >= len(self._ended)
        return torch.full((len(input_ids),), stop, device=input_ids.device)


class TransformersEngine:
    """See `trainer.generation.engine.Engine`, and `trainer.generation.vllm_engine.VLLMEngine` for the arguments."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        seed: int,
        rollout: RolloutConfig,
        device: str,
        trust_remote_code: bool = False,
    ):
        self._device = device
        self._max_num_seqs = rollout.max_num_seqs
        self._version = 0
        self._asleep = False
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens
        numbers = param_dtype(dtype, device)
        self._model = load_pretrained(model_path, numbers, trust_remote_code, longest=longest).to(device)
        self._model.eval()
        use_full_attention(self._model)
        # The generation config of the model directory may set penalties or sampling.
        self._model.generation_config = GenerationConfig()
        layers = DynamicCache(config=self._model.config).layers
        self._can_drop_rows = all(hasattr(layer, "batch_select_indices") for layer in layers)  # linear attention cannot

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return completions in the order of the requests. Requests alike in sampling and length run together."""
        assert not self._asleep, "wake the engine before generating"
        completions: dict[int, Completion] = {}
        for chosen in by_length(requests, 1, self._max_num_seqs):
            completions.update(zip(chosen, self._generate([requests[i] for i in chosen]), strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.no_grad()
    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return completions of requests with one sampling."""
        sampling = requests[0].sampling
        stops = list(sampling.stop_token_ids)
        width = max(len(request.prompt_token_ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            prompt = torch.from_numpy(request.prompt_token_ids)
            ids[row, width - len(prompt) :] = prompt
            attention[row, width - len(prompt) :] = 1
        sampler = KeyedSampler(sampling, [request.seed for request in requests])
        ids, attention = ids.to(self._device), attention.to(self._device)
        tokens = np.zeros((len(requests), sampling.max_tokens), np.int32)
        logprobs = np.zeros((len(requests), sampling.max_tokens), np.float32)
        done, rows, cache = 0, list(range(len(requests))), None
        while rows:
            # Until half of the rows or all of them have ended. The cache is that of all tokens but the last.
            may_stop = [HalfHaveEnded(stops, len(ids))] if stops and self._can_drop_rows else []
            output = self._model.generate(
                ids,
                attention_mask=attention,
                past_key_values=cache,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList(may_stop),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=sampling.max_tokens - done,
                    eos_token_id=stops or None,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                ),
            )
            new = output.sequences[:, ids.shape[1] :]
            end = done + new.shape[1]
            tokens[rows, done:end] = new.cpu().numpy()
            logprobs[rows, done:end] = torch.cat(sampler.logprobs, dim=-1).numpy()
            stopped = np.isin(tokens[rows, done:end], stops).any(axis=1)
            continuing = np.flatnonzero(~stopped).tolist() if end < sampling.max_tokens else []
            rows, done = [rows[i] for i in continuing], end
            if rows:
                sampler.keep(continuing)
                ids, cache = output.sequences[continuing], output.past_key_values
                attention = torch.cat([attention, torch.ones_like(new)], dim=1)[continuing]
                cache.batch_select_indices(torch.tensor(continuing, device=self._device))
        completions = []
        for row, row_logprobs in zip(tokens, logprobs, strict=True):
            ends = np.flatnonzero(np.isin(row, stops))
            end, reason = (int(ends[0]) + 1, "stop") if len(ends) else (len(row), "length")
            # Copies, because a view would keep the tokens of the whole batch.
            completions.append(Completion(row[:end].copy(), row_logprobs[:end].copy(), reason, self._version))
        return completions

    @torch.no_grad()
    def sync_weights(self, source: SharedMemory | Shards | Broadcast | Ipc, version: int) -> str:
        """Copy the weights of `source` over the old ones, tensor by tensor.

        Raises:
            ValueError: the model lacks one of them, or a weight of the model is not among them.
        """
        own = self._model.state_dict()  # tied weights are there under both names
        renewed, digest = set(), WeightsDigest()
        in_files = isinstance(source, (SharedMemory, Shards))
        with source.opened() if in_files else nullcontext() as directory:
            tensors = source.receive() if directory is None else read_weights(directory)
            for name, tensor in module_weights(self._model, digest.of(tensors)):
                own[name].copy_(tensor)
                renewed.add(own[name].data_ptr())
        stale = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in renewed)
        if stale:
            raise ValueError(f"the engine got no new values for {len(stale)} weights, {stale[0]} among them")
        self._version = version
        torch.cuda.empty_cache()  # the rank on the same GPU may need the memory for a save
        return str(digest)

    def set_version(self, version: int) -> None:
        self._version = version

    def sleep(self) -> int:
        """Move the weights to host memory."""
        self._model.to("cpu")
        torch.cuda.empty_cache()
        self._asleep = True
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def wake(self) -> None:
        self._model.to(self._device)
        self._asleep = False

    def shutdown(self) -> None:
        """Free the model. The engine is of no use afterwards."""
        del self._model
        close_copies()


_NOTED = "sdpa_noted"
_LEFT_TO_THE_MASK = {"sliding_window", "position_ids", "cache_position"}
"""What models pass to their attention, and `sdpa` finds in the mask."""


@torch.no_grad()
def use_full_attention(model: PreTrainedModel) -> None:
    """Make `model` use its own attention if `sdpa`, transformers' default, leaves out something of it.

    `sdpa` ignores arguments that it does not know, such as Gemma-2's soft cap.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return
    known = {*inspect.signature(sdpa_attention_forward).parameters, *_LEFT_TO_THE_MASK}
    ignored: set[str] = set()

    def noted(*args: Any, **kwargs: Any) -> Any:
        given = {name for name, value in kwargs.items() if value is not None and value is not False}
        ignored.update(given - known)
        return sdpa_attention_forward(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_NOTED, noted)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NOTED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(_NOTED)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    model.set_attn_implementation("eager" if ignored else "sdpa")
