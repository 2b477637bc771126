"""A World in torch's streams: the order of passes, and tensors as the bindings read them. A pass is put into torch's
current stream, behind the last one; nothing here waits on the host."""

import threading
import weakref
from typing import Any

import torch

from moxie._errors import InvalidArgumentError
from moxie._moxie import World

_worlds: "weakref.WeakValueDictionary[int, WorldState]" = weakref.WeakValueDictionary()


class Array:
    """A tensor as the bindings read it. Tensor.__dlpack__ would make streams wait for each other; here the pass itself
    is put into the stream of the tensor, so there is nothing to wait for."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self.tensor.device
        return (2, device.index) if device.type == "cuda" else (1, 0)


class DeviceMemory:
    """Two-byte elements of device memory, [rows, columns]; keeps `owner` alive."""

    def __init__(self, pointer: int, shape: tuple[int, ...], owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": "<i2", "version": 3}


def device_tensor(array: Any, device: torch.device) -> torch.Tensor:
    """A BF16 array of the bindings as int16 on its GPU, which their DLPack does not name."""
    seen = torch.from_dlpack(array)
    return torch.as_tensor(DeviceMemory(seen.data_ptr(), tuple(seen.shape), seen), device=device)


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class WorldState:
    """What all layers of a World share: one pass at a time, in the order of torch's streams."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.lock = threading.RLock()
        self.stream: torch.cuda.Stream | None = None  # of the last pass

    def enter_stream(self) -> None:
        """Orders the next pass into torch's current stream, behind the last pass. Captured passes are ordered among
        themselves; a graph as a whole is ordered by the stream in which it is replayed."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        last, self.stream = self.stream, stream
        if last is not None and last != stream:
            with torch.cuda.stream(last):
                last_capturing = is_capturing()
            if last_capturing == is_capturing():
                stream.wait_stream(last)
        self.world.set_stream(stream.cuda_stream)


def state_of(world: World, device: torch.device | None) -> WorldState:
    """The World's entry; made at first use."""
    state = _worlds.get(id(world))
    if state is not None and state.world is world:
        if device is not None and (device.type, device.index or 0) != (state.device.type, state.device.index or 0):
            raise InvalidArgumentError(
                f"device is {device}, must be that of the World's other layers; nearest legal value {state.device}"
            )
        return state
    if world.backend == "cpu":
        own = torch.device("cpu")
    elif device is not None and device.type == "cuda" and device.index is not None:
        own = device
    else:
        own = torch.device("cuda", torch.cuda.current_device())
    if device is not None and device.type != own.type:
        raise InvalidArgumentError(
            f"device is {device}, must be where the World is, {world.backend}; nearest legal value {own}"
        )
    state = WorldState(world, own)
    _worlds[id(world)] = state
    return state
