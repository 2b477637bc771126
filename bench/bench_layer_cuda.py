"""The whole MoE layer in one kernel against the GEMM-only bound, in one run, interleaved.

    python3 bench/bench_layer_cuda.py --library build/libbench_layer_cuda.so --devices 0 1 --json out.json

The bound is torch._grouped_mm on the same routed rows, three products (gate, up, down), nothing else, on each GPU;
with several GPUs the slowest counts. The layer's time holds everything: staging x, sort, handshake, dispatch, FFN,
combine, merge. Needs PyTorch and Hopper GPUs. y is checked against FP64 for some tokens before it is timed.
burst and sustained as in bench_grouped_gemm.py. Medians over the rounds; a ratio below 1 means faster than the bound."""
import argparse
import ctypes
import json
import os
import statistics

import torch

from bench_grouped_gemm import SHAPES, Clock, burst, quantile, run_record, sustained, window


class LayerSpec(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("num_ranks", "reserve_sms", "cluster_size", "lag_order", "num_slabs", "band_blocks", "lag_bands")] + [
        (n, ctypes.c_longlong) for n in ("max_tokens", "hidden", "intermediate", "num_experts", "top_k", "x_ring_blocks",
                                         "hidden_ring_blocks")] + [("devices", ctypes.c_int * 64)]


class RankTensors(ctypes.Structure):
    _fields_ = [("num_tokens", ctypes.c_longlong), ("num_experts", ctypes.c_longlong)] + [
        (n, ctypes.c_void_p) for n in ("x", "expert_ids", "route_weights", "gate", "up", "down", "y")]


class Layer:
    """One layer of the library; call it to enqueue a pass."""

    def __init__(self, library, spec, ranks):
        self.library, self.keep, self.message = library, ranks, ctypes.create_string_buffer(512)
        self.handle = ctypes.c_void_p()
        self.ok(library.moxie_bench_layer_create(ctypes.byref(spec), ctypes.byref(self.handle), self.message))
        library.moxie_bench_layer_plan.restype = ctypes.c_char_p
        self.plan = library.moxie_bench_layer_plan(self.handle).decode()
        self.tensors = (RankTensors * len(ranks))(*[
            RankTensors(r["x"].shape[0], r["gate"].shape[0], *[r[n].data_ptr() for n in ("x", "ids", "weights", "gate", "up", "down", "y")])
            for r in ranks])

    def ok(self, code):
        if code:
            raise SystemExit(self.message.value.decode())

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.ok(self.library.moxie_bench_layer_forward(self.handle, self.tensors, stream, self.message))

    def synchronize(self):
        self.ok(self.library.moxie_bench_layer_synchronize(self.handle, self.message))

    def close(self):
        self.library.moxie_bench_layer_destroy(self.handle)


def sizes(shape, devices):
    """The shapes are slices for two ranks; one rank holds the experts of both."""
    H, I, E, K, T = SHAPES[shape]
    return H, I, E if len(devices) > 1 else 2 * E, K, T


def make_ranks(shape, devices, seed):
    """Random inputs, weights and routes; experts of rank r are r * E_local and following."""
    H, I, E, K, T = sizes(shape, devices)
    ranks = []
    for r, device in enumerate(devices):
        g = torch.Generator(device=f"cuda:{device}").manual_seed(seed * 100 + r)
        randn = lambda *s: torch.randn(*s, device=f"cuda:{device}", dtype=torch.bfloat16, generator=g)
        scores = torch.rand(T, E * len(devices), device=f"cuda:{device}", generator=g)
        values, ids = scores.topk(K, 1)
        ranks.append({"x": randn(T, H), "ids": ids, "weights": (values / values.sum(1, keepdim=True)).float(),
                      "gate": randn(E, I, H) * H**-0.5, "up": randn(E, I, H) * H**-0.5, "down": randn(E, H, I) * I**-0.5,
                      "y": torch.full((T, H), float("nan"), device=f"cuda:{device}", dtype=torch.bfloat16)})
    return ranks


