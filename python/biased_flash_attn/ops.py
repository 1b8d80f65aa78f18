"""The operators that PyTorch sees: schemas, shapes without data, and autograd.

`forward` and `backward` are opaque to torch.compile and run the kernels of the backend they name.
`terms` and `gain` are what a form holds (forms.py); gradients reach a bias's own parameters because
autograd continues from `terms` through the bias's formula. `plan` makes what leaves out keys
(skipping.py); both directions take the same one.
"""

from __future__ import annotations

import torch

from . import backends, skipping
from .certificate import Bias
from .forms import Geometry

_LIBRARY = torch.library.Library("biased_flash_attn", "DEF")

_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor? terms, Tensor? gain, str form, float scale,"
    " bool causal, SymInt? window, Tensor? plan, str backend) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "backward(Tensor grad_o, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? terms, Tensor? gain, str form, float scale, bool causal, SymInt? window,"
    " bool with_bias_gradient, Tensor? plan, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_LIBRARY.define(
    "plan(Tensor q, Tensor k, Tensor v, Tensor? terms, Tensor? gain, str form, float scale,"
    " bool causal, SymInt? window, float tolerance, str backend) -> Tensor"
)

forward = torch.ops.biased_flash_attn.forward.default
backward = torch.ops.biased_flash_attn.backward.default
plan = torch.ops.biased_flash_attn.plan.default


def _forward(*arguments):
    *problem, plan, backend = arguments
    return backends.kernels(backend).forward(*problem, *_given(plan))


def _backward(*arguments):
    *problem, plan, backend = arguments
    gradients = backends.kernels(backend).backward(*problem, *_given(plan))
    grad_q, grad_k, grad_v, *grad_bias = gradients
    nothing = grad_q.new_empty(0)
    return grad_q, grad_k, grad_v, *(nothing.clone() if g is None else g for g in grad_bias)


def _given(plan):
    """As arguments: kernels that know nothing of plans are not asked to keep one."""
    return () if plan is None else (plan,)


def _plan(q, k, v, terms, gain, form, scale, causal, window, tolerance, backend):
    geometry = Geometry(q.shape[2], k.shape[2], causal, window)
    bias = Bias(terms, gain, form, scale, geometry)
    with torch.autocast(q.device.type, enabled=False):
        return skipping.make(q, k, v, bias, tolerance, backend)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", _forward, _device)
    _LIBRARY.impl("backward", _backward, _device)
    _LIBRARY.impl("plan", _plan, _device)


@torch.library.register_fake("biased_flash_attn::forward", lib=_LIBRARY)
def _(q, k, v, terms, gain, form, scale, causal, window, plan, backend):
    batch, heads, n_query, _ = q.shape
    o = q.new_empty((batch, heads, n_query, v.shape[3]))
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.register_fake("biased_flash_attn::backward", lib=_LIBRARY)
def _(grad_o, grad_lse, q, k, v, o, lse, terms, gain, form, scale, causal, window, *rest):
    wanted, _, _ = rest

    def like(x):
        return q.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)

    return (*(x.new_empty(x.shape) for x in (q, k, v)), like(terms), like(gain))


@torch.library.register_fake("biased_flash_attn::plan", lib=_LIBRARY)
def _(q, *rest):
    batch, heads, n_query, _ = q.shape
    return q.new_empty((2, batch, heads, skipping.query_tiles(n_query)), dtype=torch.int32)


def _save(ctx, inputs, output):
    q, k, v, terms, gain, ctx.form, ctx.scale, ctx.causal, ctx.window, plan, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output, terms, gain, plan)


def _differentiate(ctx, grad_o, grad_lse):
    q, k, v, o, lse, terms, gain, plan = ctx.saved_tensors
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
    )
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_terms if wants_terms else None,
        grad_gain if wants_gain else None,
        *[None] * 6,
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
