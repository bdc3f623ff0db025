"""Which parameters are optimized alike: norms and biases without decay, hidden matrices for those who ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.core.optimization.composite import is_matrix

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
        decays: Whether there is a weight decay to keep from the rest.
        hidden: Parameters to tell from the others, by a key of that name.
        own: Groups that the module's own optimizer had: each is split for itself, a parameter that is in none
            is left out, and one that is frozen stays in. Their key `share`, if any, is kept.

    Raises:
        ConfigError: Nothing is trainable.

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
            decayed = not decays or (parameter.dim() >= 2 and candidate.get("weight_decay") != 0.0)
            options: dict[str, Any] = {} if decayed else {"weight_decay": 0.0}
            options |= {"hidden": parameter in hidden} if hidden is not None else {}
            options |= {"share": candidate["share"]} if "share" in candidate else {}
            key = (index, *options.items())
            groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    if not any(parameter.requires_grad for group in groups.values() for parameter in group["params"]):
        allowed = "a module with a trainable parameter"
        raise ConfigError(key="model", value=type(module).__name__, allowed=allowed)
    order = sorted(groups, key=lambda key: (key[0], "weight_decay" in groups[key]))
    return [groups[key] for key in order]


def hidden_matrices(module: nn.Module, rest: Sequence[str] | None = None) -> set[Tensor]:
    """Return the matrices between hidden layers: neither embeddings nor the output layer's.

    A matrix is a parameter called `weight` or `..._weight`. The output layer is every linear layer as wide as
    the largest embedding has entries; without an embedding it must be named.

    Args:
        module: Whose parameters are looked at.
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
            raise ConfigError(
                key="optimizer.rest", value=pattern, allowed=f"a parameter's name; {suggest_name(pattern, names)}"
            )
    tables = [part for part in module.modules() if isinstance(part, EMBEDDINGS)]
    vocabulary = max((table.num_embeddings for table in tables), default=0)
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary]
    others: set[Tensor] = {layer.weight for layer in [*tables, *heads]}
    return {
        parameter
        for name, parameter in module.named_parameters()
        if is_matrix(parameter)
        and "weight" in name.rpartition(".")[2]
        and parameter not in others
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