def max_relative_error(ranks, experts_per_rank, count=4):
    worst = 0.0
    for rank in ranks:
        device = rank["x"].device
        for t in [0, rank["x"].shape[0] - 1] + list(range(7, rank["x"].shape[0], rank["x"].shape[0] // count)):
            x, wanted = rank["x"][t].double(), 0
            for e, w in zip(rank["ids"][t].tolist(), rank["weights"][t].tolist()):
                home, local = ranks[e // experts_per_rank], e % experts_per_rank
                xe = x.to(home["gate"].device)
                gate, up = home["gate"][local].double() @ xe, home["up"][local].double() @ xe
                wanted = wanted + (w * (home["down"][local].double() @ (gate * torch.sigmoid(gate) * up))).to(device)
            worst = max(worst, float((rank["y"][t].double() - wanted).norm() / wanted.norm()))
    return worst


class Bound:
    """The three grouped products of one rank on its own GPU."""

    def __init__(self, ranks, me, experts_per_rank):
        rank = ranks[me]
        device = rank["x"].device
        ids = torch.cat([r["ids"].flatten().to(device) for r in ranks]) - me * experts_per_rank
        counts = torch.bincount(ids[(ids >= 0) & (ids < experts_per_rank)], minlength=experts_per_rank)
        self.offsets = counts.cumsum(0).to(torch.int32)
        self.rows = int(counts.sum())
        self.x = torch.randn(self.rows, rank["x"].shape[1], device=device, dtype=torch.bfloat16)
        self.hidden = torch.randn(self.rows, rank["down"].shape[2], device=device, dtype=torch.bfloat16)
        self.weights = [rank[n].transpose(1, 2) for n in ("gate", "up", "down")]

    def __call__(self):
        mm = torch._grouped_mm
        mm(self.x, self.weights[0], offs=self.offsets)
        mm(self.x, self.weights[1], offs=self.offsets)
        mm(self.hidden, self.weights[2], offs=self.offsets)


def bench_shape(shape, library, clock_library, args):
    devices = args.devices
    H, I, E, K, T = sizes(shape, devices)
    torch.cuda.set_device(devices[0])
    ranks = make_ranks(shape, devices, args.seed)
    for device in devices:
        torch.cuda.synchronize(device)
    clock = Clock(clock_library)
    spec = LayerSpec(len(devices), args.reserve_sms, args.cluster_size, int(args.lag > 0), args.slabs, args.band, args.lag, T, H, I, E * len(devices), K,
                     args.x_ring, args.hidden_ring, (ctypes.c_int * 64)(*devices))
    layer = Layer(library, spec, ranks)
    layer()
    layer.synchronize()
    error = max_relative_error(ranks, E)
    if not error <= 1e-2:
        raise SystemExit(f"{shape}: y is off by {error:.2e}")
    bound = Bound(ranks, 0, E)
    modes = {"burst": burst, "sustained": sustained}
    times = {(name, mode): [] for name in ("moxie", "bound") for mode in args.modes}
    launches = {"moxie": layer, "bound": bound}
    estimate = {}
    for name, launch in launches.items():
        launch()
        estimate[name] = window(launch, clock, 3)[0]
    for r in range(args.rounds):
        for mode in args.modes:
            for name in (list(launches) if r % 2 == 0 else list(launches)[::-1]):
                times[name, mode].append(modes[mode](launches[name], clock, estimate[name]))
    layer.synchronize()
    median = lambda name, mode, i: statistics.median(s[i] for s in times[name, mode]) if mode in args.modes else None
    mode = args.modes[0]
    samples = [ms for ms, _ in times["moxie", mode]]
    row = {"shape": shape, "direction": "forward", "ranks": len(devices), "moxie_ms": median("moxie", mode, 0),
           "gemm_only_ms": median("bound", mode, 0), "nccl_torch_ms": None, "p10": quantile(samples, 0.1), "p90": quantile(samples, 0.9),
           "n": len(samples), "ratio": median("moxie", mode, 0) / median("bound", mode, 0), "mode": mode,
           "sustained_ratio": median("moxie", "sustained", 0) / median("bound", "sustained", 0) if "sustained" in args.modes else None,
           "sm_clock_mhz": median("moxie", mode, 1), "bound_clock_mhz": median("bound", mode, 1), "max_rel_l2": error, "launches": None,
           "rows": bound.rows, "plan": layer.plan, "samples": {f"{n} {m}": s for (n, m), s in times.items()}}
    tflops = 6.0 * bound.rows * H * I / 1e9
    sustained_text = f"  sustained {row['sustained_ratio']:.3f}" if row["sustained_ratio"] else ""
    print(f"{shape:13s} ranks {len(devices)}  moxie {row['moxie_ms']:7.3f} ms {tflops / row['moxie_ms']:4.0f} TF {row['sm_clock_mhz']:5.0f} MHz  "
          f"bound {row['gemm_only_ms']:7.3f} ms {tflops / row['gemm_only_ms']:4.0f} TF {row['bound_clock_mhz']:5.0f} MHz  "
          f"ratio {row['ratio']:.3f}{sustained_text}  error {error:.1e}", flush=True)
    layer.close()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", required=True, help="libbench_layer_cuda.so; libbench_grouped_gemm.so lies beside it")
    parser.add_argument("--devices", nargs="+", type=int, default=[0], help="GPU of each rank; the same one twice: virtual ranks")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--modes", nargs="+", default=["burst", "sustained"], choices=["burst", "sustained"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slabs", type=int, default=0, help="0: the default plan's; so for the next four")
    parser.add_argument("--band", type=int, default=0)
    parser.add_argument("--lag", type=int, default=0, help="lag order with so many bands")
    parser.add_argument("--x-ring", type=int, default=0)
    parser.add_argument("--hidden-ring", type=int, default=0)
    parser.add_argument("--reserve-sms", type=int, default=0)
    parser.add_argument("--cluster-size", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default=None, help="if not given: git rev-parse HEAD")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: nothing was measured")
    common = run_record(args)
    library = ctypes.CDLL(args.library)
    clock_library = ctypes.CDLL(os.path.join(os.path.dirname(args.library), "libbench_grouped_gemm.so"))
    rows = []
    for shape in args.shapes:
        rows.append(bench_shape(shape, library, clock_library, args))
        torch.cuda.empty_cache()
        if args.json:
            with open(args.json, "w") as file:
                json.dump({**common, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
