"""The masks of transformers' models under torch.compile: left out where they are in eager mode, and nowhere else."""

from __future__ import annotations

import inspect
import types

import pytest

torch = pytest.importorskip("torch")

from aotops.frontends import torch as ours  # noqa: E402
from aotops.frontends.torch import known_masks as known  # noqa: E402
from aotops.frontends.torch import replaced_globals as calls  # noqa: E402

from .test_replace import GROUPED, bert, gpt2, gpt_neox, llama, made, qwen, transformers, vit  # noqa: E402

ROWS = 11
CAUSAL = (gpt2, llama, qwen, gpt_neox)


def mistral():
    t = transformers()
    return t.MistralForCausalLM(t.MistralConfig(**GROUPED, sliding_window=ROWS + 1))


def mistral_of_a_short_window():
    t = transformers()
    return t.MistralForCausalLM(t.MistralConfig(**GROUPED, sliding_window=ROWS))


def bert_that_decodes():
    t = transformers()
    size = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return t.BertLMHeadModel(t.BertConfig(**size, **dropout, num_attention_heads=2, is_decoder=True))


def inputs_of(model, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    if hasattr(model, "vit"):
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(0, 97, (2, rows), generator=generator)}


def compiled(model, **options):
    """The model, and a list of what torch's attention gets in its graphs: the shape of a mask, or is_causal."""
    masks = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                mask = node.kwargs["attn_mask"]
                masks.append(mask.meta["example_value"].shape if mask is not None else node.kwargs["is_causal"])
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, **options), masks


def logits(call, inputs):
    with torch.no_grad():
        return call(**inputs).logits


@pytest.mark.parametrize("build", [*CAUSAL, bert, vit, mistral])
@pytest.mark.parametrize("use_cache", [False, True])
def test_no_mask_where_a_call_gives_none(build, use_cache):
    if use_cache and build in (bert, vit):
        pytest.skip("it has no cache")
    model = made(build)
    model.config.use_cache = use_cache
    inputs = inputs_of(model)
    expected = logits(model, inputs)
    call, masks = compiled(model)
    logits(call, inputs)
    before = list(masks)  # masks, but where a version of transformers leaves them out by itself
    with ours.replace(model, only="mask") as record:
        assert [row.operator for row in record.rows if row.operator] == ["mask"]
        call, masks = compiled(model, fullgraph=True)
        torch.testing.assert_close(logits(call, inputs), expected)
        assert masks == [build not in (bert, vit)] * len(before)
        torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=0)
    call, masks = compiled(model)
    logits(call, inputs)
    assert masks == before


def packed(inputs):
    return {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]] * 2)}


def padded(inputs):
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 7:] = 0
    return {"attention_mask": mask}


def whole(inputs):
    return {"attention_mask": torch.ones_like(inputs["input_ids"])}


@pytest.mark.parametrize("build", [*CAUSAL, mistral])
@pytest.mark.parametrize("more", [packed, padded, whole])
def test_what_a_call_gives_is_masked(build, more):
    """By the values of the model as it was, in eager mode, after a call that has no mask."""
    model = made(build)
    model.config.use_cache = False
    inputs = inputs_of(model)
    plain, asked = logits(model, inputs), logits(model, inputs | more(inputs))
    ours.replace(model, only="mask")
    call, masks = compiled(model)
    torch.testing.assert_close(logits(call, inputs), plain)
    assert set(masks) == {True}
    masks.clear()
    torch.testing.assert_close(logits(call, inputs | more(inputs)), asked)
    assert not {True, False} & set(masks)
    if more is not whole:
        assert not torch.allclose(asked, plain, atol=1e-4)


def test_a_window_that_is_shorter_than_the_rows():
    model = made(mistral_of_a_short_window)
    model.config.use_cache = False
    inputs = inputs_of(model)
    expected = logits(model, inputs)
    ours.replace(model, only="mask")
    call, masks = compiled(model)
    torch.testing.assert_close(logits(call, inputs), expected)
    assert not {True, False} & set(masks)


def test_other_attentions_get_their_masks():
    model = made(llama)
    inputs = inputs_of(model)
    ours.replace(model, only="mask")
    for change in ({"_attn_implementation": "eager"}, {"is_causal": False}):
        for name, value in change.items():
            setattr(model.config, name, value)
        expected = logits(model, inputs)
        call, _ = compiled(model)
        torch.testing.assert_close(logits(call, inputs), expected)
        model.config._attn_implementation = "sdpa"


