"""moxie.torch.MoE against the moxie.Layer under it: what a pass through PyTorch costs beside the pass itself.

    python3 bench/bench_torch_module.py --scenario bench/scenarios/h200-forward.json --json out.json
    torchrun --nproc-per-node 2 bench/bench_torch_module.py --scenario bench/scenarios/h200x2-forward.json
    python3 bench/bench_torch_module.py --device cpu --scenario bench/scenarios/cpu-smoke.json --rounds 3

One rank per process: one GPU, or one per process of torchrun. Of each shape of the scenario, in turns:
  infer, forward   y without and with what backward needs; ids and weights of routes are given, no router runs
  backward         of that forward: dx, d_route_weights and new BF16 gradients
  main_grads       the same, added into FP32 main gradients
Both are judged in three ways, medians over the rounds, the slowest rank:
  burst_ms         per pass, passes back to back: 120 ms idle, one warm-up, about 24 ms between two events
  alone_us         one pass from an idle GPU until it has ended, by the clock of the host
  host_us          until the call returns, which on a GPU is long before the pass has ended
  autograd         of host_us of the backward ones: what torch takes for a backward that does nothing
The layer is called with arrays made before, so it is the time of the C++ library and of its bindings. On a CPU passes
are done when the call returns: the three are the same there."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import moxie.torch as mt
import torch
import torch.distributed as dist

import moxie

PARTS = ("infer", "forward", "backward", "main_grads")
IDLE_S, WINDOW_MS, NUM_ALONE = 0.12, 24, 20


def problem_of(shape, num_ranks):
    experts = shape["num_experts"] if "num_experts" in shape else shape["experts_per_rank"] * num_ranks
    return moxie.Problem(
        num_ranks=num_ranks,
        max_tokens=shape["tokens_per_rank"],
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
        num_experts=experts,
        top_k=shape["top_k"],
        dtype=moxie.DType.bf16,
    )


class Array:
    """A tensor as the bindings read it. Tensor.__dlpack__ makes streams wait for each other; passes here share one."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        device = self.tensor.device
        return (2, device.index) if device.type == "cuda" else (1, 0)


class Nothing(torch.autograd.Function):
    """What autograd itself costs: inputs and saved tensors as a pass has them, gradients that are there already."""

    @staticmethod
    def forward(ctx, y, grads, *tensors):
        ctx.grads = grads
        ctx.save_for_backward(*tensors)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return None, None, *ctx.grads


