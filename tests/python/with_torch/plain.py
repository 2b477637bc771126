"""The layer in plain torch, FP64, one expert after another: autograd of this is what Moxie is judged against. It shares
nothing with the package. Beside it: random layers, and the comparison."""

from dataclasses import dataclass, field

import moxie.torch as mt
import torch
from torch.nn import functional as F

import moxie

DTYPES = {moxie.DType.f32: torch.float32, moxie.DType.bf16: torch.bfloat16}


def no_gpu():
    """Why CUDA tests cannot run; None when they can."""
    if not moxie.has_cuda:
        return "the package was built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no GPU"


@dataclass
class Place:
    """A device, and the worlds of a test on it. Ranks are threads on the CPU, virtual ranks of one GPU on CUDA."""

    kind: str
    worlds: list = field(default_factory=list)

    @property
    def device(self):
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", 0)

    @property
    def dtypes(self):
        return [moxie.DType.f32, moxie.DType.bf16] if self.kind == "cpu" else [moxie.DType.bf16]

    def world(self, num_ranks=1, **options):
        if self.kind == "cpu":
            world = moxie.World.cpu(num_ranks=num_ranks, timeout_s=60, **options)
        else:
            world = moxie.World.cuda(num_ranks=num_ranks, devices=[0] * num_ranks, timeout_s=60, **options)
        self.worlds.append(world)
        return world

    def synchronize(self):
        """Errors of CUDA passes are thrown here."""
        for world in self.worlds:
            if not world.closed:
                world.synchronize()

    def close(self):
        self.synchronize()
        for world in self.worlds:
            world.close()


def make_problem(dtype=moxie.DType.f32, **more):
    sizes = {"num_ranks": 1, "max_tokens": 40, "hidden": 64, "intermediate": 128, "num_experts": 5, "top_k": 2}
    return moxie.Problem(dtype=dtype, **{**sizes, **more})


def activate(g, u, activation):
    if activation.kind == moxie.ActivationKind.swiglu:
        return F.silu(g) * u
    g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    if activation.kind == moxie.ActivationKind.swiglu_clamped:
        return F.silu(g) * u
    return g * torch.sigmoid(activation.alpha * g) * (u + 1)


def run(problem, x, ids, route_weights, w):
    """w: tensors by name, of all experts. Everything in the dtype of x."""
    y = torch.zeros_like(x)
    for e in range(problem.num_experts):
        for k in range(problem.top_k):
            rows = (ids[:, k] == e).nonzero()[:, 0]
            g, u = x[rows] @ w["gate"][e].T, x[rows] @ w["up"][e].T
            if problem.expert_bias:
                g, u = g + w["gate_bias"][e], u + w["up_bias"][e]
            out = activate(g, u, problem.activation) @ w["down"][e].T
            if problem.expert_bias:
                out = out + w["down_bias"][e]
            y = y.index_add(0, rows, out * route_weights[rows, k, None])
    if problem.shared.intermediate:
        out = activate(x @ w["shared_gate"].T, x @ w["shared_up"].T, problem.activation) @ w["shared_down"].T
        if problem.shared.output_gate:
            out = out * torch.sigmoid(x @ w["shared_output_gate"])[:, None]
        y = y + out
    return y


def reference(problem, x, ids, route_weights, w, dy):
    """y and all gradients in FP64: a dict by name; d_route_weights is 0 where there is no route."""
    leaves = {"x": x, "route_weights": route_weights.masked_fill(ids < 0, 0), **w}
    leaves = {n: t.detach().cpu().double().requires_grad_() for n, t in leaves.items()}
    names = [n for n in leaves if n not in ("x", "route_weights")]
    y = run(problem, leaves["x"], ids.cpu(), leaves["route_weights"], {n: leaves[n] for n in names})
    y.backward(dy.detach().cpu().double())
    grads = {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in leaves.items()}
    return y.detach(), grads


def on_grid(t, grid):
    return t if grid is None else (t / grid).round() * grid


