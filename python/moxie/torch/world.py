"""Worlds for torch programs: one process per rank of a torch.distributed group, or one rank on its own."""

import os
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import moxie
from moxie._errors import InvalidArgumentError, UnavailableError
from moxie._moxie import World
from moxie.torch.streams import WorldState, state_of

_local: dict[torch.device, World] = {}
_kept: list[WorldState] = []  # worlds made here know their device, until they are closed


def local_world(device: torch.device | str | None = None, **options: Any) -> World:
    """A World of one rank on this device: the CPU, or a GPU. Made once per device when no options are given.

    It lives until World.close() or the end of the process.

    device: the current GPU where there is one, else the CPU. options: as World.cpu or World.cuda take them. Raises
    UnavailableError without a GPU or in a build without CUDA.
    """
    where = _device(device)
    if not options and where in _local and not _local[where].closed:
        return _local[where]
    if where.type == "cpu":
        world = World.cpu(num_ranks=1, **options)
    else:
        _require_cuda()
        world = World.cuda(num_ranks=1, devices=[where.index], **options)
    _keep(world, where)
    if not options:
        _local[where] = world
    return world


def world_from_group(
    group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None, **options: Any
) -> World:
    """The World whose ranks are the processes of a torch.distributed group. Collective over the group.

    group: the default group when None. device: this process's, the current GPU where there is one, else the CPU (gloo
    groups of GPU processes work, too: only the id of the world travels through the group). On GPUs World.nccl, on the
    CPU World.cpu_process, which needs all processes on one machine. options: as those take them. Raises
    InvalidArgumentError without an initialised process group, and what the World raises. It lives until World.close()
    or the end of the process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgumentError(
            "world_from_group was called before torch.distributed.init_process_group, must be after; a single process "
            "takes local_world"
        )
    where = _device(device)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise InvalidArgumentError("this process is no member of the group, must be one to be a rank of its World")
    if where.type == "cpu":
        name = _from_first(group, where, lambda: f"moxie.torch.{os.getpid()}.{uuid.uuid4().hex[:12]}")
        world = World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, **options)
    else:
        _require_cuda()
        if not hasattr(World, "nccl"):
            raise UnavailableError("this build has no World.nccl for ranks in processes, must be one with NCCL")
        unique_id = _from_first(group, where, lambda: moxie.nccl_unique_id())
        world = World.nccl(rank=rank, num_ranks=num_ranks, unique_id=unique_id, device=where.index, **options)
    _keep(world, where)
    return world


def _keep(world: World, device: torch.device) -> None:
    _kept[:] = [state for state in _kept if not state.world.closed] + [state_of(world, device)]


def _from_first(group: Any, where: torch.device, make: Any) -> Any:
    """What rank 0 of the group makes, on all ranks."""
    box = [make() if dist.get_rank(group) == 0 else None]
    on_gpu = where.type == "cuda" and dist.get_backend(group) == "nccl"
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(box, src=source, group=group, device=where if on_gpu else None)
    return box[0]


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() and moxie.has_cuda else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {device}, must be cpu or cuda; nearest legal value cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device


def _require_cuda() -> None:
    if not moxie.has_cuda:
        raise UnavailableError(
            "this build of Moxie has no CUDA, must have it for a GPU; device='cpu' runs the CPU twin"
        )
    if not torch.cuda.is_available():
        raise UnavailableError("torch sees no GPU, must see one for device cuda; device='cpu' runs the CPU twin")


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name that belong to this rank's experts: those of other ranks are others, so they must not be
    averaged over data-parallel ranks. Shared experts and routers are not among them."""
    return {name: p for name, p in model.named_parameters() if getattr(p, "moxie_expert", False)}


def ignore_experts_in_ddp(model: nn.Module) -> list[str]:
    """Tells DistributedDataParallel, before it wraps the model, to leave expert_parameters alone. Returns their names.

    The gradient of an expert is the sum over the tokens of all ranks. Where the loss of each rank is a mean over its
    own tokens and DDP averages the other gradients, scale_expert_grads(model, 1 / ranks) before the optimizer's step.
    """
    names = list(expert_parameters(model))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return names


def scale_expert_grads(model: nn.Module, factor: float) -> None:
    """Multiplies .grad (or main_grad) of expert_parameters in place: by 1 / ranks, where DDP averages the others."""
    for p in expert_parameters(model).values():
        grad = getattr(p, "main_grad", p.grad)
        if grad is not None:
            grad.mul_(factor)
