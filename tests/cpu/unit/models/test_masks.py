"""Models tell which tokens their masks let a token see."""

from __future__ import annotations

from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, PhimoeConfig, PretrainedConfig, Qwen2MoeConfig

from tests.support.architectures import ALL, ARCHITECTURES, SHAPE, WINDOW
from tests.support.tables import table
from trainer.models.attention import Visible, visible_tokens

_NO_HEADS = {key: value for key, value in SHAPE.items() if key != "head_dim"}
ONE_KIND = {
    "all before": (ARCHITECTURES["llama"], Visible(True, None, True)),
    "a window in the mask alone": (PhimoeConfig(**_NO_HEADS, sliding_window=WINDOW), Visible(True, WINDOW, True)),
    "a window of one token": (PhimoeConfig(**_NO_HEADS, sliding_window=1), Visible(True, 1, True)),
    "later tokens": (LlamaConfig(**SHAPE, is_causal=False), Visible(False, None, False)),
}


def empty(config: PretrainedConfig):
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@table("name", ONE_KIND)
def test_a_model_tells_its_masks(name):
    config, expected = ONE_KIND[name]
    assert visible_tokens(empty(config)) == [expected] * config.num_hidden_layers


def test_blocks_have_masks_of_their_own():
    first, second = visible_tokens(empty(ALL["sinks"]))
    assert (first, second) == (Visible(True, WINDOW, False), Visible(True, None, False))
    layers = ["full_attention", "sliding_attention"]
    windows = Qwen2MoeConfig(**SHAPE, num_experts=2, sliding_window=WINDOW, layer_types=layers, use_sliding_window=True)
    assert [one.window for one in visible_tokens(empty(windows))] == [None, WINDOW]


def test_asking_changes_nothing():
    model = empty(ALL["sinks"])
    forward = model.model.layers[0].forward
    visible_tokens(model)
    assert model.config._attn_implementation == "eager" and model.model.layers[0].forward == forward
    assert "forward" not in vars(model.model.layers[0])


def test_a_model_with_a_recurrent_state_tells_nothing():
    """Its blocks get no mask of tokens."""
    from transformers import Mamba2Config

    config = Mamba2Config(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8)
    assert visible_tokens(empty(config)) is None


def test_positions_that_do_not_reach_the_mask_separate_nothing():
    config = BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=2)
    assert visible_tokens(empty(config)) == [Visible(True, None, False)]
