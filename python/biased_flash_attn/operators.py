"""The torch.library operators: schemas, fake implementations and autograd formulas.

They are opaque to torch.compile and run the kernels of the problem's backend. Autograd continues
from the gradients of the form's tensors through the bias's formula to its parameters. `plan`
computes which keys are skipped (skipping.plans); forward and backward use the same plan.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils import _pytree as pytree

from . import batching
from .arguments import ATTENTION, DECODING
from .backends import registry
from .forms import from_tensors
from .forms.gradients import IN_Q, OWN
from .problem import Problem, need_gradients
from .skipping import plans
from .tracing import is_transformed

_LIBRARY = torch.library.Library("biased_flash_attn", "FRAGMENT")

_LIBRARY.define(f"forward({ATTENTION.schema}) -> (Tensor, Tensor, Tensor, Tensor)")
# The gradients of the form's tensors are returned as a list. Their targets are those of
# forms.gradients, or [] if they are not requested; those with a target other than OWN are empty.
_LIBRARY.define(
    "backward(Tensor o, Tensor pivot, Tensor log_sum, Tensor grad_o, Tensor grad_lse,"
    f" int[] targets, {ATTENTION.schema}) -> (Tensor, Tensor, Tensor, Tensor[])"
)
_LIBRARY.define(f"plan({ATTENTION.schema}) -> Tensor")
_LIBRARY.define(f"decode({DECODING.schema}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "append(Tensor(a!) pages, Tensor rows, Tensor block_table, Tensor lengths, str backend) -> ()"
)

_OPERATORS = torch.ops.biased_flash_attn
_BELOW_AUTOGRAD = torch._C._AutoDispatchBelowAutograd
_UNCHANGED = contextlib.nullcontext()


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns o (B, H, Nq, Dv) in q's dtype; lse (B, H, Nq) in float32, or float64 for float64; and
    pivot and log_sum like lse, which are for `backward`: their sum is lse in base 2."""
    arguments = ATTENTION.flat(problem)
    if torch.compiler.is_compiling() or is_transformed() or problem.needs_gradients:
        return _OPERATORS.forward.default(*arguments)
    # Passing through the autograd implementation takes a tenth of a short call.
    with _BELOW_AUTOGRAD():
        return _OPERATORS.forward.default(*arguments)


