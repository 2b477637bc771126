"""Grouped GEMM against torch._grouped_mm on five layer shapes, in one run, interleaved.

    python3 bench/bench_grouped_gemm.py --library build/libbench_grouped_gemm.so --json out.json

Needs PyTorch and one Hopper GPU. Rows are routed at random, hence uneven; real FLOPs are counted, not padding.
Each product is checked against FP64 rows and against torch before it is timed. burst: 120 ms idle, one warm-up,
~24 ms of launches. sustained: the same window after a further 170 ms of the same load. Medians over the rounds; a ratio
above 1 means faster than torch. `fc1` is gate, up, SwiGLU and row weight in one kernel; torch's time beside it
is the two products alone, without the elementwise kernel."""
import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time

import torch

SHAPES = {  # hidden, intermediate, experts on this rank, top-k, tokens per rank (two ranks)
    "kimi-k2.5": (7168, 2048, 6, 8, 8192),
    "deepseek-v3": (7168, 2048, 8, 8, 8192),
    "qwen3-30b": (2048, 768, 64, 8, 16384),
    "mixtral-8x7b": (4096, 14336, 4, 2, 8192),
    "gpt-oss-120b": (2880, 2880, 64, 4, 16384),
}
BLOCK_M = 128


class Product(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("swiglu", "cluster_size", "band_blocks", "num_experts")] + [
        ("rows_capacity", ctypes.c_longlong), ("n", ctypes.c_int), ("k", ctypes.c_int)] + [
        (name, ctypes.c_void_p) for name in ("a", "b", "b_up", "row_weight", "out", "expert_rows")]


class Ours:
    """One product of the library, ready to launch."""

    def __init__(self, library, *, a, b, out, counts, b_up=None, row_weight=None, cluster_size=2, band_blocks=0):
        self.library, self.keep = library, (a, b, b_up, row_weight, out, counts)
        pointer = lambda t: t.data_ptr() if t is not None else None
        self.product = Product(int(b_up is not None), cluster_size, band_blocks, b.shape[0], a.shape[0], b.shape[1],
                               b.shape[2], pointer(a), pointer(b), pointer(b_up), pointer(row_weight), pointer(out),
                               pointer(counts))
        self.message = ctypes.create_string_buffer(256)

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.moxie_bench_launch(ctypes.byref(self.product), stream, self.message):
            raise RuntimeError(self.message.value.decode())


class Clock:
    """SM clock between two probes, from each SM's cycle counter and the global timer."""

    def __init__(self, library):
        self.library = library
        self.words = [torch.zeros(256, 2, dtype=torch.int64, device="cuda") for _ in range(2)]

    def probe(self, i):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.library.moxie_bench_probe_clock(ctypes.c_void_p(self.words[i].data_ptr()), stream)

    def mhz(self):
        d = (self.words[1] - self.words[0]).double()
        d = d[self.words[0][:, 1] > 0]
        return float((d[:, 0] / d[:, 1]).median()) * 1e3


def window(launch, clock, num_launches):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock.probe(0)
    begin.record()
    for _ in range(num_launches):
        launch()
    end.record()
    clock.probe(1)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_launches, clock.mhz()


def burst(launch, clock, estimate_ms):
    torch.cuda.synchronize()
    time.sleep(0.12)
    launch()
    return window(launch, clock, max(2, round(24 / estimate_ms)))


def sustained(launch, clock, estimate_ms):
    torch.cuda.synchronize()
    time.sleep(0.12)  # the same state before each: the card throttles by its recent past
    for _ in range(max(2, round(170 / estimate_ms))):
        launch()
    return window(launch, clock, max(2, round(24 / estimate_ms)))


def quantile(samples, q):
    samples = sorted(samples)
    return samples[min(len(samples) - 1, int(q * len(samples)))]


def check(name, out, torch_out, real_rows, reference_rows):
    ours = out[real_rows]
    if not bool(torch.isfinite(ours.float()).all()):
        raise SystemExit(f"{name}: not finite")
    for row, wanted in reference_rows:
        error = float((out[row].double() - wanted).norm() / wanted.norm())
        if not error <= 5e-3:
            raise SystemExit(f"{name}: row {row} is off by {error:.2e}")
    if torch_out is not None:
        error = float((ours.float() - torch_out.float()).norm() / torch_out.float().norm())
        if not error <= 5e-3:
            raise SystemExit(f"{name}: differs from torch by {error:.2e}")
    rest = torch.ones(out.shape[0], dtype=torch.bool, device="cuda")
    rest[real_rows] = False
    if bool((out[rest].view(torch.int16) != -1).any()):
        raise SystemExit(f"{name}: a padding row was written")


def measure(contenders, clock, rounds, modes):
    """{name: launch} -> {name: {mode: [(ms, mhz), ...]}}, interleaved round by round."""
    estimate = {}
    for name, launch in contenders.items():
        launch()
        estimate[name] = window(launch, clock, 3)[0]
    samples = {name: {mode: [] for mode in modes} for name in contenders}
    for r in range(rounds):
        for mode in modes:
            run = burst if mode == "burst" else sustained
            order = list(contenders)
            for name in order[r % len(order):] + order[:r % len(order)]:
                samples[name][mode].append(run(contenders[name], clock, estimate[name]))
    return samples


