"""Invalid arguments of public calls raise one error that names the argument, before any work."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.forms import Cumulative, Distance, Linear
from tests.support.lowered import LoweredTo

Q = torch.randn(2, 4, 6, 8)
K = torch.randn(2, 2, 9, 8)
V = torch.randn(2, 2, 9, 5)


WRONG = {
    "q is not a tensor": (TypeError, "q is a list", {"q": [[1.0]]}),
    "k is not a tensor": (TypeError, "k is a NoneType", {"k": None}),
    "q has three dimensions": (ValueError, r"q has shape \(4, 6, 8\)", {"q": Q[0]}),
    "v has five dimensions": (ValueError, "v has shape", {"v": V[None]}),
    "q holds integers": (TypeError, "q is torch.int64", {"q": Q.long()}),
    "q is complex": (TypeError, "q is torch.complex64", {"q": Q.to(torch.complex64)}),
    "k has another dtype": (TypeError, "k is torch.float64 and q is", {"k": K.double()}),
    "v has another dtype": (TypeError, "v is torch.bfloat16 and q is", {"v": V.bfloat16()}),
    "v is on another device": (ValueError, "v is on meta and q on cpu", {"v": V.to("meta")}),
    "head_dim is 0": (ValueError, "q has head_dim 0", {"q": Q[..., :0]}),
    "head_dim is 513": (
        ValueError,
        "v has head_dim 513; it may be 1 to 512",
        {"v": torch.randn(2, 2, 9, 513)},
    ),
    "k has another head_dim": (ValueError, "k has head_dim 7", {"k": K[..., :7]}),
    "channels have a stride": (
        ValueError,
        r"q has stride 6 .*q\.contiguous",
        {"q": Q.mT.contiguous().mT},
    ),
    "k has another batch": (ValueError, "k has batch 1", {"k": K[:1], "v": V[:1]}),
    "v has another length": (ValueError, r"v has shape \(2, 2, 8, 5\)", {"v": V[:, :, 1:]}),
    "v has other heads": (ValueError, "v has shape", {"v": V[:, :1]}),
    "heads do not divide": (
        ValueError,
        "k has 3 heads; their number must divide that of q, 4",
        {"k": torch.randn(2, 3, 9, 8), "v": torch.randn(2, 3, 9, 5)},
    ),
    "tokens of q come before heads": (
        ValueError,
        r"k has 4 heads.*, 6: do heads come before tokens in q",
        {"q": Q.transpose(1, 2), "k": torch.randn(2, 4, 9, 8), "v": torch.randn(2, 4, 9, 5)},
    ),
    "tokens of all tensors come before heads": (
        ValueError,
        r"bias is for 4 heads; it must be for 1 or for those of q, 6: do heads come before",
        {
            "q": Q.transpose(1, 2),
            "k": Q.transpose(1, 2),
            "v": Q.transpose(1, 2),
            "bias": biases.ALiBi(4),
        },
    ),
    "q has no heads": (ValueError, "q has 0 heads", {"q": Q[:, :0]}),
    "bias is a tensor": (TypeError, "bias is a Tensor", {"bias": torch.zeros(6, 9)}),
    "bias is a tensor of slopes": (
        TypeError,
        r"bias is a Tensor of shape \(4,\).* ALiBi\(slopes=bias\)",
        {"bias": torch.ones(4)},
    ),
    "bias is a name": (TypeError, "bias is 'alibi'; it must be", {"bias": "alibi"}),
    "bias is a module": (
        TypeError,
        r"bias is a Cable.*bias=cable\(x\)",
        {"bias": biases.Cable(8, 4)},
    ),
    "bias is for other heads": (ValueError, "bias is for 2 heads", {"bias": biases.ALiBi(2)}),
    "shared bias is for other heads": (
        ValueError,
        "bias is for 8 heads",
        {"bias": biases.Type1(8)},
    ),
    "bias has another batch": (
        ValueError,
        "bias has batch 3",
        {"bias": biases.CumulativeBias(torch.zeros(3, 4, 9))},
    ),
    "steps have another length": (
        ValueError,
        "steps has length 6; it must be the number of keys, 9",
        {"bias": biases.CumulativeBias(torch.zeros(1, 4, 6))},
    ),
    "bias is on another device": (
        ValueError,
        "bias is on meta and q on cpu",
        {"bias": biases.KerpleLog(4).to("meta")},
    ),
    "bias is a class": (TypeError, "bias is the class KerpleLog", {"bias": biases.KerpleLog}),
    "bias is lowered to nothing": (
        TypeError,
        "bias was lowered to a NoneType",
        {"bias": LoweredTo(None)},
    ),
    "bias is lowered to another dtype": (
        TypeError,
        "bias was lowered to torch.float64; it must be to torch.float32",
        {"bias": LoweredTo(Linear(torch.ones(1, 4, dtype=torch.float64)))},
    ),
    "sums are lowered to float32": (
        TypeError,
        "bias was lowered to torch.float32; it must be to torch.float64",
        {"bias": LoweredTo(Cumulative(torch.ones(1, 4, 9)))},
    ),
    "table is too short": (
        ValueError,
        r"bias was lowered to shape \(1, 1, 3\); it must be \(B or 1, H or 1, 9\)",
        {"bias": LoweredTo(Distance(torch.zeros(1, 1, 3)))},
    ),
    "gain is too short": (
        ValueError,
        r"bias was lowered to shape \(1, 4, 2\); it must be \(B or 1, H or 1, 6\)",
        {"bias": LoweredTo(Cumulative(torch.ones(1, 4, 9).double(), torch.ones(1, 4, 2)))},
    ),
    "causal is a number": (TypeError, "causal is 1", {"causal": 1}),
    "window is negative": (ValueError, "window is -1", {"window": -1}),
    "window is 0": (ValueError, "window is 0", {"window": 0}),
    "window is a pair": (
        TypeError,
        r"window is \(3, 0\).* is window=4, which counts the query's own position",
        {"window": (3, 0)},
    ),
    "window reaches into the future": (
        TypeError,
        r"window is \(3, 1\); it must be None or a positive int$",
        {"window": (3, 1)},
    ),
    "window is a bool": (TypeError, "window is True", {"window": True}),
    "scale is a string": (TypeError, "scale is '1'", {"scale": "1"}),
    "scale is beyond any float": (ValueError, "scale is 1000", {"scale": 10**400}),
    "scale is NaN": (ValueError, "scale is nan", {"scale": float("nan")}),
    "tolerance is negative": (ValueError, "tolerance is -0.1", {"tolerance": -0.1}),
    "tolerance is 1": (ValueError, "tolerance is 1", {"tolerance": 1}),
    "tolerance is NaN": (ValueError, "tolerance is nan", {"tolerance": float("nan")}),
    "tolerance is not a number": (TypeError, "tolerance is 'low'", {"tolerance": "low"}),
    "mask is a list": (TypeError, "key_padding_mask is a list", {"key_padding_mask": [[True]]}),
    "mask holds numbers": (
        TypeError,
        "key_padding_mask is torch.float32; it must be torch.bool",
        {"key_padding_mask": torch.ones(2, 9)},
    ),
    "mask has the shape of queries": (
        ValueError,
        r"key_padding_mask has shape \(2, 6\); it must be \(batch, keys\), \(2, 9\)",
        {"key_padding_mask": torch.ones(2, 6).bool()},
    ),
    "mask is on another device": (
        ValueError,
        "key_padding_mask is on meta and q on cpu",
        {"key_padding_mask": torch.ones(2, 9, device="meta").bool()},
    ),
    "mask has padding between tokens": (
        ValueError,
        "key_padding_mask has padding between the tokens of batch entry 1; .*True is for tokens",
        {"key_padding_mask": torch.tensor([9 * [True], [*4 * [True], False, *4 * [True]]])},
    ),
    "mask is given for two sets of tokens": (
        ValueError,
        "key_padding_mask is given with causal=False, 6 queries and 9 keys",
        {"key_padding_mask": torch.ones(2, 9).bool(), "causal": False},
    ),
    "backend is unknown": (ValueError, "backend is 'cudnn'; it may be", {"backend": "cudnn"}),
    "backend is not a name": (TypeError, "backend is 1", {"backend": 1}),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG.keys())
def test_invalid_arguments_are_refused_before_any_work(monkeypatch, error, message, change):
    def work(*args):
        raise AssertionError("work was begun")

    monkeypatch.setattr("biased_flash_attn.operators.forward", work)
    arguments = {"q": Q, "k": K, "v": V, **change}
    with pytest.raises(error, match="^" + message):
        biased_flash_attn(**arguments)


def test_cpu_backend_refuses_tensors_on_other_devices():
    q, k, v = (x.to("meta") for x in (Q, K, V))
    with pytest.raises(ValueError, match=r"^backend='cpu' needs tensors on the CPU; q is on meta"):
        biased_flash_attn(q, k, v, backend="cpu")


def slopes_with_nan():
    bias = biases.ALiBi(4, trainable=True)
    bias.slopes.data[2] = torch.nan
    return bias


def table_with_nan():
    bias = biases.KerpleLog(4)
    bias.r1.data[3] = torch.nan
    return bias


def with_nan(*shape):
    x = torch.zeros(shape)
    x.flatten()[-1] = torch.nan
    return x


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("slopes", slopes_with_nan),
        ("table values", table_with_nan),
        ("steps", lambda: biases.CumulativeBias(with_nan(2, 4, 9))),
        ("gains", lambda: biases.CumulativeBias(torch.zeros(1, 4, 9), with_nan(1, 4, 6))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_biases_with_nan_are_refused(what, make, dtype):
    with pytest.raises(ValueError, match=f"^bias: its {what} contain NaN"):
        biased_flash_attn(Q.to(dtype), K.to(dtype), V.to(dtype), make())


def test_smallest_valid_settings_are_accepted():
    o = biased_flash_attn(Q, K, V, window=1, tolerance=0.0, scale=0.0, backend="cpu")
    assert o.isfinite().all()
