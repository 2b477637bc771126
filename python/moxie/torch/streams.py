"""A World in torch's streams: the order of passes. A pass is put into torch's current stream, behind the last one;
nothing here waits on the host."""

import threading
import weakref
from typing import Any

import torch

from moxie._errors import InvalidArgumentError
from moxie._moxie import World

_worlds: "weakref.WeakValueDictionary[int, WorldState]" = weakref.WeakValueDictionary()


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
        self.address = -1  # its cudaStream_t

    def enter_stream(self) -> int:
        """Orders the next pass into torch's current stream, behind the last pass, and returns its cudaStream_t (0 on a
        CPU). Captured passes are ordered among themselves; a graph as a whole is ordered by the stream in which it is
        replayed."""
        if self.device.type != "cuda":
            return 0
        address = _current_address(self.device.index)
        if address == self.address:
            return address
        stream = torch.cuda.current_stream(self.device)
        last, self.stream, self.address = self.stream, stream, address
        if last is not None:
            with torch.cuda.stream(last):
                last_capturing = is_capturing()
            if last_capturing == is_capturing():
                stream.wait_stream(last)
        return address


def _current_address(device: int) -> int:
    """The cudaStream_t of torch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


# The same in a tenth of the time, where torch has it.
_current_address = getattr(torch._C, "_cuda_getCurrentRawStream", _current_address)


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
