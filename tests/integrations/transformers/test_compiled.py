"""Models under torch.compile and torch.export, which trace the layers and the creation of masks."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

from biased_flash_attn.integrations.transformers import NAME, accelerate
from tests.integrations.transformers.cases import (
    VOCABULARY,
    bloom,
    falcon,
    inkling,
    inkling2,
    mpnet,
    mpt,
    t5,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def llama():
    """Which has no bias, by the name of the attention."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()


ACCELERATED = {
    "bloom": bloom,
    "mpt": mpt,
    "falcon": falcon,
    "t5": lambda: t5().get_encoder(),
    "mpnet": lambda: mpnet("Model"),
    "inkling": inkling,
}
# Inkling takes ten seconds to trace.
MODELS = [
    *(name for name in ACCELERATED if name != "inkling"),
    pytest.param("inkling", marks=pytest.mark.slow),
    "llama",
]


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Not here: torch.compile knows PyTorch's functions by their identities, which it notes once,
    and here must not take the poisoned ones of an earlier test for them."""
    torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()


class Model(nn.Module):
    """The first output of a model, without a cache."""

    def __init__(self, name: str):
        super().__init__()
        self.model = llama() if name == "llama" else accelerate(ACCELERATED[name]())
        self.options = {} if name in ("t5", "mpnet") else {"use_cache": False}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options)[0]


def batch(batch_size: int, n: int, masked: str) -> tuple[Tensor, Tensor | None]:
    ids, mask = torch.randint(1, VOCABULARY, (batch_size, n)), torch.ones(batch_size, n).long()
    if masked == "left":
        mask[0, :3] = 0
    if masked == "right":
        mask[0, -3:] = 0
    return ids, None if masked == "none" else mask


def assert_same_results(found: Tensor, exact: Tensor, mask: Tensor | None) -> None:
    tokens = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(found[tokens], exact[tokens], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_compiles_whole(name):
    torch._dynamo.reset()
    model = Model(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for masked in ("none", "right"):
        ids, mask = batch(2, 21, masked)
        assert_same_results(compiled(ids, mask), model(ids, mask), mask)


@pytest.mark.slow
@torch.no_grad()
def test_compiles_with_layers_that_read_earlier_ones():
    torch._dynamo.reset()
    model = accelerate(inkling2())
    ids, mask = batch(2, 21, "right")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, exact = (run(ids, attention_mask=mask, use_cache=False)[0] for run in (compiled, model))
    assert_same_results(found, exact, mask)


@pytest.mark.parametrize("name", ["bloom", "t5"])
def test_compiled_gradients(name):
    torch._dynamo.reset()
    model = Model(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, mask = batch(2, 21, "none")
    results = []
    for run in (compiled, model):
        loss = run(ids, mask).square().sum()
        results.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("masked", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_exports_over_ranges(name, masked):
    model = Model(name)
    sizes = {0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=2, max=500)}
    shapes = (sizes, None if masked == "none" else sizes)
    exported = torch.export.export(model, batch(2, 21, masked), dynamic_shapes=shapes)
    for size in ((1, 8), (3, 40)):
        ids, mask = batch(*size, masked)
        assert_same_results(exported.module()(ids, mask), model(ids, mask), mask)


@torch.no_grad()
def test_compiled_models_refuse_packed_sequences():
    """Whose positions are known only when compiled code runs."""
    torch._dynamo.reset()
    model = llama()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.randint(1, VOCABULARY, (1, 12))
    for run, error in ((model, NotImplementedError), (compiled, RuntimeError)):
        positions = torch.arange(12)[None]
        run(ids, position_ids=positions, use_cache=False)
        with pytest.raises(error, match="packed by position_ids"):
            run(ids, position_ids=positions % 7, use_cache=False)


@torch.no_grad()
def test_compiled_models_refuse_padding_between_tokens():
    torch._dynamo.reset()
    compiled = torch.compile(Model("bloom"), fullgraph=True, backend="aot_eager")
    ids, mask = batch(2, 12, "left")
    compiled(ids, mask)
    mask[1, 5] = 0
    with pytest.raises(ValueError, match="padding between the tokens of batch entry 1"):
        compiled(ids, mask)