def rows_of(shape, product, flops, samples, variant, common):
    result = []
    for mode in samples["torch"]:
        ours = [ms for ms, _ in samples[variant][mode]]
        base = [ms for ms, _ in samples["torch"][mode]]
        ms, torch_ms = statistics.median(ours), statistics.median(base)
        result.append({"shape": shape, "product": product, "variant": variant, "mode": mode, "ours_ms": ms, "torch_ms": torch_ms,
                       "ratio": torch_ms / ms, "tflops": flops / ms / 1e9, "torch_tflops": flops / torch_ms / 1e9,
                       "p10": quantile(ours, 0.1), "p90": quantile(ours, 0.9), "torch_p10": quantile(base, 0.1),
                       "torch_p90": quantile(base, 0.9), "n": len(ours),
                       "mhz": statistics.median(f for _, f in samples[variant][mode]),
                       "torch_mhz": statistics.median(f for _, f in samples["torch"][mode]),
                       "samples": ours, "torch_samples": base, **common})
        r = result[-1]
        print(f"{shape:13s} {product:5s} {variant:12s} {mode:9s} ours {ms:7.3f} ms {r['tflops']:4.0f} TF {r['mhz']:5.0f} MHz   "
              f"torch {torch_ms:7.3f} ms {r['torch_tflops']:4.0f} TF {r['torch_mhz']:5.0f} MHz   ratio {r['ratio']:.3f}", flush=True)
    return result


def bench_shape(name, libraries, args, common):
    H, I, E, K, T = SHAPES[name]
    clock = Clock(libraries[0][1])
    generator = torch.Generator(device="cuda").manual_seed(args.seed)
    idx = torch.rand(2 * T, 2 * E, device="cuda", generator=generator).topk(K, 1).indices.flatten()
    counts = torch.bincount(idx[idx < E], minlength=E)[:E].to(torch.int32)
    offsets = counts.cumsum(0).to(torch.int32)
    num_rows = int(counts.sum())
    padded = (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    first = padded.cumsum(0) - padded
    experts = torch.repeat_interleave(torch.arange(E, device="cuda"), counts.long())
    real_rows = (torch.arange(num_rows, device="cuda") - (offsets - counts)[experts] + first[experts]).long()
    capacity = int(padded.sum())
    randn = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=generator)

    def poisoned(*shape):
        return torch.full(shape, -1, device="cuda", dtype=torch.int16).view(torch.bfloat16)

    def spread(compact):  # padding stays 0xFF = NaN
        full = poisoned(capacity, compact.shape[1])
        full[real_rows] = compact
        return full

    def samples_of(count=8):
        picks = torch.randperm(num_rows, generator=torch.Generator().manual_seed(args.seed))[:count].tolist()
        return picks + [0, num_rows - 1]

    results = []
    mm = torch._grouped_mm
    for product in args.products:
        n, k = (H, I) if product == "down" else (I, H)
        scale = k**-0.5 if product == "fc1" else 1.0
        x, w = randn(num_rows, k), randn(E, n, k) * scale
        w_up = randn(E, n, k) * scale if product == "fc1" else None
        weight = torch.rand(capacity, device="cuda", generator=generator) if product == "fc1" else None
        full, out = spread(x), poisoned(capacity, n)
        flops = 2.0 * num_rows * n * k * (2 if product == "fc1" else 1)
        if product == "fc1":
            torch_run = lambda: (mm(x, w.transpose(1, 2), offs=offsets), mm(x, w_up.transpose(1, 2), offs=offsets))
        else:
            torch_run = lambda: mm(x, w.transpose(1, 2), offs=offsets)

        reference_rows = []
        for i in samples_of():
            e, row = int(experts[i]), int(real_rows[i])
            wanted = w[e].double() @ x[i].double()
            if product == "fc1":
                wanted = wanted * torch.sigmoid(wanted) * (w_up[e].double() @ x[i].double()) * weight[row].double()
            reference_rows.append((row, wanted))
        torch_out = None if product == "fc1" else torch_run()

        contenders = {"torch": torch_run}
        for label, library in libraries:
            for cluster in args.clusters:
                for band in args.bands:
                    ours = Ours(library, a=full, b=w, b_up=w_up, row_weight=weight, out=out, counts=counts,
                                cluster_size=cluster, band_blocks=band)
                    out.view(torch.int16).fill_(-1)
                    ours()
                    torch.cuda.synchronize()
                    variant = f"{label}c{cluster}b{band}"
                    check(f"{name} {product} {variant}", out, torch_out, real_rows, reference_rows)
                    contenders[variant] = ours
        del torch_out
        samples = measure(contenders, clock, args.rounds, args.modes)
        for variant in contenders:
            if variant != "torch":
                results += rows_of(name, product, flops, samples, variant,
                                   {**common, "rows": num_rows, "padded_rows": capacity, "n_columns": n, "k": k, "experts": E})
        del x, w, w_up, full, out, contenders, torch_run
        torch.cuda.empty_cache()
    return results


def run_record(args):
    """What every result file says of its run: commit, argv, machine, seed."""
    commit = args.commit
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = git.stdout.strip() if git.returncode == 0 else None
    machine = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(),
               "sms": torch.cuda.get_device_properties(0).multi_processor_count,
               "torch": torch.__version__, "cuda": torch.version.cuda, "cpu": platform.machine()}
    return {"commit": commit, "argv": sys.argv, "machine": machine, "seed": args.seed}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", required=True, nargs="+", help="path, or label=path for several")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--products", nargs="+", default=["gate", "down", "fc1"], choices=["gate", "down", "fc1"])
    parser.add_argument("--clusters", nargs="+", type=int, default=[2])
    parser.add_argument("--bands", nargs="+", type=int, default=[0])
    parser.add_argument("--modes", nargs="+", default=["burst", "sustained"], choices=["burst", "sustained"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default=None, help="if not given: git rev-parse HEAD")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: nothing was measured")
    libraries = []
    for item in args.library:
        label, _, path = item.rpartition("=")
        libraries.append((label and label + "-", ctypes.CDLL(path)))
    common = run_record(args)
    results = []
    for name in args.shapes:
        results += bench_shape(name, libraries, args, common)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