class Passes:
    """The module and the layer of one shape, each ready to run each part on the same tensors."""

    def __init__(self, world, problem, device, seed):
        self.module = module = mt.MoE(problem, world, initialize=False)
        self.layer, rank = module.layer, world.local_ranks[0]
        generator = torch.Generator(device=device).manual_seed(seed * 1000 + rank)
        randn = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)
        for weight in module.flat_weights():
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        tokens, top_k = problem.max_tokens, problem.top_k
        scores = torch.rand(tokens, problem.num_experts, device=device, generator=generator)
        self.ids = scores.topk(top_k, dim=-1).indices
        self.x, self.dy = randn(tokens, problem.hidden).requires_grad_(), randn(tokens, problem.hidden)
        weights = torch.rand(tokens, top_k, device=device, generator=generator) + 0.1
        self.route_weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
        # The layer's arguments, once and for all.
        self.arguments = {
            "x": [Array(self.x.detach())],
            "weights": [moxie.Weights(**{n: Array(t) for n, t in module.stacked_weights().items()})],
        }
        self.routes = {"expert_ids": [Array(self.ids)], "route_weights": [Array(self.route_weights.detach())]}
        self.y_of_layer = torch.empty_like(self.dy)
        self.context = self.layer.layer.make_context()
        self.dy_array = [Array(self.dy)]
        self.outputs = {part: [self.gradients(part)] for part in PARTS[2:]}
        self.y = None

    def gradients(self, part):
        dtype = torch.float32 if part == "main_grads" else torch.bfloat16
        like = self.module.stacked_weights().items()
        return moxie.Gradients(
            dx=Array(torch.empty_like(self.dy)),
            d_route_weights=Array(torch.empty_like(self.route_weights)),
            weights=moxie.Weights(**{n: Array(torch.zeros_like(t, dtype=dtype)) for n, t in like}),
        )

    def prepare(self, part):
        """Before the passes of a part: a graph for the backward ones."""
        self.y = None
        for weight in self.module.flat_weights():
            if hasattr(weight, "main_grad"):
                del weight.main_grad
        if part == "main_grads":
            self.module.make_main_grads()
        if part in self.outputs:
            self.y = self.module(self.x, self.ids, self.route_weights)
            self.layer_forward()

    def layer_forward(self):
        out = [Array(self.y_of_layer)]
        self.layer.layer.forward(**self.arguments, **self.routes, out=out, context=self.context)

    def run_module(self, part):
        if part == "infer":
            with torch.no_grad():
                self.module(self.x, self.ids, self.route_weights)
        elif part == "forward":
            self.module(self.x, self.ids, self.route_weights)
        else:
            wanted = [self.x, self.route_weights, *([] if part == "main_grads" else self.module.flat_weights())]
            torch.autograd.grad(self.y, wanted, self.dy, retain_graph=True)

    def run_layer(self, part):
        if part == "infer":
            self.layer.layer.infer(**self.arguments, **self.routes, out=[Array(self.y_of_layer)])
        elif part == "forward":
            self.layer_forward()
        else:
            self.layer.layer.backward(
                self.context,
                **self.arguments,
                dy=self.dy_array,
                out=self.outputs[part],
                accumulate=part == "main_grads",
            )

    def autograd_alone(self, clock):
        """Microseconds of autograd around a backward pass that does nothing."""
        tensors = [self.x, self.route_weights, *self.module.flat_weights()]
        grads = [torch.empty_like(t) for t in tensors]
        y = Nothing.apply(torch.empty_like(self.dy), grads, *tensors)
        launch = lambda: torch.autograd.grad(y, tensors, self.dy, retain_graph=True)
        return {"alone_us": clock.alone(launch), "host_us": statistics.median(clock.window(launch, 50)[1])}

    def check(self):
        """Both compute the same, bit for bit."""
        self.prepare("backward")
        grads = torch.autograd.grad(self.y, [self.x, *self.module.flat_weights()], self.dy, retain_graph=True)
        self.run_layer("backward")
        self.layer.world.synchronize()
        out = self.outputs["backward"][0]
        others = [out.dx, *(getattr(out.weights, n) for n in self.module.stacked_weights())]
        if not all(torch.equal(g, o.tensor) for g, o in zip(grads, others, strict=True)):
            raise SystemExit("module and layer differ")
        if not torch.equal(self.y.detach(), self.y_of_layer):
            raise SystemExit("module and layer differ in y")


class Clock:
    def __init__(self, device):
        self.on_gpu = device.type == "cuda"

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def window(self, launch, num_passes):
        """Milliseconds per pass, and the microseconds after which each call returned."""
        host_us = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self.on_gpu else (None, None)
        started = time.perf_counter()
        if self.on_gpu:
            begin.record()
        for _ in range(num_passes):
            called = time.perf_counter()
            launch()
            host_us.append((time.perf_counter() - called) * 1e6)
        if not self.on_gpu:
            return (time.perf_counter() - started) * 1e3 / num_passes, host_us
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / num_passes, host_us

    def burst(self, launch, estimate_ms):
        self.synchronize()
        time.sleep(IDLE_S)
        launch()
        # More calls than the driver's queue holds would wait for the GPU and look like time of the host.
        return self.window(launch, max(3, min(500, round(WINDOW_MS / estimate_ms))))

    def alone(self, launch):
        seen = []
        for _ in range(NUM_ALONE):
            self.synchronize()
            if dist.is_initialized():
                dist.barrier()
                self.synchronize()
            started = time.perf_counter()
            launch()
            self.synchronize()
            seen.append((time.perf_counter() - started) * 1e6)
        return statistics.median(seen)


