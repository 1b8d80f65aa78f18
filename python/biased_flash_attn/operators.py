"""The torch.library operators: schemas, fake implementations and autograd formulas.

They are opaque to torch.compile and run the kernels of the problem's backend. Autograd continues
from the gradients of the form's tensors through the bias's formula to its parameters. `plan`
computes which keys are skipped (skipping.plans); forward and backward use the same plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import registry
from .forms import of_tensors
from .forms.gradients import IN_Q, OWN
from .problem import PAGES_SCHEMA, SCHEMA, Problem, need_gradients
from .sequences import empty_rows
from .skipping import plans

_LIBRARY = torch.library.Library("biased_flash_attn", "FRAGMENT")

_LIBRARY.define(f"forward({SCHEMA}) -> (Tensor, Tensor)")
# The gradients of the form's tensors are returned as a list. Their targets are those of
# forms.gradients, or [] if they are not requested; those with a target other than OWN are empty.
_LIBRARY.define(
    "backward(Tensor o, Tensor lse, Tensor grad_o, Tensor grad_lse, int[] targets,"
    f" {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor[])"
)
_LIBRARY.define(f"plan({SCHEMA}) -> Tensor")
_LIBRARY.define(f"decode({PAGES_SCHEMA}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "append(Tensor(a!) pages, Tensor rows, Tensor block_table, Tensor lengths, str backend) -> ()"
)

_OPERATORS = torch.ops.biased_flash_attn


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype, and lse (B, H, Nq) in float32, or float64 for
    float64."""
    if torch.compiler.is_compiling() or problem.needs_gradients:
        return _OPERATORS.forward.default(*problem.arguments())
    # Passing through the autograd implementation takes a tenth of a short call.
    with torch._C._AutoDispatchBelowAutograd():
        return _OPERATORS.forward.default(*problem.arguments())


