"""Models of transformers give the same outputs and gradients on limelight as without it."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils

import limelight as ll
from limelight.integrations import transformers as plugin
from limelight.integrations.transformers import LazyMask, attention_forward

plugin.register()

SMALL = {"vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
DECODER = SMALL | {"intermediate_size": 48, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
GROUPED = DECODER | {"num_key_value_heads": 2, "attention_dropout": 0.0}
LENGTH = 13


def bert(**others):
    config = transformers.BertConfig(
        **SMALL,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=others.pop("dropout", 0.0),
        **others,
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def llama(**others):
    return transformers.LlamaModel(transformers.LlamaConfig(**GROUPED, **others))


def gpt_neox():
    return transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**DECODER))


def mistral():
    return transformers.MistralModel(transformers.MistralConfig(**GROUPED, sliding_window=4))


def modernbert():
    config = transformers.ModernBertConfig(
        **DECODER, cls_token_id=1, sep_token_id=2, local_attention=6, global_attn_every_n_layers=2
    )
    return transformers.ModernBertModel(config)


def gemma2():
    """Soft-capped scores, a scale of its own and sliding windows: more than sdpa can run."""
    config = transformers.Gemma2Config(
        **GROUPED, head_dim=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=3, sliding_window=4
    )
    return transformers.Gemma2Model(config)


def gpt_oss():
    """Attention sinks, which sdpa cannot run either."""
    config = transformers.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    )
    return transformers.GptOssModel(config)


MODELS = {
    "bert": (bert, "sdpa"),
    "modernbert": (modernbert, "sdpa"),
    "llama": (llama, "sdpa"),
    "gpt_neox": (gpt_neox, "sdpa"),
    "mistral": (mistral, "sdpa"),
    "gemma2": (gemma2, "eager"),
    "gpt_oss": (gpt_oss, "eager"),
}


def padding(side):
    """[3, LENGTH]: 1 for a token."""
    if side == "none":
        return None
    position = torch.arange(LENGTH)
    lengths = torch.tensor([LENGTH, 8, 5])[:, None]
    real = position < lengths if side == "right" else position >= LENGTH - lengths
    return real.long()


def run(model, implementation, mask, **inputs):
    """Hidden states of the real tokens, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    hidden = model(attention_mask=mask, **inputs).last_hidden_state
    real = hidden if mask is None else hidden[mask.bool()]
    torch.manual_seed(7)
    (real * torch.randn_like(real)).sum().backward()
    return real.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_same(got, want):
    out, gradients = got
    want_out, want_gradients = want
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-3, atol=2e-5 * scale, msg=name
        )


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_same_as_the_stock_implementation(name, side):
    make, stock = MODELS[name]
    torch.manual_seed(0)
    model = make().train(side == "right")
    # Parameters as they are drawn leave attention nearly uniform; larger ones make it matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    ids = torch.randint(3, 67, (3, LENGTH))
    mask = padding(side)
    want = run(model, stock, mask, input_ids=ids)
    with ll.record() as calls:
        got = run(model, "limelight", mask, input_ids=ids)
    assert_same(got, want)
    stages = [call.stage for call in calls]
    assert stages.count("forward") == stages.count("backward") == 2


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_t5_with_its_relative_bias(side):
    config = transformers.T5Config(
        vocab_size=67, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    torch.manual_seed(0)
    model = transformers.T5Model(config).train()
    inputs = {
        "input_ids": torch.randint(3, 67, (3, LENGTH)),
        "decoder_input_ids": torch.randint(3, 67, (3, 6)),
    }

    def outcome(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        hidden = model(attention_mask=padding(side), **inputs).last_hidden_state
        hidden.square().sum().backward()
        return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

    want = outcome("sdpa")
    with ll.record() as calls:
        got = outcome("limelight")
    assert_same(got, want)
    biased = [
        n for n, gradient in got[1].items() if "relative_attention_bias" in n and gradient.any()
    ]
    assert len(biased) == 2
    assert any(call.choice.problem.bias is not None for call in calls)


def test_bert_decoder_with_cross_attention():
    torch.manual_seed(0)
    model = bert(is_decoder=True, add_cross_attention=True).eval()
    inputs = {
        "input_ids": torch.randint(3, 67, (3, 6)),
        "encoder_hidden_states": torch.randn(3, LENGTH, 32),
        "encoder_attention_mask": padding("right"),
    }
    assert_same(run(model, "limelight", None, **inputs), run(model, "sdpa", None, **inputs))


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(side, cache):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    model.generation_config.compile_config = None
    model.generation_config.disable_compile = True
    ids = torch.randint(3, 67, (3, LENGTH))
    mask = torch.ones_like(ids) if side == "none" else padding(side)

    def tokens(implementation):
        model.set_attn_implementation(implementation)
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            cache_implementation=None if cache == "dynamic" else cache,
        )
        return found.tolist()

    assert tokens("limelight") == tokens("sdpa")


def test_packed_sequences():
    torch.manual_seed(0)
    model = llama().eval()
    ids = torch.randint(3, 67, (1, LENGTH))
    positions = torch.tensor([[*range(5), *range(8)]])
    model.config.use_cache = False
    inputs = {"input_ids": ids, "position_ids": positions}
    assert_same(run(model, "limelight", None, **inputs), run(model, "sdpa", None, **inputs))


def test_padding_needs_no_matrix():
    model = bert().eval()
    ids = torch.randint(3, 67, (3, LENGTH))
    model.set_attn_implementation("limelight")
    for side, kind in (("right", ll.KeyLengths), ("left", ll.DenseMask)):
        with ll.record() as calls, torch.no_grad():
            model(ids, attention_mask=padding(side))
        mask = calls[0].choice.problem.mask
        assert isinstance(mask, kind)
        if side == "left":
            assert mask.tensor.shape == (3, 1, 1, LENGTH)


def test_causal_padding_needs_no_matrix():
    model = llama().eval()
    model.set_attn_implementation("limelight")
    with ll.record() as calls, torch.no_grad():
        model(torch.randint(3, 67, (3, LENGTH)), attention_mask=padding("right"))
    assert repr(calls[0].choice.problem.mask) == "Causal() & KeyLengths(lengths=int64[3])"


def test_grouped_heads_are_not_repeated():
    model = llama().eval()
    model.set_attn_implementation("limelight")
    with ll.record() as calls, torch.no_grad():
        model(torch.randint(3, 67, (1, LENGTH)))
    assert calls[0].choice.problem.group == 2


def test_dropout_only_in_training():
    model = bert(dropout=0.25)
    model.set_attn_implementation("limelight")
    ids = torch.randint(3, 67, (1, LENGTH))
    seen = {}
    for training in (True, False):
        with ll.record() as calls, torch.no_grad():
            model.train(training)(ids)
        seen[training] = calls[0].choice.problem.dropout_p
    assert seen == {True: 0.25, False: 0.0}


def test_compiled_model():
    torch.manual_seed(0)
    model = bert().eval()
    ids, mask = torch.randint(3, 67, (3, LENGTH)), padding("right")
    model.set_attn_implementation("limelight")
    with torch.no_grad():
        want = model(ids, attention_mask=mask).last_hidden_state
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with ll.record() as calls:
            got = compiled(ids, attention_mask=mask).last_hidden_state
    assert calls[0].choice.problem.mask.tensor.shape == (3, 1, 1, LENGTH)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# The mask function, element by element.

SHAPES = [  # q_length, kv_length, q_offset, kv_offset
    (7, 7, 0, 0),
    (1, 9, 8, 0),
    (4, 9, 5, 0),
    (4, 12, 0, 0),
    (4, 12, 3, 0),
    (3, 6, 9, 6),
]


def paddings(length):
    holes = torch.ones(2, length, dtype=torch.bool)
    holes[0, 2:4] = False
    left, right = holes.clone(), holes.clone()
    left[0], right[0] = torch.arange(length) >= 3, torch.arange(length) < length - 3
    nothing = right.clone()
    nothing[1] = False
    return {
        "full": torch.ones_like(holes),
        "left": left,
        "right": right,
        "holes": holes,
        "nothing": nothing,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_mask_is_that_of_sdpa(shape, causal):
    function = (
        masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    )
    q_length, kv_length, q_offset, kv_offset = shape
    arguments = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
    }
    total = kv_length + kv_offset
    for name, mask in {None: None, **paddings(total), **paddings(total - 2)}.items():
        never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        want = masking_utils.sdpa_mask(**arguments, attention_mask=mask, **never)
        got = plugin.attention_mask(**arguments, attention_mask=mask, **never)
        assert isinstance(got, LazyMask)
        assert got.shape == want.shape
        assert torch.equal(got.dense(), want), name
        skip = {"allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal}
        skipped = plugin.attention_mask(**arguments, attention_mask=mask, **skip)
        if skipped is None:
            assert masking_utils.sdpa_mask(**arguments, attention_mask=mask, **skip) is None
        else:
            assert torch.equal(skipped.dense(), want), name


def test_other_masks_are_sdpas_own():
    function = masking_utils.sliding_window_causal_mask_function(3)
    arguments = {
        "batch_size": 1,
        "q_length": 8,
        "kv_length": 8,
        "mask_function": function,
        "local_size": 3,
    }
    got = plugin.attention_mask(**arguments)
    assert not isinstance(got, LazyMask)
    assert torch.equal(got, masking_utils.sdpa_mask(**arguments))


def test_lazy_mask_is_a_tensor_to_models():
    lazy = LazyMask(ll.Causal(), 0, (2, 1, 4, 6), "cpu")
    dense = lazy.dense()
    assert lazy.dtype == torch.bool
    assert lazy.ndim == 4
    assert lazy.device.type == "cpu"
    for change in (
        lambda m: m[:, :, :, :3],
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: torch.cat([m, m], dim=-1),
        lambda m: m & ~m[..., :1],
        lambda m: m.to(torch.float32),
        lambda m: (1.0 - m.float()) * -10,
    ):
        changed = change(lazy)
        assert type(changed) is torch.Tensor
        assert torch.equal(changed, change(dense))
    assert "Causal()" in repr(lazy)


# The attention function with tensors as users may pass them.


class Layer(torch.nn.Module):
    is_causal = False


def layer_inputs():
    torch.manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("kind", ["bool", "float", "two dimensions", "expanded"])
def test_tensors_as_masks(kind):
    query, key, value = layer_inputs()
    keep = torch.rand(2, 1, 5, 7) > 0.4
    keep[..., 0] = True
    if kind == "expanded":
        keep = keep[:, :, :1].expand(-1, -1, 5, -1)
    mask = keep
    if kind == "float":
        mask = torch.where(keep, 0.5, -torch.inf).double()
    if kind == "two dimensions":
        mask = keep[:, 0, 0].long()
        keep = keep[:, :, :1]
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask if kind == "float" else keep, scale=0.3, enable_gqa=True
    )
    with ll.record() as calls:
        out, weights = attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    assert weights is None
    assert out.is_contiguous()
    torch.testing.assert_close(out, want.transpose(1, 2))
    if kind == "expanded":
        assert calls[0].choice.problem.mask.tensor.shape == (2, 1, 1, 7)


@pytest.mark.parametrize("causal", [True, False])
def test_position_bias_and_gradient(causal):
    query, key, value = layer_inputs()
    bias = torch.randn(1, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(5, 7).tril().bool() if causal else torch.ones(5, 7).bool()
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, torch.where(visible, bias, -torch.inf), enable_gqa=True
    )
    out, _ = attention_forward(
        Layer(), query, key, value, None, position_bias=bias, is_causal=causal
    )
    torch.testing.assert_close(out, want.transpose(1, 2))
    up = torch.randn_like(out)
    (got_grad,) = torch.autograd.grad(out, bias, up)
    (want_grad,) = torch.autograd.grad(want, bias, up.transpose(1, 2))
    torch.testing.assert_close(got_grad, want_grad)


def test_one_query_is_never_causal():
    query, key, value = layer_inputs()
    module = Layer()
    module.is_causal = True
    out, _ = attention_forward(module, query[:, :, :1], key, value, None)
    want = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, :1], key, value, enable_gqa=True
    )
    torch.testing.assert_close(out, want.transpose(1, 2))


def test_queries_shared_by_the_batch():
    query, key, value = layer_inputs()
    out, _ = attention_forward(Layer(), query[:1], key, value, None)
    repeated, _ = attention_forward(Layer(), query[:1].expand(2, -1, -1, -1), key, value, None)
    torch.testing.assert_close(out, repeated)


def test_wrong_masks_are_named():
    query, key, value = layer_inputs()
    with pytest.raises(TypeError, match="attention_mask: found str"):
        attention_forward(Layer(), query, key, value, "causal")
    with pytest.raises(ValueError, match="attention_mask"):
        attention_forward(Layer(), query, key, value, torch.ones(3, 7))


def test_names():
    with pytest.raises(ValueError, match="flash"):
        plugin.register("limelight_flash")
    plugin.register("another")
    assert "another" in transformers.AttentionInterface()
    assert "another" in transformers.AttentionMaskInterface()