def slowest(values, device):
    """The maximum over the ranks, of each."""
    if not dist.is_initialized():
        return values
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.tolist()


def measure(passes, parts, rounds, device):
    """Rows of one shape: of each part what module and layer take."""
    clock, rows = Clock(device), []
    autograd = passes.autograd_alone(clock)
    for part in parts:
        passes.prepare(part)
        runs = {"module": lambda p=part: passes.run_module(p), "layer": lambda p=part: passes.run_layer(p)}
        for run in runs.values():
            run()
        (estimate_ms,) = slowest([clock.window(runs["layer"], 3)[0]], device)
        samples = {who: {"burst_ms": [], "alone_us": [], "host_us": []} for who in runs}
        for _ in range(rounds):
            for who, run in runs.items():
                ms, host_us = clock.burst(run, estimate_ms)
                values = slowest([ms, clock.alone(run), statistics.median(host_us)], device)
                for name, value in zip(samples[who], values, strict=True):
                    samples[who][name].append(value)
        passes.layer.world.synchronize()
        row = {"part": part, "n": rounds, "autograd": autograd if part in passes.outputs else None, "samples": samples}
        for who, found in samples.items():
            row[who] = {name: statistics.median(values) for name, values in found.items()}
        rows.append(row)
    return rows


def machine(world, device):
    found = {"ranks": world.num_ranks, "gpu": None, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def commit():
    try:
        words = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", required=True, help="its shapes, plan and seed; see bench/scenarios")
    parser.add_argument("--shapes", nargs="*", help="names of those to run [all]")
    parser.add_argument("--tokens", type=int, help="per rank, instead of the scenario's")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what the file calls these sources [git's]")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    with open(args.scenario) as file:
        scenario = json.load(file)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # No collective of torch's runs beside a pass here.
        world = mt.world_from_group(device=device, **({"reserve_sms": 0} if device.type == "cuda" else {}))
    else:
        world = mt.local_world(device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    shapes = [s for s in scenario["shapes"] if args.shapes is None or s["name"] in args.shapes]
    if first:
        print(f"{'':14} {'':10} {'burst ms':>17} {'':>7} {'alone us':>17} {'':>7} {'host us':>13}")
        print(f"{'shape':14} {'part':10} {'module':>8} {'layer':>8} {'ratio':>7} {'module':>8} {'layer':>8} {'more':>7} {'module':>6} {'layer':>6} {'autograd':>8}")
    rows = []
    for shape in shapes:
        shape = {**shape, "tokens_per_rank": args.tokens or shape["tokens_per_rank"]}
        passes = Passes(world, problem_of(shape, world.num_ranks), device, scenario.get("seed", 1))
        passes.check()
        for row in measure(passes, args.parts, args.rounds, device):
            rows.append({"shape": shape["name"], **row})
            if first:
                m, l = row["module"], row["layer"]
                print(f"{shape['name']:14} {row['part']:10} {m['burst_ms']:8.3f} {l['burst_ms']:8.3f} {m['burst_ms'] / l['burst_ms']:7.3f} "
                      f"{m['alone_us']:8.0f} {l['alone_us']:8.0f} {m['alone_us'] - l['alone_us']:7.0f} {m['host_us']:6.0f} {l['host_us']:6.0f} "
                      f"{row['autograd']['host_us'] if row['autograd'] else 0:8.0f}", flush=True)
        del passes
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if first and args.json:
        record = {"commit": args.commit or commit(), "argv": sys.argv, "machine": machine(world, device), "scenario": scenario, "rows": rows}
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    if dist.is_initialized():
        dist.barrier()
        world.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
