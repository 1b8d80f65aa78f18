"""Generation equals full forward passes, for one prompt at a time."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biases
from biased_flash_attn.nn import BASELINES, CausalLM, positions
from biased_flash_attn.nn.generation import Sampler
from tests.nn.models import DIM, HEADS, SCHEMES, VOCABULARY, causal_lm, with_terms
from tests.support.numerics import assert_close_to_float64

NEW = 6


def padded(prompts: list[Tensor], before: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Prompts in one batch with padding before and after them, and the mask of their tokens."""
    width = max(n + len(prompt) for n, prompt in zip(before, prompts, strict=True))
    tokens = torch.randint(VOCABULARY, (len(prompts), width))
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, kept, n, prompt in zip(tokens, mask, before, prompts, strict=True):
        row[n : n + len(prompt)] = prompt
        kept[n : n + len(prompt)] = True
    return tokens, mask


def prompts_of(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randint(VOCABULARY, (n,)) for n in lengths]


@torch.no_grad()
def check_continuations(model: CausalLM, prompts: list[Tensor], before: tuple[int, ...]) -> None:
    """Those of padded prompts are the most likely tokens, by the logits of forward passes over
    each whole sequence alone."""
    tokens, mask = padded(prompts, before)
    steps = []
    with model.head.register_forward_hook(lambda head, inputs, logits: steps.append(logits)):
        generated = model.generate(tokens, NEW, key_padding_mask=mask)
    assert torch.equal(generated[:, : tokens.shape[1]], tokens)
    of_rows = zip(prompts, generated[:, tokens.shape[1] :], torch.stack(steps, 1), strict=True)
    for prompt, new, logits in of_rows:
        whole = torch.cat([prompt, new[:-1]])[None]
        exact, terms = (x[0, -NEW:] for x in with_terms(model.head, model, whole))
        assert_close_to_float64(logits, exact, None, f"after {len(prompt)} tokens", terms)
        assert torch.equal(new, exact.argmax(-1))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("before", [(0, 0, 0), (5, 0, 8), (2, 0, 6)], ids=["right", "left", "both"])
def test_continuations_are_those_of_full_forward_passes_over_each_prompt_alone(scheme, before):
    check_continuations(causal_lm(scheme), prompts_of((4, 9, 1)), before)


def test_prompts_of_one_length_need_no_mask():
    model, tokens = causal_lm("alibi"), torch.randint(VOCABULARY, (2, 5))
    expected = model.generate(tokens, NEW, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    assert torch.equal(model.generate(tokens, NEW), expected)


@pytest.mark.parametrize("scheme", ["none", "alibi", "cable", "transformer_xl", "rotary"])
@pytest.mark.parametrize("window", [5, 70])
def test_prompts_may_be_longer_than_a_sliding_cache(scheme, window):
    model = causal_lm(replace(positions(scheme), window=window))
    check_continuations(model, prompts_of((3, 400, 131, 250)), (397, 0, 0, 100))


def test_padding_need_not_be_in_the_vocabulary():
    model, prompts = causal_lm("alibi"), prompts_of((4, 9, 1))
    tokens, mask = padded(prompts, (0, 0, 3))
    other = model.generate(tokens.where(mask, -1), NEW, key_padding_mask=mask)
    assert torch.equal(other[:, 9:], model.generate(tokens, NEW, key_padding_mask=mask)[:, 9:])


def test_no_new_tokens_are_the_prompts():
    model, tokens = causal_lm("alibi"), torch.randint(VOCABULARY, (2, 5))
    assert torch.equal(model.generate(tokens, 0), tokens)


def test_rows_end_with_their_stop_token_and_are_filled_with_it():
    model = causal_lm("cable")
    tokens = torch.randint(VOCABULARY, (8, 5))
    plain = model.generate(tokens, 30)[:, 5:]
    stop_token = int(plain[0, 3])
    stopped = model.generate(tokens, 30, stop_token=stop_token)[:, 5:]
    ends = [(row == stop_token).nonzero().flatten().tolist()[:1] for row in plain]
    assert [] in ends
    assert sum(end != [] for end in ends) > 1
    for row, expected, end in zip(stopped, plain, ends, strict=True):
        kept = end[0] if end else 30
        assert torch.equal(row[:kept], expected[:kept])
        assert (row[kept:] == stop_token).all()


def test_generation_ends_when_every_row_has_stopped():
    model, tokens = causal_lm("alibi"), torch.randint(VOCABULARY, (1, 5))
    stop_token = int(model.generate(tokens, 1)[0, -1])
    assert model.generate(tokens, 30, stop_token=stop_token).shape == (1, 6)


def test_sampling_is_reproduced_by_a_generator():
    model, tokens = causal_lm("alibi"), torch.randint(VOCABULARY, (3, 5))

    def sampled(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(tokens, 20, temperature=1.0, generator=generator)

    assert torch.equal(sampled(1), sampled(1))
    assert not torch.equal(sampled(1), sampled(2))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 4), (1.0, 99)])
