"""`from_module`, `to_module` and state dicts as methods."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.node import Node
from ..core.traverse import leaves
from ..core.undo import Undo
from . import state
from .stacks import stacked_trees, tree_of
from .state_dicts import load_state_dict, make_state_dict, plan_load

if TYPE_CHECKING:
    from typing_extensions import Self


class ModuleMethods(Node):
    """Exchange with modules, and state dicts."""

    __slots__ = ()

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> Any:
        """The parameters and buffers of a module as a tensordict: the same objects.

        Args:
            module: any module; submodules become nested tensordicts.
            as_module: return a `TensorDictParams`.
            lock: whether the result is locked.
            use_state_dict: read ``module.state_dict()`` (hooks apply, tensors are detached).
            filter_empty: leave out submodules that hold nothing.

        >>> from tensordict import TensorDict
        >>> linear = nn.Linear(2, 3)
        >>> TensorDict.from_module(linear)["weight"] is linear.weight
        True
        """
        return tree_of(module, as_module, lock, use_state_dict, filter_empty)

    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> Any:
        """The stacked parameters of modules of one structure, as new leaves of batch size ``[n]``.

        Args:
            *modules: one module or more.
            as_module: return a `TensorDictParams`.
            lock: whether the result is locked.
            use_state_dict: read state dicts instead of parameters and buffers.
            lazy_stack: stack lazily: the leaves stay the modules' own.
            expand_identical: expand a tensor that all modules share instead of copying it.

        Raises:
            RuntimeError: no module, or modules whose names or shapes differ.
        """
        return stacked_trees(modules, as_module, lock, use_state_dict, lazy_stack, expand_identical)

    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool = True,
        swap_dest: Any = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
        memo: dict[int, Any] | None = None,
    ) -> Any:
        """Put the entries in a module; as a context manager, for the block only.

        Entries that the tensordict lacks stay as they are in the module. In a block the
        module holds these very tensors, so gradients reach them; outside one, a plain
        tensor becomes a Parameter over the same memory.

        Args:
            module: where the entries go, by name.
            inplace: copy into the module's parameters instead of replacing them.
            return_swap: return what the module held, as a tensordict.
            swap_dest: a tensordict that gets what the module held, and is returned.
            use_state_dict: go through ``module.load_state_dict`` (hooks apply).
            non_blocking: for the copies of ``inplace``.
            preserve_module_state: accepted for compatibility of calls; nothing but
                parameters and buffers ever changes.
            memo: accepted for compatibility of calls.

        Raises:
            KeyError: the module lacks an entry; nothing has changed then.
            RuntimeError: ``inplace`` and another shape; nothing has changed then.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> linear = nn.Linear(2, 3)
        >>> zero = TensorDict.from_module(linear).data.clone().zero_()
        >>> with zero.to_module(linear):
        ...     print(linear(torch.ones(2)))
        tensor([0., 0., 0.])
        >>> bool((linear.weight == 0).all())
        False
        """
        plan: Any
        if use_state_dict:
            former, plan = plan_load(self, module, bool(inplace))
        else:
            moves, former = state.plan_moves(self, module)
            if inplace:
                state.check_shapes(moves)
                if return_swap or swap_dest is not None:
                    former = former._map(lambda x: x.detach().clone())
                plan = state.Overwrite(moves, leaves(former), non_blocking)
            else:
                plan = state.Swap(moves)
        plan.run()
        if swap_dest is not None:
            swap_dest.update(former)
            former = swap_dest
        elif not return_swap:
            return None
        former._undo = Undo(None, plan, always=True)
        return former

    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
    ) -> OrderedDict[str, Any]:
        """The leaves by dotted name, like ``torch.nn.Module.state_dict``.

        Batch sizes, devices and non-tensor values are in its ``_metadata``.

        Args:
            destination: an ``OrderedDict`` to add to, and returned.
            prefix: put before every name.
            keep_vars: keep the tensors as they are, else they are detached.
            flatten: dotted names; False gives nested dictionaries.

        Raises:
            KeyError: two entries would get the same name.

        >>> from tensordict import TensorDict
        >>> list(TensorDict(a=0, n={"b": 1}).state_dict())
        ['a', 'n.b']
        """
        return make_state_dict(self, destination, prefix, keep_vars, flatten)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Self:
        """Load what `state_dict` made; all or nothing.

        Args:
            state_dict: flat or nested.
            strict: names must be the same on both sides; otherwise entries that only
                ``state_dict`` has are added and those it lacks stay.
            assign: store the given tensors, else copy into the present ones.
            from_flatten: whether the names are dotted; found out when None.

        Raises:
            RuntimeError: the names differ and ``strict``; all differences are listed.
        """
        load_state_dict(self, state_dict, strict, assign, from_flatten)
        return self
