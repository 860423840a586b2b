"""Where the captured parameters of a model lie in the flat gradient."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from capture.taps.parts import Parts, UnitsOption
from gradstats.errors import InputError
from gradstats.hooks.layout import check_patterns, matching, warn_of_idle
from gradstats.hooks.torch_private import parts_of, unwrap
from gradstats.hooks.units import is_sharded, local_part, units
from gradstats.primitives.ratio import shown
from gradstats.trace import Layer

__all__ = ["Layout", "module_of"]


class Layout:
    """The parameters that require gradients when it is made, one after another in the model's order.

    Parameters
    ----------
    model : torch.nn.Module
        The model, in whatever wrappers.
    patterns : sequence of str, optional
        Name patterns (``fnmatch``) of the parameters to capture; all if None.
    units : mapping, optional
        Parameters that are cut into several layers of the trace, as :class:`capture.taps.parts.Parts` takes them.

    Attributes
    ----------
    model : torch.nn.Module
        The model without its wrappers.
    layers : list of Layer
        Names, places and shapes of the parameters.
    names : list of str
        Names of the parameters.
    parts : Parts
        The layers of the trace: the parameters, or what they are cut into.
    slots : dict of int to slice
        Places by the identity of the parameter.
    parameters : list of torch.Tensor
        The captured parameters.
    ignored : list of str
        Names of parameters that match and are left out, because DDP or FSDP2 ignores them: nobody averages them.

    Raises
    ------
    InputError
        If the model is none, no parameter matches, or one cannot be cut as `units` has it.
    """

    def __init__(
        self,
        model: object,
        patterns: Sequence[str] | None = None,
        units: UnitsOption | None = None,
    ) -> None:
        self.model = module_of(model)
        self.layers: list[Layer] = []
        self.slots: dict[int, slice] = {}
        self.ignored: list[str] = []
        ignored = _ignored(model, self.model)
        patterns = ["*"] if patterns is None else check_patterns(patterns, "parameters")
        wanted = matching(patterns)
        offset = 0
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if not wanted(name):
                continue
            # after the patterns: only what they match is reported as left out
            if id(parameter) in ignored:
                self.ignored.append(name)
                continue
            layer = Layer(name, offset, _shape(parameter))
            self.layers.append(layer)
            self.slots[id(parameter)] = layer.slice
            offset += layer.numel
        if not self.layers:
            names = ", ".join(name for name, _ in list(self.model.named_parameters())[:5])
            if self.ignored:
                raise InputError("DDP or FSDP2 ignores all parameters that are to be captured")
            raise InputError(f"no trainable parameter to capture; the model has {names or 'none'}")
        warn_of_idle(
            patterns, [n for n, _ in self.model.named_parameters()], "parameters", "captures"
        )
        self.names = [layer.name for layer in self.layers]
        self.parts = Parts(units, self.layers)
        # the same order as named_parameters(), which also has a shared parameter once
        self.parameters: list[torch.Tensor] = [
            p for p in self.model.parameters() if id(p) in self.slots
        ]
        # what requires a gradient now and has no slot is left out on purpose
        self._trainable = {id(p) for p in self.model.parameters() if p.requires_grad}
        self._modules: list[torch.nn.Module] = []
        self._tree: list[object] = []
        self._named: dict[str, torch.Tensor] = {}

    def named(self) -> Mapping[str, torch.Tensor]:
        """Return what the model has now: its parameters by name.

        Going through a model takes long, and is done anew only where a module or a parameter of it is another one.
        """
        tree = _tree(self._modules)
        if not tree or len(tree) != len(self._tree) or not all(map(operator.is_, tree, self._tree)):
            self._modules = list(self.model.modules())
            self._tree = _tree(self._modules)
            self._named = dict(self.model.named_parameters())
        return self._named

    def replaced(self) -> list[tuple[Layer, torch.Tensor | None]]:
        """Return the layers whose parameter in the model is another than before, with that one, or None without one."""
        named = self.named()
        return [
            (layer, named.get(layer.name))
            for layer, parameter in zip(self.layers, self.parameters, strict=True)
            if named.get(layer.name) is not parameter
        ]

    def adopt(self) -> list[torch.Tensor]:
        """Put parameters of the same name and shape in the places of those that they replaced; return them."""
        adopted = []
        for layer, parameter in self.replaced():
            if parameter is None or _shape(parameter) != layer.shape:
                continue
            i = self.names.index(layer.name)
            # another tensor may get the identity of this one; unless it is in another layer's place already, as where
            # two have changed places
            if self.slots.get(id(self.parameters[i])) == layer.slice:
                del self.slots[id(self.parameters[i])]
            self.parameters[i] = parameter
            self.slots[id(parameter)] = layer.slice
            self._trainable.add(id(parameter))
            adopted.append(parameter)
        return adopted

    def slots_of(self, model: torch.nn.Module) -> dict[int, slice]:
        """Return the places of another model's parameters, by name.

        Parameters
        ----------
        model : torch.nn.Module
            Model without wrappers.

        Returns
        -------
        dict of int to slice
            Places by the identity of the parameter.

        Raises
        ------
        InputError
            If it lacks a parameter.
        """
        named = dict(model.named_parameters())
        try:
            return {id(named[layer.name]): layer.slice for layer in self.layers}
        except KeyError as error:
            raise InputError(
                f"the model has no parameter {error}; the trace was made for another model"
            ) from None

    def missing(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter that has no place; None if it was left out on purpose.

        Parameters
        ----------
        parameter : torch.Tensor
            A parameter that is in no slot.
        """
        if id(parameter) in self._trainable:
            return None
        names = {id(p): name for name, p in self.named().items()}
        name = names.get(id(parameter), "a parameter of another model")
        return None if name in self.names else name  # of a replaced one, the layer is marked


def _tree(modules: Iterable[torch.nn.Module]) -> list[object]:
    """Return each module, followed by the modules and parameters that it holds now."""
    return [each for module in modules for each in (module, *parts_of(module))]


def _ignored(model: object, inner: torch.nn.Module) -> set[int]:
    """Return the identities of parameters that are trained in parallel, and not exchanged."""
    ddp = unwrap(model).ddp
    if ddp is not None:
        named = module_of(ddp.module).named_parameters()
        # as DDP has it, a parameter of the model itself is that of a module with an empty name
        return {id(p) for name, p in named if {name, f".{name}"} & ddp.parameters_to_ignore}
    trained = [p for p in inner.parameters() if p.requires_grad]
    # sharded, and yet all are plain: they are gathered now, which Sharding refuses
    if not is_sharded(inner) or all(local_part(p) is p for p in trained):
        return set()
    units(inner)  # refuses gathered ones, which look the same
    return {id(p) for p in trained if local_part(p) is p}


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    # real and imaginary parts
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def module_of(model: object) -> torch.nn.Module:
    """Return the module behind a model's wrappers.

    Parameters
    ----------
    model : object
        What a user gave as the model.

    Returns
    -------
    torch.nn.Module
        The module.

    Raises
    ------
    InputError
        If it is none.
    """
    inner = unwrap(model).module
    if not isinstance(inner, torch.nn.Module):
        hint = (
            "; give the model whose parameters it updates" if hasattr(model, "param_groups") else ""
        )
        raise InputError(f"Capture needs a torch.nn.Module, not {shown(model)}{hint}")
    return inner
