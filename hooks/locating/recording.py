"""What the modules of a block were given and gave, recording block by block while a model runs; nothing of it is kept."""

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
    """What the modules of a block were given and gave in one pass, and the block itself.

    ``changed`` are modules whose output was changed in place by what came after them.
    """

    block: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    returns_tuple: bool = False
    output: Tensor | None = None
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)
    fired: Counter[nn.Module] = field(default_factory=Counter)
    changed: set[nn.Module] = field(default_factory=set)

    def module(self, where: str) -> nn.Module:
        """A module by its name in the block."""
        return self.block.get_submodule(where)

    def input_of(self, module: nn.Module) -> Float[Tensor, "place d_in"]:
        """The first tensor that a module was given, positions flattened."""
        args, kwargs, _ = self.calls[module]
        return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).detach().flatten(0, -2)

    def output_of(self, module: nn.Module) -> Float[Tensor, "place d_out"]:
        return hidden_of(self.calls[module][2]).detach().flatten(0, -2)

    def norms(self, x: Tensor) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
        """Modules that take rows as wide as x to such rows and hold no matrix."""
        for name, module in self.block.named_modules():
            if module in self.calls and not any(weight.ndim > 1 for weight in module.parameters()):
                args, _, output = self.calls[module]
                if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.shape[-1] == x.shape[-1]:
                    yield name, module, self.input_of(module), self.output_of(module)

    @property
    def block_output(self) -> Tensor:
        """What the block gave."""
        assert self.output is not None
        return self.output

    def rerun(self) -> Tensor:
        """What the block gives when it is run once more on the same, but for what it kept for later tokens."""
        args = (None if isinstance(value, Cache) else value for value in self.args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in self.kwargs.items()}
        return hidden_of(self.block(*args, **kwargs))


def record(block: nn.Module, look: Callable[[Recording], None], stack: ExitStack) -> None:
    """Have ``look`` see what the block's modules did as soon as the block has run; then nothing of it is kept."""
    recording = Recording(block)
    outputs: dict[nn.Module, tuple[Tensor, int]] = {}
    handles: list[RemovableHandle] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kept = output
        if isinstance(output, Tensor):  # some families change it in place
            kept, outputs[module] = output.clone(), (output, output._version)
        recording.calls[module] = args, kwargs, kept
        recording.fired[module] += 1

    def done(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for handle in handles:
            handle.remove()
        recording.changed = {module for module, (given, version) in outputs.items() if given._version != version}
        outputs.clear()
        recording.args, recording.kwargs, recording.output, recording.returns_tuple = (
            args,
            kwargs,
            hidden_of(output),
            not isinstance(output, Tensor),
        )
        look(recording)
        recording.calls.clear()

    for module in block.modules():
        if module is not block:
            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    handles.append(block.register_forward_hook(done, with_kwargs=True))
    for handle in handles:
        stack.callback(handle.remove)
