"""Models as libraries call them: complete models without gradients, against their own attention.

Texts and series of unequal length are padded to the longest, as the libraries do it. Accelerated
encoders compute nothing for the padding.
"""

import copy
import string

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from bench.common.growth import growth
from bench.common.measure import alternate, seconds
from bench.models.subjects import Encoding, mpnet
from biased_flash_attn.integrations.transformers import accelerate

ROUNDS = 3


def compare(benchmark, record, work: str, own, ours, call, target: float) -> None:
    """Checks and times call(model) of both."""
    expected = call(own)
    size = expected.abs().max().item()
    torch.testing.assert_close(call(ours), expected, rtol=0, atol=1e-5 * size)
    mine, others = alternate(benchmark, lambda: call(ours), seconds(lambda: call(own)), ROUNDS)
    ratios = [other / m for m, other in zip(mine, others, strict=True)]
    record(work, "float32", ratios, "x", ">=", target, mine, others)


@pytest.fixture(scope="module")
def embedding_models(tmp_path_factory):
    """A SentenceTransformer in the shape of all-mpnet-base-v2, and its accelerated copy."""
    folder = str(tmp_path_factory.mktemp("mpnet"))
    torch.manual_seed(0)
    mpnet(12, 512).save_pretrained(folder)
    words = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", *string.ascii_lowercase]
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.MPNetTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    own, ours = (SentenceTransformer(folder, device="cpu") for _ in range(2))
    return own, accelerate(ours)


@pytest.mark.parametrize(
    ("texts", "shortest", "longest", "target"), [(32, 16, 384, 1.5), (12, 512, 512, 1.0)]
)
def test_encode(benchmark, record, embedding_models, texts, shortest, longest, target):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (texts,), generator=generator)
    lengths[0] = longest

    def text(tokens: int) -> str:
        """Each letter is a token, and so are the begin and the end."""
        letters = torch.randint(26, (tokens - 2,), generator=generator)
        return " ".join(string.ascii_lowercase[i] for i in letters)

    batch = [text(n) for n in lengths.tolist()]
    own, ours = embedding_models
    kind = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
    compare(
        benchmark,
        record,
        f"encode() of sentence-transformers, {texts} texts of {kind}, MPNet-base",
        own,
        ours,
        lambda model: torch.from_numpy(model.encode(batch, batch_size=texts)),
        target,
    )


def test_t5_encoder(benchmark, record):
    own, ours = (Encoding("t5", 512, accelerated=a, batch=4) for a in (False, True))
    work = "T5-base's encoder, 4 texts of 512 tokens"
    compare(benchmark, record, work, own, ours, lambda model: model(), 1.0)


@pytest.mark.parametrize(
    ("kind", "shortest", "target"), [("100 to 2048 steps", 100, 1.2), ("2048 steps", 2048, 1.0)]
)
def test_forecast(benchmark, record, kind, shortest, target):
    """The shape of Chronos-Bolt-base, whose patches of 16 steps are tokens."""
    from chronos import ChronosBoltPipeline
    from chronos.chronos_bolt import ChronosBoltModelForForecasting

    torch.manual_seed(0)
    shape = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    chronos = {"context_length": 2048, "prediction_length": 64, "input_patch_size": 16}
    chronos |= {"input_patch_stride": 16, "use_reg_token": True}
    chronos |= {"quantiles": [x / 10 for x in range(1, 10)]}
    config = transformers.T5Config(**shape, chronos_config=chronos, decoder_start_token_id=0)
    model = ChronosBoltModelForForecasting(config).eval()
    lengths = torch.randint(shortest, 2049, (64,))
    lengths[0] = 2048
    series = [torch.randn(n).cumsum(0) for n in lengths.tolist()]
    own = ChronosBoltPipeline(model)
    compare(
        benchmark,
        record,
        f"forecast of 64 series of {kind}, Chronos-Bolt-base",
        own,
        accelerate(copy.deepcopy(own)),
        lambda pipeline: pipeline.predict(series),
        target,
    )


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("name", ["mpnet", "t5"])
def test_memory(record, name, length):
    ours, own = (growth(Encoding, name, length, accelerated=x) for x in (True, False))
    shape = {"mpnet": "MPNet-base", "t5": "T5-base's encoder"}[name]
    work = f"peak memory of {shape}, {length} tokens: {ours:.0f} MiB against {own:.0f} MiB"
    record(work, "float32", [100 * ours / own], " %", "<=", 100)
