"""The operators that PyTorch sees: schemas, shapes without data, and autograd.

`forward` and `backward` are opaque to torch.compile and run the kernels of the backend they name.
`terms` and `gain` are what a form holds (forms.py); gradients reach a bias's own parameters because
autograd continues from `terms` through the bias's formula.
"""

from __future__ import annotations

import torch

from . import backends

_LIBRARY = torch.library.Library("biased_flash_attn", "DEF")

_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor? terms, Tensor? gain, str form, float scale,"
    " bool causal, SymInt? window, str backend) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "backward(Tensor grad_o, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? terms, Tensor? gain, str form, float scale, bool causal, SymInt? window,"
    " bool with_bias_gradient, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

forward = torch.ops.biased_flash_attn.forward.default
backward = torch.ops.biased_flash_attn.backward.default


def _forward(*arguments):
    *problem, backend = arguments
    return backends.kernels(backend).forward(*problem)


def _backward(*arguments):
    *problem, backend = arguments
    grad_q, grad_k, grad_v, *grad_bias = backends.kernels(backend).backward(*problem)
    nothing = grad_q.new_empty(0)
    return grad_q, grad_k, grad_v, *(nothing.clone() if g is None else g for g in grad_bias)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", _forward, _device)
    _LIBRARY.impl("backward", _backward, _device)


@torch.library.register_fake("biased_flash_attn::forward", lib=_LIBRARY)
def _(q, k, v, terms, gain, form, scale, causal, window, backend):
    batch, heads, n_query, _ = q.shape
    o = q.new_empty((batch, heads, n_query, v.shape[3]))
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.register_fake("biased_flash_attn::backward", lib=_LIBRARY)
def _(grad_o, grad_lse, q, k, v, o, lse, terms, gain, form, scale, causal, window, wanted, backend):
    def like(x):
        return q.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    return (*(x.new_empty(x.shape) for x in (q, k, v)), like(terms), like(gain))


def _save(ctx, inputs, output):
    q, k, v, terms, gain, ctx.form, ctx.scale, ctx.causal, ctx.window, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output, terms, gain)


def _differentiate(ctx, grad_o, grad_lse):
    q, k, v, o, lse, terms, gain = ctx.saved_tensors
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
        ctx.backend,
    )
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_terms if wants_terms else None,
        grad_gain if wants_gain else None,
        *[None] * 5,
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