def backward(
    problem: Problem,
    o: Tensor,
    pivot: Tensor,
    log_sum: Tensor,
    grad_o: Tensor,
    grad_lse: Tensor,
    form_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of q, k, v and, with form_gradient, of the form's tensors."""
    targets = [OWN] * len(problem.form.tensors) if form_gradient else []
    arguments = ATTENTION.flat(problem)
    results = o, pivot, log_sum, grad_o, grad_lse
    return _OPERATORS.backward.default(*results, targets, *arguments)


def planned(problem: Problem) -> Problem:
    """The problem, with a plan of skipped keys where a plan is worthwhile."""
    if not registry.get(problem.backend).has_kernels or not plans.is_worthwhile(problem):
        return problem
    plan = _OPERATORS.plan.default(*ATTENTION.flat(problem.detached()))
    return replace(problem, plan=plan)


def decode(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of a few queries and a paged cache.

    The operator is bypassed unless it is traced: dispatching takes 1 % of a long step and 10 % of a
    short one.
    """
    if not torch.compiler.is_compiling():
        return _decoded(problem)
    return _OPERATORS.decode.default(*DECODING.flat(problem))


def append(pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor, backend: str) -> None:
    """Writes rows (B, heads, n, channels) or (B, heads, n) into pages, as the last n of the
    lengths[b] keys of each sequence; lengths is (B,) int64."""
    call = _OPERATORS.append.default if torch.compiler.is_compiling() else _append
    call(pages, rows, block_table, lengths, backend)


def _forward(*arguments):
    problem = ATTENTION.rebuilt(*arguments)
    if problem.is_empty:
        o, lse = _without_keys(problem)
        return o, lse, lse.clone(), lse.clone()
    return registry.get(problem.backend).forward(problem)


def _backward(o, pivot, log_sum, grad_o, grad_lse, targets, *arguments):
    problem = ATTENTION.rebuilt(*arguments)
    tensors = problem.form.tensors
    if problem.is_empty:
        *grad_inputs, grad_form = _without_pairs(problem, targets)
    else:
        *grad_inputs, grad_form = registry.get(problem.backend).backward(
            problem, o, pivot, log_sum, grad_o, grad_lse, targets=targets
        )
    for n, target in enumerate(targets):
        if target != OWN:
            if grad_form[n] is not None:
                grad_inputs[target - IN_Q].add_(grad_form[n])
            grad_form[n] = tensors[n].new_empty(0)
    return *grad_inputs, grad_form


def _plan(*arguments):
    problem = ATTENTION.rebuilt(*arguments)
    with torch.autocast(problem.q.device.type, enabled=False):
        plan = plans.make(problem)
    return plan.repeat(1, 1, 1, 2) if plan.shape[3] == 1 else plan


def _decode(*arguments):
    return _decoded(DECODING.rebuilt(*arguments))


def _decoded(problem):
    if problem.is_empty:
        return _without_keys(problem)
    return registry.get(problem.backend).decode(problem)


def _without_keys(problem):
    o, lse = problem.empty_results()
    return o.zero_(), lse.fill_(-torch.inf)


def _without_pairs(problem, targets):
    grad_form = [torch.zeros_like(x) for x in problem.form.tensors] if targets else []
    return *(x.zero_() for x in problem.empty_gradients()), grad_form


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


@torch.library.register_fake("biased_flash_attn::backward", lib=_LIBRARY)
def _(o, pivot, log_sum, grad_o, grad_lse, targets, *arguments):
    problem = ATTENTION.rebuilt(*arguments)
    grad_form = [
        x.new_empty(x.shape if target == OWN else 0)
        for x, target in zip(problem.form.tensors, targets, strict=bool(targets))
    ]
    return *problem.empty_gradients(), grad_form


@torch.library.register_fake("biased_flash_attn::plan", lib=_LIBRARY)
def _(*arguments):
    problem = ATTENTION.rebuilt(*arguments)
    # With a dimension of size 1, a compiler would be told that there are so few queries.
    tiles = torch.sym_max(2, plans.query_tiles(problem.geometry.n_query))
    return problem.q.new_empty((2, problem.batch, problem.q.shape[1], tiles), dtype=torch.int32)


@torch.library.register_fake("biased_flash_attn::forward", lib=_LIBRARY)
def _(*arguments):
    return ATTENTION.rebuilt(*arguments).empty_forward_results()


@torch.library.register_fake("biased_flash_attn::decode", lib=_LIBRARY)
def _(*arguments):
    return DECODING.rebuilt(*arguments).empty_results()


@torch.library.register_fake("biased_flash_attn::append", lib=_LIBRARY)
def _(*_):
    pass


class _InKernel(torch.autograd.Function):
    """A function that an operator calls below the dispatcher, which unwraps the tensors of one
    transform of torch.func after the other. torch.library.register_autograd refuses transforms, and
    flattening arguments that include a list of tensors takes it 10 % of a short call."""

    @classmethod
    def apply(cls, *arguments):
        with enable_single_level_autograd_function() if is_transformed() else _UNCHANGED:
            return super(torch.autograd.Function, cls).apply(*arguments)


class _Attention(_InKernel):
    """`forward` with its gradients."""

    @staticmethod
    def forward(ctx, keyset, arguments, q, k, v, *form_tensors):
        o, lse, *softmax = _below_autograd(_OPERATORS.forward.default, keyset, arguments)
        ctx.targets = from_tensors(arguments.form, form_tensors).gradient_targets(q, k)
        plan, rows = arguments.plan, arguments.rows
        ctx.save_for_backward(o, *softmax, q, k, v, plan, rows, *form_tensors)
        ctx.mark_non_differentiable(*softmax)
        ctx.set_materialize_grads(False)  # pivot and log_sum have none
        ctx.settings = ATTENTION.settings(*arguments)
        return o, lse, *softmax

    @staticmethod
    def backward(ctx, grad_o, grad_lse, *_):
        o, pivot, log_sum, q, k, v, plan, rows, *form_tensors = ctx.saved_tensors
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        grad_lse = torch.zeros_like(pivot) if grad_lse is None else grad_lse
        _, _, _, _, _, *wanted = ctx.needs_input_grad
        targets = ctx.targets if any(wanted) else []
        arguments = ATTENTION.Named(
            q=q, k=k, v=v, form_tensors=form_tensors, plan=plan, rows=rows, **ctx.settings
        )
        # The autograd implementation, which refuses second derivatives, takes 3 % of a short call.
        with _UNCHANGED if torch.is_grad_enabled() else _BELOW_AUTOGRAD():
            *grad_inputs, grad_form = _OPERATORS.backward.default(
                o, pivot, log_sum, grad_o, grad_lse, targets, *arguments
            )
        grad_form = [
            x if wants and target == OWN else None
            for x, wants, target in zip(grad_form, wanted, targets, strict=any(wanted))
        ]
        return None, None, *grad_inputs, *(grad_form or [None] * len(wanted))


class _Backward(_InKernel):
    """`backward`, which has no gradients."""

    @staticmethod
    def forward(ctx, keyset, arguments, *tensors):
        *grad_inputs, grad_form = _below_autograd(_OPERATORS.backward.default, keyset, arguments)
        return *grad_inputs, *grad_form

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "biased_flash_attn: the kernels have no second derivatives; backend='reference' has"
        )


def _below_autograd(operator, keyset, arguments):
    # Transforms around this one record gradients too, which autograd has disabled in a function.
    with _BELOW_AUTOGRAD(), torch.enable_grad() if is_transformed() else _UNCHANGED:
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _differentiable_forward(keyset, *arguments):
    arguments = ATTENTION.Named(*arguments)
    tensors = arguments.q, arguments.k, arguments.v, *arguments.form_tensors
    if need_gradients(tensors):
        return _Attention.apply(keyset, arguments, *tensors)
    return _below_autograd(_OPERATORS.forward.default, keyset, arguments)


def _differentiable_backward(keyset, *arguments):
    tensors = [x for x in pytree.tree_leaves(arguments) if torch.is_tensor(x)]
    if not need_gradients(tensors):
        return _below_autograd(_OPERATORS.backward.default, keyset, arguments)
    grad_q, grad_k, grad_v, *grad_form = _Backward.apply(keyset, arguments, *tensors)
    return grad_q, grad_k, grad_v, grad_form


_LIBRARY.impl("forward", _differentiable_forward, "Autograd", with_keyset=True)
_LIBRARY.impl("backward", _differentiable_backward, "Autograd", with_keyset=True)
batching.register(_LIBRARY)
