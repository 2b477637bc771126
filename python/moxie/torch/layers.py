"""Layers that torch passes go through: the process-wide table behind the ops' integer handle, and the contexts of
passes in flight.

One SharedLayer serves all modules of equal problem and plan in a World: weights come with each pass, so a model with
many MoE layers has one workspace. A forward pass takes a context from the layer's pool; the token that the op returns
beside y stands for it, and the context goes back to the pool when torch frees the token (after backward, or when the
graph is dropped). The token is a CPU tensor: reading it never waits for a GPU.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moxie._errors import InvalidArgumentError
from moxie._moxie import Context, Layer, Plan, Problem, World, _backward, _forward, _set_leak_warnings
from moxie.torch import weights as parts
from moxie.torch.grads import GradBuffers
from moxie.torch.streams import WorldState, device_tensor, is_capturing, state_of

# torch keeps what is registered with it, and what compiled code looks at, until the process is gone: no leak of ours.
_set_leak_warnings(False)

_handles = itertools.count(1)
_layers: "weakref.WeakValueDictionary[int, SharedLayer]" = weakref.WeakValueDictionary()


class SharedLayer:
    """A moxie.Layer for torch tensors; made by open_layer. `handle` is its number in the ops. Copies share it."""

    def __init__(self, state: WorldState, problem: Problem, plan: Plan | None, key: str) -> None:
        self.state, self.problem, self.device, self.key = state, problem, state.device, key
        with state.lock:
            self.layer = Layer(state.world, problem, plan)
        self.handle = next(_handles)
        self.ranges = [problem.experts_of(r) for r in state.world.local_ranks]  # experts of each rank of this process
        self.sizes = parts.sizes_of(problem, self.ranges)
        self._storages: dict[int, parts.Storage] = {}  # by layout
        self._free: list[Context] = []
        self._in_flight: dict[int, _InFlight] = {}  # by token
        self._captured: list[Context] = []  # those of CUDA graphs, used at each replay: never given to another pass
        self._heap_view: Any = None
        self._heap: tuple[int, int] | None = None  # addresses of input_buffer, once it was asked for
        self._tokens = itertools.count(1)
        _layers[self.handle] = self

    @property
    def world(self) -> World:
        return self.state.world

    @property
    def num_contexts(self) -> int:
        """Contexts made so far: of passes in flight, free ones, and those of CUDA graphs."""
        return len(self._contexts())

    @property
    def context_bytes(self) -> int:
        """Of all of them."""
        return sum(c.num_bytes for c in self._contexts())

    def _contexts(self) -> list[Context]:
        return [*self._free, *(p.context for p in self._in_flight.values()), *self._captured]

    def reserve_contexts(self, count: int) -> None:
        """Makes contexts until `count` are free: for captured forward passes, each of which keeps one."""
        while len(self._free) < count:
            self._free.append(self.layer.make_context())

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedLayer":
        return self

    def __reduce__(self) -> Any:
        raise InvalidArgumentError("a layer lives in this process, must not be pickled; save the state_dict instead")

    def storage(self, layout: int) -> parts.Storage:
        """Of a layout of weights; with or without main gradients it is the same."""
        key = layout & ~parts.MAIN_GRAD
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = parts.Storage(self.sizes, key, self.device)
        return storage

    def run_forward(
        self, x: Any, ids: Any, route_weights: Any, flat: Sequence[Any], layout: int, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y [T, H]; with `keep` also the token that run_backward takes. Tensors as in ops.forward, checked there."""
        storage = self.storage(layout)
        weights = storage.addresses(storage.stacked_parts(flat))
        y = torch.empty_like(x)
        with self.state.lock:
            stream = self.state.enter_stream()
            context = self._take_context() if keep else None
            _forward(
                self.layer,
                context,
                stream,
                x.shape[0],
                x.data_ptr(),
                ids.data_ptr(),
                ids.dtype is torch.int64,
                route_weights.data_ptr(),
                weights,
                y.data_ptr(),
            )
        return y, None if context is None else self._token_of(context)

    def _take_context(self) -> Context:
        if self._free:
            return self._free.pop()
        if is_capturing():
            raise InvalidArgumentError(
                f"no context is free for a forward pass in a CUDA graph capture (all {self.num_contexts} are in use), "
                "must be made before; call reserve_contexts with the number of captured forward passes"
            )
        return self.layer.make_context()

    def _token_of(self, context: Context) -> torch.Tensor:
        number = next(self._tokens)
        owner = np.array([number], np.int64)  # lives as long as the token's storage, whatever holds it
        self._in_flight[number] = _InFlight(owner, number, self, context)
        return torch.from_numpy(owner)

    def release(self, number: int) -> None:
        """A token is gone: its context is free, unless a graph will use it at each replay."""
        gone = self._in_flight.pop(number)
        if not gone.captured:
            self._free.append(gone.context)
            return
        self._captured.append(gone.context)
        if self._heap_view is None and not self.layer.closed:  # no later layer may move what the graph points to
            self._heap_view = self.layer.input_buffer(self.world.local_ranks[0])

    def run_backward(
        self, dy: Any, x: Any, token: torch.Tensor, flat: Sequence[Any], layout: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """dx [T, H], d_route_weights [T, K] and weight gradients by stored part (none of them with main_grad)."""
        kept = self._in_flight.get(token.item())
        if kept is None:
            raise InvalidArgumentError(
                "the context of this backward pass is gone, must live until then: its token, a saved CPU tensor, was "
                "copied instead of kept; leave int64 tensors out of what is offloaded"
            )
        storage, into_main = self.storage(layout), bool(layout & parts.MAIN_GRAD)
        weights = storage.addresses(storage.stacked_parts(flat))
        dx = torch.empty_like(x)
        d_route_weights = x.new_empty((x.shape[0], self.sizes.top_k), dtype=torch.float32)
        grads = GradBuffers(storage, flat, into_main)
        with self.state.lock:
            _backward(
                self.layer,
                kept.context,
                self.state.enter_stream(),
                x.shape[0],
                x.data_ptr(),
                dy.data_ptr(),
                weights,
                dx.data_ptr(),
                d_route_weights.data_ptr(),
                storage.addresses(grads.tensors),
                into_main,
            )
        return dx, d_route_weights, grads.finish()

    def input_buffer(self, num_tokens: int | None = None) -> torch.Tensor:
        """[T, H] of the memory in which a pass looks for x: one rank's, so only where this process has one."""
        if len(self.ranges) != 1:
            raise InvalidArgumentError(
                f"input_buffer was called in a process with {len(self.ranges)} ranks, must be in one with 1 rank"
            )
        most = self.problem.max_tokens
        if num_tokens is not None and not 0 <= num_tokens <= most:
            nearest = 0 if num_tokens < 0 else most
            raise InvalidArgumentError(
                f"num_tokens of input_buffer is {num_tokens}, must be between 0 and max_tokens {most}; "
                f"nearest legal value {nearest}"
            )
        array = self.layer.input_buffer(self.world.local_ranks[0])
        tensor = torch.from_numpy(array) if self.device.type == "cpu" else device_tensor(array, self.device)
        tensor = tensor.view(self.sizes.dtype)
        self._heap = (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        return tensor[: most if num_tokens is None else num_tokens]

    def refuse_input_buffer(self, x: torch.Tensor) -> None:
        """Raises InvalidArgumentError for an x that backward needs again, in memory that other passes overwrite."""
        if self._heap is not None and self._heap[0] <= x.data_ptr() < self._heap[1]:
            raise InvalidArgumentError(
                "x lies in the input buffer and gradients are wanted, must be a tensor of its own then: other passes "
                "overwrite the buffer before backward reads it; nearest legal value x.clone(), or torch.no_grad()"
            )


class _InFlight(weakref.ref):  # type: ignore[type-arg]
    """The context of a pass, and a watch on the memory of its token: when that is gone, the pass is."""

    __slots__ = ("captured", "context", "layer", "number")

    def __new__(cls, owner: Any, *_: Any) -> "_InFlight":
        return super().__new__(cls, owner, _release)

    def __init__(self, owner: Any, number: int, layer: SharedLayer, context: Context) -> None:
        super().__init__(owner, _release)
        self.number, self.context, self.layer = number, context, weakref.ref(layer)
        self.captured = is_capturing()


def _release(gone: _InFlight) -> None:
    layer = gone.layer()
    if layer is not None:
        layer.release(gone.number)


def find_layer(handle: int) -> SharedLayer:
    """The layer of an op's handle. Raises InvalidArgumentError when it is gone."""
    layer = _layers.get(int(handle))
    if layer is None:
        raise InvalidArgumentError(f"layer {handle} of a moxie op does not exist, must be one that is still in use")
    return layer


def open_layer(
    world: World, problem: Problem, plan: Plan | None = None, *, device: torch.device | str | None = None
) -> SharedLayer:
    """The World's layer for this problem and plan: made at first use, shared afterwards.

    device: where tensors are, for CUDA worlds; the current one when None, the CPU for CPU worlds. Collective like
    moxie.Layer: ranks in other processes must do the same. Raises what moxie.Layer raises, and InvalidArgumentError
    inside the capture of a CUDA graph.
    """
    state = state_of(world, None if device is None else torch.device(device))
    key = f"{problem!r} {plan!r}"
    for layer in list(_layers.values()):
        if layer.state is state and layer.key == key and not layer.layer.closed:
            return layer
    if is_capturing():
        raise InvalidArgumentError(
            "a layer was made in a CUDA graph capture, must be made before: it allocates and waits for peers"
        )
    return SharedLayer(state, problem, plan, key)