def backward(
    problem: Problem,
    o: Tensor,
    lse: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor,
    form_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of q, k, v and, with form_gradient, of the form's tensors."""
    targets = [OWN] * len(problem.form.tensors) if form_gradient else []
    results = o, lse, grad_o, grad_lse, targets
    return _OPERATORS.backward.default(*results, *problem.arguments())


def plan(problem: Problem) -> Tensor:
    """Returns the key ranges of the queries, (2, B, H, tiles) int32."""
    return _OPERATORS.plan.default(*problem.arguments())


def decode(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of a few queries and a paged cache.

    The operator is bypassed unless it is traced: dispatching takes 1 % of a long step and 10 % of a
    short one.
    """
    if not torch.compiler.is_compiling():
        return _decoded(problem)
    return _OPERATORS.decode.default(*problem.page_arguments())


def append(pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor, backend: str) -> None:
    """Writes rows (B, heads, n, channels) or (B, heads, n) into pages, as the last n of the
    lengths[b] keys of each sequence; lengths is (B,) int64."""
    call = _OPERATORS.append.default if torch.compiler.is_compiling() else _append
    call(pages, rows, block_table, lengths, backend)


def _forward(*arguments):
    problem = Problem.of_arguments(*arguments)
    if problem.is_empty:
        return _results_without_keys(problem)
    return registry.get(problem.backend).forward(problem)


def _backward(o, lse, grad_o, grad_lse, targets, *arguments):
    problem = Problem.of_arguments(*arguments)
    if problem.is_empty:
        *of_inputs, of_form = _no_gradients(problem, targets)
    else:
        *of_inputs, of_form = registry.get(problem.backend).backward(
            problem, o, lse, grad_o, grad_lse, targets=targets
        )
    for n, target in enumerate(targets):
        if target != OWN:
            if of_form[n] is not None:
                of_inputs[target - IN_Q].add_(of_form[n])
            of_form[n] = problem.form.tensors[n].new_empty(0)
    return *of_inputs, of_form


def _no_gradients(problem, targets):
    of_form = map(torch.zeros_like, problem.form.tensors) if targets else ()
    return *map(_zero_rows, (problem.q, problem.k, problem.v)), [*of_form]


def _plan(*arguments):
    problem = Problem.of_arguments(*arguments)
    with torch.autocast(problem.q.device.type, enabled=False):
        return plans.make(problem)


def _decode(*arguments):
    return _decoded(Problem.of_page_arguments(*arguments))


def _decoded(problem):
    if problem.is_empty:
        return _results_without_keys(problem)
    return registry.get(problem.backend).decode(problem)


def _append(pages, rows, block_table, lengths, backend):
    registry.get(backend).append(pages, rows, block_table, lengths)


for _name, _implementation in {
    "forward": _forward,
    "backward": _backward,
    "plan": _plan,
    "decode": _decode,
    "append": _append,
}.items():
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _device)


def _results(q, v):
    o = empty_rows(q, v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _results_without_keys(problem):
    o, lse = _results(problem.q, problem.v)
    return o.zero_(), lse.fill_(-torch.inf)


def _zero_rows(x):
    return empty_rows(x, x.shape[3]).zero_()


@torch.library.register_fake("biased_flash_attn::forward", lib=_LIBRARY)
def _(q, k, v, *_):
    return _results(q, v)


@torch.library.register_fake("biased_flash_attn::backward", lib=_LIBRARY)
def _(o, lse, grad_o, grad_lse, targets, q, k, v, form_tensors, *_):
    of_form = [
        x.new_empty(x.shape if target == OWN else 0)
        for x, target in zip(form_tensors, targets, strict=bool(targets))
    ]
    return *(empty_rows(x, x.shape[3]) for x in (q, k, v)), of_form


@torch.library.register_fake("biased_flash_attn::plan", lib=_LIBRARY)
def _(*arguments):
    problem = Problem.of_arguments(*arguments)
    tiles = plans.query_tiles(problem.geometry.n_query)
    return problem.q.new_empty((2, problem.batch, problem.q.shape[1], tiles), dtype=torch.int32)


@torch.library.register_fake("biased_flash_attn::decode", lib=_LIBRARY)
def _(q, k, v, *_):
    return _results(q, v)


@torch.library.register_fake("biased_flash_attn::append", lib=_LIBRARY)
def _(*_):
    pass


class _Attention(torch.autograd.Function):
    """`forward` with its gradients. torch.library.register_autograd would be equivalent, but
    flattening arguments that include a list of tensors takes 10 % of a short call."""

    @staticmethod
    def forward(ctx, keyset, options, q, k, v, *form_tensors):
        o, lse = _below_autograd(keyset, q, k, v, [*form_tensors], *options)
        *ctx.options, plan, ctx.backend, rows = options[:8]
        ctx.longest = options[8:]
        ctx.targets = of_tensors(options[0], form_tensors).gradient_targets(q, k)
        ctx.save_for_backward(o, lse, q, k, v, plan, rows, *form_tensors)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        o, lse, q, k, v, plan, rows, *form_tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        targets = ctx.targets if any(wanted) else []
        *of_inputs, of_form = _OPERATORS.backward.default(
            *(o, lse, grad_o, grad_lse, targets, q, k, v, form_tensors),
            *(*ctx.options, plan, ctx.backend, rows, *ctx.longest),
        )
        of_form = [
            x if wants and target == OWN else None
            for x, wants, target in zip(of_form, wanted, targets, strict=any(wanted))
        ]
        return None, None, *of_inputs, *(of_form or [None] * len(wanted))


def _below_autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        return _OPERATORS.forward.default.redispatch(below, *arguments)


def _forward_and_gradients(keyset, q, k, v, form_tensors, *options):
    tensors = q, k, v, *form_tensors
    if need_gradients(tensors):
        return _Attention.apply(keyset, options, *tensors)
    return _below_autograd(keyset, q, k, v, form_tensors, *options)


def _refuse_second_derivatives(ctx, *grads):
    raise RuntimeError(
        "biased_flash_attn: the kernels have no second derivatives; backend='reference' has"
    )


_LIBRARY.impl("forward", _forward_and_gradients, "Autograd", with_keyset=True)
torch.library.register_autograd(
    "biased_flash_attn::backward", _refuse_second_derivatives, lib=_LIBRARY
)