def test_tokens_are_drawn_from_the_softmax_of_the_most_likely_logits(temperature, top_k):
    model, prompt = causal_lm("alibi"), torch.randint(VOCABULARY, (1, 5))
    draws = 5000
    drawn = model.generate(prompt.expand(draws, 5), 1, temperature=temperature, top_k=top_k)[:, -1]
    with torch.no_grad():
        logits = model(prompt)[0, -1] / temperature
    if top_k is not None:
        logits[logits < logits.topk(min(top_k, VOCABULARY))[0][-1]] = -torch.inf
    p = logits.softmax(-1)
    frequency = torch.bincount(drawn, minlength=VOCABULARY) / draws
    # Five standard deviations of each frequency, and some draws more for the rarest tokens.
    bound = 5 * (p * (1 - p) / draws).sqrt() + 10 / draws
    assert ((frequency - p).abs() <= bound).all()
    assert (frequency[p == 0] == 0).all()


@pytest.mark.parametrize("top_k", [None, 90])
def test_weights_of_bfloat16_logits_are_not_rounded(top_k):
    logits = torch.randn(500, 100).bfloat16()

    def drawn(logits: Tensor) -> Tensor:
        return Sampler(0.7, top_k, torch.Generator().manual_seed(0))(logits)

    assert torch.equal(drawn(logits), drawn(logits.float()))


def test_low_temperatures_and_one_candidate_take_the_most_likely_token():
    model, tokens = causal_lm("alibi"), torch.randint(VOCABULARY, (3, 5))
    expected = model.generate(tokens, NEW)
    for temperature in (1e-6, 1e-40, 1e-300):
        assert torch.equal(model.generate(tokens, NEW, temperature=temperature), expected)
    assert torch.equal(model.generate(tokens, NEW, temperature=1.0, top_k=1), expected)


@pytest.mark.parametrize("scheme", [*biases.NAMED, *BASELINES])
def test_steps_under_autocast_are_as_accurate_as_forward_passes(scheme):
    exact = causal_lm(scheme)
    model, steps = deepcopy(exact).float(), []
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        model.head.register_forward_hook(lambda head, inputs, logits: steps.append(logits)),
    ):
        assert model.make_caches(1)[0].k.dtype == torch.bfloat16
        whole = model.generate(torch.randint(VOCABULARY, (2, 5)), NEW)[:, :-1]
        actual, naive = torch.stack(steps, 1), model(whole)[:, -NEW:]
    expected, terms = (x[:, -NEW:] for x in with_terms(exact.head, exact, whole))
    assert_close_to_float64(actual, expected, naive, "logits", terms)


@pytest.mark.parametrize("scheme", ["alibi", *BASELINES])
def test_models_in_bfloat16_generate_tokens_of_the_dtype_of_prompts(scheme):
    model = causal_lm(scheme).bfloat16()
    generated = model.generate(torch.randint(VOCABULARY, (2, 5), dtype=torch.int32), 3)
    assert generated.dtype == torch.int32


def test_caches_for_autocast_may_be_created_before():
    model, tokens = causal_lm("alibi").float(), torch.randint(VOCABULARY, (2, 5))
    caches = model.make_caches(2, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tokens, caches), model(tokens, model.make_caches(2)))


def test_learned_positions_limit_prompts_and_continuations_together():
    model = CausalLM(VOCABULARY, DIM, 1, HEADS, "learned", max_length=8)
    tokens = torch.randint(VOCABULARY, (2, 9))
    mask = torch.arange(9) < torch.tensor([[5], [2]])
    assert model.generate(tokens, 3, key_padding_mask=mask).shape == (2, 12)
    message = "^max_new_tokens is 4 after a prompt of 5; learned positions have at most 8 together"
    with pytest.raises(ValueError, match=message):
        model.generate(tokens, 4, key_padding_mask=mask)


TOKENS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": [[1, 2]]}, TypeError, "tokens is a list; it must be a torch.Tensor"),
        ({"tokens": TOKENS[0]}, ValueError, r"tokens has shape \(3,\); it must be \(batch, tokens"),
        ({"tokens": TOKENS[:, :0]}, ValueError, r"tokens has shape \(2, 0\); a prompt must have"),
        ({"tokens": TOKENS.float()}, TypeError, "tokens is torch.float32; it must be torch.int64"),
        ({"tokens": TOKENS.to("meta")}, ValueError, "tokens is on meta and has no values"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be 0 or more, not -1"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int, not 2.0"),
        ({"temperature": -1}, ValueError, "temperature must be 0 or more, not -1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite, not nan"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, not 'hot'"),
        ({"top_k": 0, "temperature": 1}, ValueError, "top_k must be positive, not 0"),
        ({"top_k": 5}, ValueError, "top_k is given with temperature 0, which takes the most li"),
        ({"generator": torch.Generator()}, ValueError, "generator is given with temperature 0"),
        ({"generator": 3, "temperature": 1}, TypeError, "generator is a int; it must be None or"),
        ({"stop_token": VOCABULARY}, ValueError, "stop_token is 19; it may be 0 to 18"),
        ({"stop_token": -1}, ValueError, "stop_token must be 0 or more, not -1"),
        ({"key_padding_mask": TOKENS}, TypeError, "key_padding_mask is torch.int64; it must be"),
        (
            {"key_padding_mask": torch.tensor([[True, True, True], [False, False, False]])},
            ValueError,
            "key_padding_mask has no token in row 1; a prompt must have at least one",
        ),
        (
            {"key_padding_mask": torch.tensor([[True, False, True]]).expand(2, 3)},
            ValueError,
            "key_padding_mask has padding between the tokens of batch entry 0",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match="^" + message):
        causal_lm("alibi").generate(**{"tokens": TOKENS, "max_new_tokens": 2} | arguments)
