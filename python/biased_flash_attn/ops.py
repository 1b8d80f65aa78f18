"""The operators that PyTorch sees: schemas, shapes without data, and autograd.

`forward` and `backward` are opaque to torch.compile and run the kernels of the backend they name.
`terms` and `gain` are what a form holds (forms.py); gradients reach a bias's own parameters because
autograd continues from `terms` through the bias's formula. `plan` makes what leaves out keys
(skipping.py); both directions take the same one. The last arguments are what is left of `Sequences`
(sequences.py) where the rows belong to several, or some to none.
"""

from __future__ import annotations

import torch

from . import backends, skipping
from .certificate import Bias
from .forms import Geometry
from .sequences import Sequences, empty_rows

_LIBRARY = torch.library.Library("biased_flash_attn", "DEF")

_SEQUENCES = (
    "Tensor? sequences=None, SymInt? longest_query=None, SymInt? longest_key=None,"
    " SymInt? longest_shift=None"
)
_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor? terms, Tensor? gain, str form, float scale,"
    " bool causal, SymInt? window, Tensor? plan, str backend,"
    f" {_SEQUENCES}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "backward(Tensor grad_o, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? terms, Tensor? gain, str form, float scale, bool causal, SymInt? window,"
    f" bool with_bias_gradient, Tensor? plan, str backend, {_SEQUENCES})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_LIBRARY.define(
    "plan(Tensor q, Tensor k, Tensor v, Tensor? terms, Tensor? gain, str form, float scale,"
    " bool causal, SymInt? window, float tolerance, str backend,"
    f" {_SEQUENCES}) -> Tensor"
)

forward = torch.ops.biased_flash_attn.forward.default
backward = torch.ops.biased_flash_attn.backward.default
plan = torch.ops.biased_flash_attn.plan.default


def _forward(q, k, v, terms, gain, form, scale, causal, window, plan, backend, *where):
    problem = q, k, v, terms, gain, form, scale, causal, window, plan
    return backends.kernels(backend).forward(*problem, _sequences(q, k, *where))


def _backward(*arguments):
    grad_o, grad_lse, q, k, v, o, lse, terms, gain, form, scale, causal, window, *rest = arguments
    wanted, plan, backend, *where = rest
    problem = terms, gain, form, scale, causal, window, wanted, plan
    gradients = backends.kernels(backend).backward(
        grad_o, grad_lse, q, k, v, o, lse, *problem, _sequences(q, k, *where)
    )
    grad_q, grad_k, grad_v, *grad_bias = gradients
    nothing = grad_q.new_empty(0)
    return grad_q, grad_k, grad_v, *(nothing.clone() if g is None else g for g in grad_bias)


def _sequences(q, k, rows=None, longest_query=None, longest_key=None, longest_shift=None):
    if rows is None:
        return None
    is_packed = q.shape[0] != rows.shape[0]
    all_rows = q.shape[2], k.shape[2]
    return Sequences(rows, longest_query, longest_key, *all_rows, is_packed, longest_shift or 0)


def _plan(q, k, v, terms, gain, form, scale, causal, window, tolerance, backend, *where):
    sequences = _sequences(q, k, *where)
    make, longest, shift = skipping.make, (q.shape[2], k.shape[2]), 0
    if sequences is not None:
        make = skipping.make_of_sequences
        longest, shift = (sequences.longest_query, sequences.longest_key), sequences.longest_shift
    bias = Bias(terms, gain, form, scale, Geometry(*longest, causal, window, sequences, shift))
    with torch.autocast(q.device.type, enabled=False):
        return make(q, k, v, bias, tolerance, backend)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", _forward, _device)
    _LIBRARY.impl("backward", _backward, _device)
    _LIBRARY.impl("plan", _plan, _device)


@torch.library.register_fake("biased_flash_attn::forward", lib=_LIBRARY)
def _(q, k, v, *_):
    o = empty_rows(q, v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.register_fake("biased_flash_attn::backward", lib=_LIBRARY)
def _(grad_o, grad_lse, q, k, v, o, lse, terms, gain, form, scale, causal, window, *rest):
    wanted, *_ = rest

    def like(x):
        return q.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    gradients = (empty_rows(x, x.shape[3]) for x in (q, k, v))
    return (*gradients, like(terms), like(gain))


@torch.library.register_fake("biased_flash_attn::plan", lib=_LIBRARY)
def _(q, k, v, terms, gain, form, scale, causal, window, tolerance, backend, *where):
    batch, heads, n_query, _ = q.shape
    if where and where[0] is not None:
        batch, n_query = where[0].shape[0], where[1]
    return q.new_empty((2, batch, heads, skipping.query_tiles(n_query)), dtype=torch.int32)


def _save(ctx, inputs, output):
    q, k, v, terms, gain, ctx.form, ctx.scale, ctx.causal, ctx.window, plan, *rest = inputs
    ctx.backend, sequences, *ctx.longest = rest
    ctx.save_for_backward(q, k, v, *output, terms, gain, plan, sequences)


def _differentiate(ctx, grad_o, grad_lse):
    q, k, v, o, lse, terms, gain, plan, sequences = ctx.saved_tensors
    wants_terms, wants_gain = ctx.needs_input_grad[3:5]
    grad_q, grad_k, grad_v, grad_terms, grad_gain = backward(
        grad_o,
        grad_lse,
        q,
        k,
        v,
        o,
        lse,
        terms,
        gain,
        ctx.form,
        ctx.scale,
        ctx.causal,
        ctx.window,
        wants_terms or wants_gain,
        plan,
        ctx.backend,
        sequences,
        *ctx.longest,
    )
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_terms if wants_terms else None,
        grad_gain if wants_gain else None,
        *[None] * 10,
    )


def _refuse_second_derivatives(ctx, *grads):
    raise RuntimeError(
        "biased_flash_attn: the kernels have no second derivatives; backend='reference' has"
    )


torch.library.register_autograd(
    "biased_flash_attn::forward", _differentiate, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd(
    "biased_flash_attn::backward", _refuse_second_derivatives, lib=_LIBRARY
)
