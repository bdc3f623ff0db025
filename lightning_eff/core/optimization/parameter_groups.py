"""Split parameters into groups: no weight decay for norms and biases, hidden matrices marked on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightning_eff.core.errors import ConfigError, suggest_name

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(
    module: nn.Module,
    *,
    decays: bool,
    hidden: set[Tensor] | None = None,
    own: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into matrices and the rest, which gets no weight decay.

    Args:
        module: Its trainable parameters are taken, each once.
        decays: Whether the optimizer has a weight decay.
        hidden: Parameters to mark with `hidden: True`, and all others with `hidden: False`; None marks none.
        own: Groups of the module's own optimizer: each is split, parameters in none are left out, frozen
            ones stay in. A key `lr_fraction` is kept.

    Raises:
        ConfigError: No parameter is trainable.

    Example:
        >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2), decays=True)]
        [1, 1]
    """
    candidates = own if own is not None else [{"params": list(module.parameters())}]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, candidate in enumerate(candidates):
        for parameter in candidate["params"]:
            if own is None and not parameter.requires_grad:
                continue
            is_decayed = not decays or (parameter.dim() >= 2 and candidate.get("weight_decay") != 0.0)
            options: dict[str, Any] = {} if is_decayed else {"weight_decay": 0.0}
            options |= {"hidden": parameter in hidden} if hidden is not None else {}
            options |= {"lr_fraction": candidate["lr_fraction"]} if "lr_fraction" in candidate else {}
            key = (index, *options.items())
            groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    if not any(parameter.requires_grad for group in groups.values() for parameter in group["params"]):
        allowed = "a module with a trainable parameter"
        raise ConfigError(key="model", value=type(module).__name__, allowed=allowed)
    order = sorted(groups, key=lambda key: (key[0], "weight_decay" in groups[key]))
    return [groups[key] for key in order]


def hidden_matrices(module: nn.Module, rest: Sequence[str] | None = None) -> set[Tensor]:
    """Return the matrices of hidden layers: neither embeddings nor the output layer.

    A matrix is a parameter called `weight` or `..._weight`. The output layer is every linear layer with as
    many outputs as the largest embedding has entries; without an embedding it must be named in `rest`.

    Args:
        module: Its parameters are searched.
        rest: Patterns of names of parameters that are not hidden either, a classifier's for example.

    Raises:
        ConfigError: A pattern matches no parameter.

    Example:
        >>> layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> len(hidden_matrices(layers)), hidden_matrices(layers, ["2.*"]) == {layers[0].weight}
        (2, True)
    """
    patterns = [rest] if isinstance(rest, str) else list(rest or ())
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            allowed = f"a parameter's name; {suggest_name(pattern, names)}"
            raise ConfigError(key="optimizer.rest", value=pattern, allowed=allowed)
    tables = [layer for layer in module.modules() if isinstance(layer, EMBEDDINGS)]
    vocabulary = max((table.num_embeddings for table in tables), default=0)
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary]
    excluded = {parameter for layer in [*tables, *heads] for parameter in layer.parameters(recurse=False)}
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2
        and not parameter.is_complex()
        and "weight" in name.rpartition(".")[2]
        and parameter not in excluded
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