def test_a_model_whose_masks_another_method_makes():
    model = made(bert_that_decodes)
    inputs = inputs_of(model)
    expected = logits(model, inputs)
    ours.replace(model, only="mask")
    call, masks = compiled(model)
    torch.testing.assert_close(logits(call, inputs), expected)
    assert set(masks) == {True}


def test_a_cache_that_holds_rows():
    model = made(llama)
    inputs = inputs_of(model)
    first = {"input_ids": inputs["input_ids"][:, :6]}
    rest = {"input_ids": inputs["input_ids"][:, 6:]}
    expected = logits(model, inputs)[:, 6:]
    ours.replace(model, only="mask")
    with torch.no_grad():
        cache = model(**first, use_cache=True).past_key_values
        call, masks = compiled(model)
        found = call(**rest, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, expected)
    assert not {True, False} & set(masks)


def test_rows_of_any_number():
    model = made(llama)
    model.config.use_cache = False
    ours.replace(model, only="mask")
    call, masks = compiled(model, dynamic=True)
    for rows in (11, 13, 7):
        inputs = inputs_of(model, rows)
        torch.testing.assert_close(logits(call, inputs), logits(model, inputs))
    assert set(masks) == {True}


@pytest.mark.parametrize("build", [gpt2, llama, bert, vit])
def test_training_with_the_masks_left_out(build):
    model = made(build)
    inputs = inputs_of(model)
    gradients = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        call(**inputs).logits.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        ours.replace(model, only="mask")
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- proofs


def forward_of(source):
    """Llama's forward up to its mask, with a line in another place."""
    scope = {"torch": torch, "create_causal_mask": None, "create_sliding_window_causal_mask": None}
    exec(source, scope)
    return scope["forward"]


SOURCE = """
def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None):
    BEFORE
    if position_ids is None:
        past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
        position_ids = position_ids.unsqueeze(0)
    BETWEEN
    mask_kwargs = {
        "config": self.config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "past_key_values": past_key_values,
        "position_ids": position_ids,
    }
    AFTER
    return {"full_attention": create_causal_mask(**mask_kwargs)}
"""
PLACES = ("BEFORE", "BETWEEN", "AFTER")


def with_line(place, line):
    lines = dict.fromkeys(PLACES, "pass") | {place: line}
    source = SOURCE
    for name, text in lines.items():
        source = source.replace(name, text)
    return forward_of(source)


def test_forwards_whose_positions_are_known():
    assert known.knows_positions(with_line("BEFORE", "inputs_embeds = self.wte(input_ids)"))
    for place, line in (
        ("BEFORE", "position_ids = self.positions"),
        ("BETWEEN", "position_ids = position_ids // 2"),
        ("BETWEEN", "del position_ids"),
        ("AFTER", "mask_kwargs['position_ids'] = position_ids // 2"),
        ("AFTER", "other = [create_causal_mask(position_ids=p) for p in position_ids]"),
        ("AFTER", "other = create_causal_mask(self.config, inputs_embeds, None, None, position_ids // 2)"),
        ("AFTER", "other = create_sliding_window_causal_mask(**mask_kwargs, or_mask_function=None)"),
        ("BETWEEN", "other = lambda: position_ids"),
    ):
        assert not known.knows_positions(with_line(place, line)), line
    other = types.SimpleNamespace(arange=None)
    forward = with_line("BEFORE", "pass")
    assert not known.knows_positions(types.FunctionType(forward.__code__, forward.__globals__ | {"torch": other}))


def test_masks_that_are_not_known_are_left():
    model = made(llama)
    forward = calls.undecorated(type(model.model).forward)
    theirs = forward.__globals__["create_causal_mask"]
    theirs = inspect.unwrap(theirs)
    changed = types.FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__)
    changed.__module__ = theirs.__module__
    patched = types.FunctionType(
        forward.__code__, forward.__globals__ | {"create_causal_mask": changed}, "forward", forward.__defaults__
    )
    model.model.__class__ = type("Patched", (type(model.model),), {"forward": patched})
    reasons = [row.reason for row in ours.replace(model, only="mask") if row.name == "model"]
    assert reasons == ["mask: its create_causal_mask is not a known one"]
