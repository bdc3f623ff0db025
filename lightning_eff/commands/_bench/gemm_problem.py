"""The GEMMs that `bench` measures: which ones, their tensors, and what counts as a correct result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_eff.kernels import devices
from lightning_eff.kernels.library import ACTIVATIONS, reference
from lightning_eff.kernels.operands import Operands, check_operands, float32_precision
from lightning_eff.kernels.tile_configs import Shape

WEIGHTS: tuple[tuple[int, int], ...] = (
    (12288, 4096),  # Llama 2 7B: queries, keys and values in one, 3 x 4096
    (4096, 4096),  # Llama 2 7B and Llama 3 8B: output of attention
    (4096, 11008),  # Llama 2 7B: MLP down
    (6144, 4096),  # Llama 3 8B: queries, keys and values, 32 + 8 + 8 heads of 128
    (28672, 4096),  # Llama 3 8B: MLP gate and up in one, 2 x 14336
    (4096, 14336),  # Llama 3 8B: MLP down
    (128256, 4096),  # Llama 3 8B: vocabulary
    (10240, 8192),  # Llama 3 70B: queries, keys and values, 64 + 8 + 8 heads of 128
    (8192, 28672),  # Llama 3 70B: MLP down
    (3072, 768),  # GPT-2: MLP up
)
"""Output and input features, N and K, of published language models."""
TOKENS = (2048, 4096, 8192)
GATED_MLPS = ((8192, 14336, 4096), (8192, 11008, 4096))
"""Llama 3 8B and Llama 2 7B: tokens, hidden features, input features."""
ACTIVATED_MLPS = ((8192, 16384, 4096), (8192, 6400, 1600))
"""GPT-J 6B and GPT-2 XL."""
MAX_COPIES = 4096
MAX_ROWS = 256
"""Rows that are compared: float64 is slow, and a fault in a tile affects each of its rows."""
U32 = 2.0**-23
ACTIVATION_SLOPE = 1.2
"""The largest slope of an activation, by which it enlarges an error."""
Layer = tuple[int, int, int]
"""Tokens, output features, input features."""
Kind = Literal[
    "plain", "adds", "bias", "fused", "c", "c32", "gated", "activated", "gated gradient", "activated gradient"
]
KIND_ACTIVATIONS: Mapping[str, str] = {
    "fused": "gelu_tanh", "gated": "silu", "gated gradient": "silu", "activated": "gelu_tanh",
    "activated gradient": "gelu_tanh",
}  # fmt: skip
GRADIENTS: Mapping[Kind, Kind] = {"gated": "gated gradient", "activated": "activated gradient"}
"""Kinds of an MLP: of its up projection, and of the gradient of what goes into its down projection."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One GEMM to measure.

    Kinds: `adds`: the product is added in place, as a weight's gradient is. `bias`: a bias is added. `fused`:
    with a bias and an activation. `c` and `c32`: another matrix is added, of the result's dtype or float32.

    Kinds of an MLP, which store more than the result (kernels/epilogue.py): `gated`: the up projection u of
    SwiGLU, stored beside silu(g) * u. `activated`: the up projection h of GPT, stored beside gelu(h). Their
    `gradient`: of what goes into the down projection; that of g and u, or of h, is stored, and what went in.
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


def cases_of(layers: Iterable[Layer], more: Iterable[Layer], dtype: torch.dtype) -> list[Case]:
    """Return the GEMMs of linear layers: three of `layers`, and an `adds` and a `fused` one of `more`.

    A layer with weight W [N, K] computes for T tokens in a training step: Y [T, N] = X @ W.T (nt), the
    input's gradient Y @ W (nn), and the weight's gradient Y.T @ X (tn).

    Example:
        >>> [str(case) for case in cases_of([(2048, 3072, 768)], [], torch.bfloat16)]
        ['2048x3072x768 nt plain', '2048x768x3072 nn plain', '3072x768x2048 tn plain']
    """
    cases: list[Case] = []
    for tokens, outputs, inputs in layers:
        cases += [
            Case(M=tokens, N=outputs, K=inputs, layout="nt", dtype=dtype),
            Case(M=tokens, N=inputs, K=outputs, layout="nn", dtype=dtype),
            Case(M=outputs, N=inputs, K=tokens, layout="tn", dtype=dtype),
        ]
    for tokens, outputs, inputs in more:
        cases += [
            Case(M=outputs, N=inputs, K=tokens, layout="tn", dtype=dtype, kind="adds"),
            Case(M=tokens, N=outputs, K=inputs, layout="nt", dtype=dtype, kind="fused"),
        ]
    return cases


