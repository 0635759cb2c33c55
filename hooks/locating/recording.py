"""Inputs and outputs of all modules of a block, recorded block by block while a model runs, and released after each."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from hooks.loading.network import hidden_of


@dataclass
class Recording:
    """Inputs and outputs of a block and of its modules in one pass.

    Attributes:
        block: the transformer block.
        args, kwargs: its arguments.
        returns_tuple: whether its output is a tuple.
        output: the residual stream after it.
        calls: arguments and output of the last call of each module.
        fired: how often each module ran.
        changed: modules whose output was modified in place after they returned it.
    """

    block: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    returns_tuple: bool = False
    output: Tensor | None = None
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)
    fired: Counter[nn.Module] = field(default_factory=Counter)
    changed: set[nn.Module] = field(default_factory=set)

    def module(self, path: str) -> nn.Module:
        """A module by its name in the block."""
        return self.block.get_submodule(path)

    def input_of(self, module: nn.Module) -> Float[Tensor, "place d_in"]:
        """The first tensor among a module's arguments, batch and positions flattened."""
        args, kwargs, _ = self.calls[module]
        return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).detach().flatten(0, -2)

    def output_of(self, module: nn.Module) -> Float[Tensor, "place d_out"]:
        """A module's output, batch and positions flattened."""
        return hidden_of(self.calls[module][2]).detach().flatten(0, -2)

    def norms(self, x: Tensor) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
        """Name, module, input and output of the modules that map rows as wide as x to such rows and contain no matrix."""
        for name, module in self.block.named_modules():
            if module in self.calls and not any(weight.ndim > 1 for weight in module.parameters()):
                args, _, output = self.calls[module]
                if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.shape[-1] == x.shape[-1]:
                    yield name, module, self.input_of(module), self.output_of(module)

    @property
    def block_output(self) -> Tensor:
        """The residual stream after the block."""
        assert self.output is not None
        return self.output

    def rerun(self) -> Tensor:
        """The residual stream after the block if it runs again on the same arguments, without a key-value cache."""
        args = (None if isinstance(value, Cache) else value for value in self.args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in self.kwargs.items()}
        return hidden_of(self.block(*args, **kwargs))


def record(block: nn.Module, on_recorded: Callable[[Recording], None], stack: ExitStack) -> None:
    """Record the block's next pass.

    Args:
        block: the transformer block.
        on_recorded: called with the recording as soon as the block has run; its tensors are released afterwards.
        stack: removes the hooks when it is closed.
    """
    recording = Recording(block)
    outputs: dict[nn.Module, tuple[Tensor, int]] = {}
    handles: list[RemovableHandle] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        copied = output
        if isinstance(output, Tensor):  # some families modify it in place
            copied, outputs[module] = output.clone(), (output, output._version)
        recording.calls[module] = args, kwargs, copied
        recording.fired[module] += 1

    def done(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for handle in handles:
            handle.remove()
        recording.changed = {module for module, (tensor, version) in outputs.items() if tensor._version != version}
        outputs.clear()
        recording.args, recording.kwargs = args, kwargs
        recording.output, recording.returns_tuple = hidden_of(output), not isinstance(output, Tensor)
        on_recorded(recording)
        recording.calls.clear()

    for module in block.modules():
        if module is not block:
            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    handles.append(block.register_forward_hook(done, with_kwargs=True))
    for handle in handles:
        stack.callback(handle.remove)