def make_inputs(problem, tokens, generator, device="cpu", routing="random"):
    """x, ids, route weights, dy. With clamps, x and weights are on grids: products are exact, and no rounding decides
    what is clamped."""
    grid = None if problem.activation.kind == moxie.ActivationKind.swiglu else 1 / 8
    dtype, e, k = DTYPES[problem.dtype], problem.num_experts, problem.top_k
    x = on_grid(torch.randn(tokens, problem.hidden, generator=generator).clamp(-4, 4), grid).to(dtype)
    ids = torch.stack([torch.randperm(e, generator=generator)[:k] for _ in range(tokens)] or [torch.empty(0, k)]).long()
    ids = ids.reshape(tokens, k)
    route_weights = torch.rand(tokens, k, generator=generator) - 0.3
    if routing == "holes":
        ids[torch.rand(tokens, k, generator=generator) < 0.4] = -1
        ids[:1] = -1
    elif routing == "one":
        ids[:] = e - 1
    route_weights[ids < 0] = float("nan")  # never read
    dy = torch.randn(tokens, problem.hidden, generator=generator).to(dtype)
    return tuple(t.to(device) for t in (x, ids, route_weights, dy))


def fill(module, generator):
    """Random weights in a module, biases too."""
    problem = module.layer.problem
    grid = None if problem.activation.kind == moxie.ActivationKind.swiglu else 1 / 64
    for name, t in module.stacked_weights().items():
        scale = 0.3 if name.endswith("_bias") else t.shape[-1] ** -0.5
        t.copy_(on_grid(torch.randn(t.shape, generator=generator).clamp(-4, 4) * scale, grid))


def grads_of(module):
    """Gradients by name, stacked, whatever the storage."""
    flat = [p.grad for p in module.flat_weights()]
    out = {}
    for part in module._parts:
        n = part.num_list if module._layout & 2 and part.num_list else 1
        taken, flat = flat[:n], flat[n:]
        out[part.name] = torch.stack(list(taken)).reshape(part.shape)
    if "gate_up" in out:
        out["gate"], out["up"] = out.pop("gate_up")
    return out


def close(name, got, want, dtype, *, scale=None):
    """Relative L2, and every element against its row: one wrong row must fail. `scale` bounds sums that may cancel."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if want.numel() == 0:
        return
    bf16 = dtype == moxie.DType.bf16
    error = (got - want).abs()
    if scale is not None:
        worst = (error - (1e-2 if bf16 else 1e-5) * scale.cpu()).max()
        assert worst <= 0, f"{name}: off by {error.max()}"
        return
    limit, each = (1e-2, 4e-2) if bf16 else (2e-5, 2e-4)
    norm = want.norm()
    assert (got - want).norm() <= limit * norm, f"{name}: relative L2 {(got - want).norm() / norm}"
    rows = want.reshape(-1, want.shape[-1])
    rms = rows.square().mean(1, keepdim=True).sqrt().clamp(min=rows.square().mean().sqrt())
    worst = (error.reshape(rows.shape) - each * (rms + rows.abs())).max()
    assert worst <= 0, f"{name}: an element is off by {error.max()}"


def judge(module, x, ids, route_weights, dy, y):
    """y and all gradients of a module after y.backward(dy), against the reference."""
    problem = module.layer.problem
    want_y, want = reference(problem, x, ids, route_weights, module.stacked_weights(), dy)
    close("y", y, want_y, problem.dtype)
    close("dx", x.grad, want.pop("x"), problem.dtype)
    scale = (dy.double().norm(dim=1) * want_y.to(dy.device).norm(dim=1).clamp(min=1))[:, None].expand(-1, problem.top_k)
    close("d_route_weights", route_weights.grad, want.pop("route_weights"), problem.dtype, scale=scale * 2)
    grads = grads_of(module)
    assert set(grads) == set(want)
    for name, grad in grads.items():
        close(name, grad, want[name], problem.dtype)


def make_module(place, problem, generator, **options):
    module = mt.MoE(problem, place.world(problem.num_ranks), **options)
    fill(module, generator)
    return module