def mlp_cases(kind: Kind, layers: Iterable[Layer], dtype: torch.dtype) -> list[Case]:
    """Return two GEMMs of MLPs, given as their up projections: that, and the gradient of what goes down.

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


def default_cases(dtype: torch.dtype) -> list[Case]:
    """Return the cases for a GPU: thirty layers, the cube that is usually quoted, more of four, four MLPs."""
    layers = [(tokens, *weight) for weight in WEIGHTS for tokens in TOKENS]
    more = [(tokens, *weight) for weight in ((4096, 4096), (28672, 4096)) for tokens in (2048, 8192)]
    mlps = mlp_cases("gated", GATED_MLPS, dtype) + mlp_cases("activated", ACTIVATED_MLPS, dtype)
    return cases_of([*layers, (8192, 8192, 8192)], more, dtype) + mlps


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The tensors of a case."""

    operands: Operands  # C is `d` where the product is added to it
    d: Tensor  # receives the result, [M, N]
    start: Tensor | None  # what is added to the product: C, or what `d` holds before
    pre: Tensor | None = None  # receive what an MLP stores besides, as in `Launch`
    d2: Tensor | None = None

    @classmethod
    def draw(cls, case: Case, device: torch.device, *, seed: int = 0) -> Problem:
        """Draw the operands: N(0, 1), scaled by 1 / sqrt(K) but for what goes into an activation."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            values = torch.randn(rows, columns, generator=generator, device=device)
            return values.mul_(case.K**-0.5).to(dtype)

        return cls.of(case, normal, device)

    @classmethod
    def empty(cls, case: Case, device: torch.device) -> Problem:
        """Allocate the operands alone, for their shapes and strides."""

        def empty(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        return cls.of(case, empty, device)

    @classmethod
    def of(cls, case: Case, make: Callable[[int, int, torch.dtype], Tensor], device: torch.device) -> Problem:
        """Make the tensors of a case by `make(rows, columns, dtype)`; the result is NaN at first."""
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
        """What receives more than the result."""
        return [tensor for tensor in (self.pre, self.d2) if tensor is not None]

    def shape(self) -> Shape:
        """Return what dispatch sees of it."""
        is_sum = self.operands.c is self.d and self.d.dtype == torch.float32
        return self.operands.shape(adds=is_sum, writes=len(self.stored_besides))

    def reset(self) -> None:
        """Fill the results with NaN, or with what the product is added to."""
        for result in (self.d, *self.stored_besides):
            result.fill_(math.nan)
        if self.operands.c is self.d and self.start is not None:
            self.d.copy_(self.start)

    def rotation(self) -> list[Problem]:
        """Return this problem and copies of it that together exceed four times the device's L2 cache."""
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
        """Return the largest error over what is allowed; infinite where the result is not finite.

        Each element has to be within `|D - ref| <= (K + 2) u (|A| @ |B| + |C|) + eps |ref|` of the reference
        in float64, u = 2^-23: any order of a float32 sum, no lost term of it, and one rounding to the
        result's dtype; with `rounds_twice` more, as torch allows its library in split-K reductions, and as
        it does before and after an activation. An epilogue enlarges the first term by its slope. What is
        stored besides the result is compared alike.
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
        if float32_precision(given.a) == "tf32":  # 10 bits of each operand are multiplied
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


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One of the matrices that are stored."""

    expected: Tensor  # in float64
    slope: Tensor | float = 1.0  # by which it enlarges an error of the product
    terms: Tensor | float = 0.0  # what its own operations round, in U32


def _parts(given: Operands, x: Tensor, gate: Tensor | None, up: Tensor | None) -> Sequence[_Part]:
    """Return d, `pre` and `d2`, as far as a kind has them, from the product x: the table of epilogue.py."""
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
