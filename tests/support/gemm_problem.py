"""GEMMs to check or measure: their tensors, and the error bound of a correct result.

The tests of the kernels and benchmarks/gpu use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from lightning_eff.kernels import devices
from lightning_eff.kernels.launch import launch
from lightning_eff.kernels.operands import ACTIVATIONS, Operands, check_operands, float32_precision
from lightning_eff.kernels.tile_configs import Shape, TileConfig

MAX_COPIES = 4096
MAX_ROWS = 256
"""Number of rows that are compared: float64 is slow, and a fault in a tile affects each of its rows."""
U32 = 2.0**-23
ACTIVATION_SLOPE = 1.2
"""The largest slope of an activation, which multiplies an error of its input."""
aten: Any = torch.ops.aten
Layer = tuple[int, int, int]
"""Tokens, output features, input features of a linear layer: M, N and K of its forward product."""
Run = Callable[["Problem"], Tensor]
"""Computes a problem and returns the result; an MLP's other matrices are stored in the problem."""
Kind = Literal[
    "plain", "adds", "bias", "fused", "c", "c32", "gated", "activated", "gated gradient", "activated gradient"
]
KIND_ACTIVATIONS: Mapping[str, str] = {
    "fused": "gelu_tanh", "gated": "silu", "gated gradient": "silu", "activated": "gelu_tanh",
    "activated gradient": "gelu_tanh",
}  # fmt: skip
GRADIENTS: Mapping[Kind, Kind] = {"gated": "gated gradient", "activated": "activated gradient"}
"""Kinds of an MLP's up projection, and of the gradient of its down projection's input."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One GEMM.

    Kinds: `adds`: the product is added in place, like a weight's gradient. `bias`: a bias is added. `fused`:
    with a bias and an activation. `c` and `c32`: another matrix is added, in the result's dtype or float32.

    Kinds of an MLP, which store more than the result (kernels/epilogue.py): `gated`: SwiGLU's up projection
    u and silu(g) * u. `activated`: GPT's up projection h and gelu(h). Their `gradient`: from the gradient of
    the down projection's input, the gradients of g and u, or of h; the input is computed and stored again.
    """

    M: int
    N: int
    K: int
    layout: str = "nt"  # or nn or tn: whether A and B are stored transposed
    dtype: torch.dtype = torch.bfloat16
    kind: Kind = "plain"
    out_dtype: torch.dtype | None = None  # None for `dtype`, and for float32 where it `adds`

    def __str__(self) -> str:
        text = f"{self.M}x{self.N}x{self.K} {self.layout} {self.kind}"
        return text if self.out_dtype is None else f"{text} to {str(self.out_dtype).removeprefix('torch.')}"

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.out_dtype or (torch.float32 if self.kind == "adds" else self.dtype)


def cases_of(layers: Iterable[Layer], dtype: torch.dtype) -> list[Case]:
    """Return the three GEMMs of linear layers.

    A layer with weight W [N, K] computes for T tokens in a training step: Y [T, N] = X @ W.T (nt), the
    input's gradient Y @ W (nn), and the weight's gradient Y.T @ X (tn).
    """
    cases: list[Case] = []
    for tokens, outputs, inputs in layers:
        forward = Case(M=tokens, N=outputs, K=inputs, layout="nt", dtype=dtype)
        of_input = replace(forward, N=inputs, K=outputs, layout="nn")
        of_weight = replace(forward, M=outputs, N=inputs, K=tokens, layout="tn")
        cases += [forward, of_input, of_weight]
    return cases


def mlp_cases(kind: Kind, layers: Iterable[Layer], dtype: torch.dtype) -> list[Case]:
    """Return two GEMMs per MLP, given by its up projection: that, and the down projection's input gradient.

    Example:
        >>> [str(case) for case in mlp_cases("gated", [(2048, 3072, 768)], torch.bfloat16)]
        ['2048x3072x768 nt gated', '2048x3072x768 nn gated gradient']
    """
    return [
        case
        for M, N, K in layers
        for case in (
            Case(M=M, N=N, K=K, layout="nt", dtype=dtype, kind=kind),
            Case(M=M, N=N, K=K, layout="nn", dtype=dtype, kind=GRADIENTS[kind]),
        )
    ]


