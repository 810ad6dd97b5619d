"""What runs inside vLLM's workers (its `worker_extension_cls`)."""

from __future__ import annotations

from vllm.config import set_current_vllm_config


class WeightReceiver:
    """Methods added to vLLM's worker class; called by name through `collective_rpc`."""

    def load_shared(self, path: str) -> None:
        """Replace the weights by the safetensors files in `path`, tensor by tensor."""
        self.reload_weights(weights_path=path)
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        # On CPU linears keep packed copies of their weights. Reloading packs them anew, but for an output
        # head tied to the embedding, which has no weight of its own in the files: it would go on with the
        # old ones, silently.
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        if self.device.type == "cpu" and head is not None and hasattr(head, "quant_method"):
            with set_current_vllm_config(self.vllm_config):
                head.quant_method.process_weights_after_loading(head)