def reference(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Compute `activation(alpha * a @ b + beta * c + bias)` in float64; axes as in `gemm`.

    As in BLAS, `a` and `b` are not read if `alpha` is 0, and `c` is not if `beta` is 0, so NaN in them does
    not reach the result.

    Example:
        >>> reference(torch.ones(2, 3), torch.ones(3, 2), alpha=2.0, bias=torch.tensor([0.0, 1.0]))
        tensor([[6., 7.],
                [6., 7.]], dtype=torch.float64)
    """
    a, b = (a, b) if alpha else (torch.zeros_like(a), torch.zeros_like(b))
    result = alpha * (a.double() @ b.double())
    if c is not None and beta:
        result = result + beta * c.double()
    if bias is not None:
        result = result + bias.double()
    return ACTIVATIONS[activation](result) if activation else result


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The tensors of a case."""

    operands: Operands  # C is `d` where the product is added to it
    d: Tensor  # receives the result, [M, N]
    start: Tensor | None  # added to the product: C, or the first value of `d`
    pre: Tensor | None = None  # with `d2`: the other matrices that an MLP stores, as in `Launch`
    d2: Tensor | None = None

    @classmethod
    def draw(cls, case: Case, device: torch.device, *, seed: int = 0) -> Problem:
        """Draw the operands from N(0, 1), scaled by 1 / sqrt(K), except inputs of an activation."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            values = torch.randn(rows, columns, generator=generator, device=device)
            return values.mul_(case.K**-0.5).to(dtype)

        return cls.of(case, normal, device)

    @classmethod
    def empty(cls, case: Case, device: torch.device) -> Problem:
        """Allocate operands without values, for their shapes and strides."""

        def empty(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        return cls.of(case, empty, device)

    @classmethod
    def of(cls, case: Case, make: Callable[[int, int, torch.dtype], Tensor], device: torch.device) -> Problem:
        """Create the tensors of a case with `make(rows, columns, dtype)`; the result is NaN at first."""
        m, n, k, dtype, kind = case.M, case.N, case.K, case.dtype, case.kind
        d = torch.full((m, n), math.nan, dtype=case.result_dtype, device=device)
        a = make(k, m, dtype).T if case.layout[0] == "t" else make(m, k, dtype)
        b = make(n, k, dtype).T if case.layout[1] == "t" else make(k, n, dtype)
        bias = make(1, n, dtype)[0] if kind in ("bias", "fused") else None
        is_sum = kind in ("adds", "c", "c32")
        start = make(m, n, torch.float32 if kind == "c32" else case.result_dtype) if is_sum else None
        operands = check_operands(
            a, b, d if kind == "adds" else start, beta=1.0 if is_sum else 0.0, bias=bias,
            activation=KIND_ACTIVATIONS.get(kind), out_dtype=case.result_dtype,
        )  # fmt: skip
        if kind in ("gated", "gated gradient", "activated gradient"):
            operands.gate = make(m, n, case.result_dtype).mul_(k**0.5)
        if kind == "gated gradient":
            operands.up = make(m, n, case.result_dtype).mul_(k**0.5)
        operands.gradient = kind.endswith("gradient")
        stores_more = kind in (*GRADIENTS, *GRADIENTS.values())
        pre, d2 = d.clone() if stores_more else None, d.clone() if operands.up is not None else None
        return cls(operands=operands, d=d, start=start, pre=pre, d2=d2)

    @property
    def stored_besides(self) -> list[Tensor]:
        """The matrices that the epilogue of an MLP stores in addition to the result."""
        return [tensor for tensor in (self.pre, self.d2) if tensor is not None]

    def shape(self) -> Shape:
        """Return the properties that dispatch depends on."""
        is_sum = self.operands.c is self.d and self.d.dtype == torch.float32
        return self.operands.shape(adds=is_sum, writes=len(self.stored_besides))

    def reset(self) -> None:
        """Fill the results with NaN, or with C if the product is added to it."""
        for result in (self.d, *self.stored_besides):
            result.fill_(math.nan)
        if self.operands.c is self.d and self.start is not None:
            self.d.copy_(self.start)

    def rotation(self) -> list[Problem]:
        """Return this problem and copies of it, in total larger than four times the device's L2 cache."""
        given = self.operands
        problems: list[Problem] = [self]
        tensors = (given.a, given.b, given.gate, given.up, self.d, *self.stored_besides)
        num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        for _ in range(min(MAX_COPIES, 4 * devices.of(self.d.device).l2_bytes // num_bytes)):
            d = self.d.clone()
            c = d if given.c is self.d else given.c
            gate, up, pre, d2 = map(_clone, (given.gate, given.up, self.pre, self.d2))
            operands = replace(given, a=given.a.clone(), b=given.b.clone(), c=c, gate=gate, up=up)
            problems.append(replace(self, operands=operands, d=d, pre=pre, d2=d2))
        return problems

    def error(self, result: Tensor, *, rounds_twice: bool = False) -> float:
        """Return the largest error over the bound; infinite if the result is not finite.

        The bound of each element is `|D - ref| <= (K + 2) u (|A| @ |B| + |C|) + eps |ref|`, with a reference
        in float64 and u = 2^-23. It allows any order of a float32 sum and one rounding to the result's dtype,
        but no lost term. `rounds_twice` allows one more rounding: torch's library rounds in split-K
        reductions, and before and after an activation. An epilogue multiplies the first term by its slope.
        An MLP's other matrices are compared in the same way.
        """
        stored = [result, *self.stored_besides]
        if not all(bool(tensor.isfinite().all()) for tensor in stored):
            return math.inf
        given, last = self.operands, self.operands.M - 1
        rows = torch.linspace(0, last, min(last + 1, MAX_ROWS), device=result.device).round().long()
        a, start = given.a[rows], None if self.start is None else self.start[rows]
        gate, up = (None if tensor is None else tensor[rows] for tensor in (given.gate, given.up))
        x = reference(a, given.b, start, beta=1.0, bias=given.bias)
        terms = [term.abs() if term is not None else None for term in (start, given.bias)]
        size = reference(a.abs(), given.b.abs(), terms[0], beta=1.0, bias=terms[1])
        info = torch.finfo(given.out_dtype)
        error_of_x = (given.K + 2) * U32 * size
        if float32_precision(given.a) == "tf32":  # operands have 10 bits of precision
            error_of_x += 2.0**-9 * size
        if rounds_twice:
            error_of_x += info.eps * size
        worst = 0.0
        for found, part in zip(stored, _parts(given, x, gate, up), strict=False):
            allowed = part.slope * error_of_x + U32 * part.terms
            allowed += info.eps * (2 if rounds_twice else 1) * part.expected.abs()
            allowed += info.smallest_normal * info.eps  # the spacing of subnormal numbers
            worst = max(worst, float(((found[rows].double() - part.expected).abs() / allowed).max()))
        return worst


def run_config(config: TileConfig) -> Run:
    """Return a candidate that launches a config directly."""
    return lambda problem: launch(problem.operands, config, problem.d, pre=problem.pre, d2=problem.d2)


def run_library(problem: Problem) -> Tensor:
    """Compute with torch's own functions, in the fewest calls."""
    given, d = problem.operands, problem.d
    if problem.pre is not None:
        return _mlp_by_library(problem, problem.pre)
    if given.activation is not None and given.bias is not None:
        fused: Callable[..., Tensor] | None = getattr(torch, "_addmm_activation", None)
        if d.is_cuda and fused is not None:  # cuBLASLt's own epilogue, the tanh GELU
            return fused(given.bias, given.a, given.b, use_gelu=True)
        return functional.gelu(torch.addmm(given.bias, given.a, given.b), approximate="tanh")
    addend = given.c if given.bias is None else given.bias
    options: dict[str, Any] = {} if given.a.dtype == d.dtype else {"out_dtype": d.dtype}  # on CUDA only
    if addend is None:
        return torch.mm(given.a, given.b, out=d, **options)
    return torch.addmm(addend, given.a, given.b, out=d, **options)


def _mlp_by_library(problem: Problem, pre: Tensor) -> Tensor:
    """Compute a product of an MLP and the other matrices that it stores."""
    given, d2 = problem.operands, problem.d2
    gate, up = given.gate, given.up
    if not given.gradient:
        x = torch.mm(given.a, given.b, out=pre)
        return functional.gelu(x, approximate="tanh") if gate is None else functional.silu(gate).mul_(x)
    if up is None or d2 is None:
        aten.gelu(gate, approximate="tanh", out=pre)
        return aten.gelu_backward(torch.mm(given.a, given.b), gate, approximate="tanh")
    activated = functional.silu(cast("Tensor", gate))
    torch.mul(activated, up, out=pre)
    x = torch.mm(given.a, given.b, out=d2)
    d = aten.silu_backward(x * up, gate)
    x.mul_(activated)  # in d2
    return d


def error_of(run: Run, problem: Problem, *, rounds_twice: bool = False) -> float:
    """Compute into results filled with NaN, or with C if the product is added, and return `Problem.error`."""
    problem.reset()
    return problem.error(run(problem), rounds_twice=rounds_twice)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One of the stored matrices."""

    expected: Tensor  # in float64
    slope: Tensor | float = 1.0  # multiplies an error of the product
    terms: Tensor | float = 0.0  # rounding of its own operations, in U32


def _parts(given: Operands, x: Tensor, gate: Tensor | None, up: Tensor | None) -> Sequence[_Part]:
    """Return the expected d, `pre` and `d2` of a kind from the product x: the table of epilogue.py."""
    if given.activation is None:
        return [_Part(expected=x)]
    activate = ACTIVATIONS[given.activation]
    if gate is None:
        result = activate(x)
        d = _Part(expected=result, slope=ACTIVATION_SLOPE, terms=4 * result.abs())
        return [d, _Part(expected=x)]
    g = gate.double().requires_grad_()
    with torch.enable_grad():
        activated = activate(g)
        (slope,) = torch.autograd.grad(activated.sum(), g)
    g, f = g.detach(), activated.detach()
    own = 8 * (1 + g.abs())  # the exponential's argument, and terms that cancel in the slope
    product = _Part(expected=x * f, slope=f.abs(), terms=own * x.abs())
    if not given.gradient:
        return [product, _Part(expected=x)]
    u = torch.ones_like(g) if up is None else up.double()
    slope = slope * u
    d = _Part(expected=x * slope, slope=slope.abs(), terms=own * (x * u).abs())
    return [d, _Part(expected=f * u, slope=0.0, terms=own * u.abs()), product]
