"""Grouped GEMM against torch._grouped_mm on five layer shapes, in one run, interleaved.

    python3 bench/bench_grouped_gemm.py --library build/libbench_grouped_gemm.so --json out.json

Needs PyTorch and one Hopper GPU. Rows are routed at random, hence uneven; real FLOPs are counted, not padding.
Each product is checked against FP64 rows and against torch before it is timed. burst: 120 ms idle, one warm-up,
~24 ms of launches. sustained: the same window after a further 170 ms of the same load. Medians over the rounds; a ratio
above 1 means faster than torch. `fc1` is gate, up, SwiGLU and row weight in one kernel; torch's time beside it
is the two products alone, without the elementwise kernel.

Backward: `dgrad` (dA' and SwiGLU backward in one kernel; torch: the product alone, with --elementwise the compiled
elementwise kernel too), `dx` (dgate Wg + dup Wu; torch: two products, not added), `wgrad-down`, `wgrad-gate` (BF16),
`wgrad-gate-add` (added into FP32; torch: product and add_) and `wgrads` (gate, up and down in one launch; torch: three)."""
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


class Backward(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("product", "output", "cluster_size", "band_blocks", "num_experts")] + [
        ("rows_capacity", ctypes.c_longlong)] + [(name, ctypes.c_int) for name in ("hidden", "intermediate", "m", "n")] + [
        ("expert_rows", ctypes.c_void_p), ("inputs", ctypes.c_void_p * 5), ("outputs", ctypes.c_void_p * 4)]


class OursBackward:
    """One backward product of the library, ready to launch."""
    DGRAD, DX, WGRAD, WGRADS = range(4)
    BF16, F32, ADD_F32 = range(3)

    def __init__(self, library, product, rows, inputs, outputs, *, output=BF16, m=0, n=0, cluster_size=2, band_blocks=0):
        self.library, self.keep = library, (inputs, outputs, rows)
        pointers = lambda tensors, count: (ctypes.c_void_p * count)(*[t.data_ptr() for t in tensors])
        self.product = Backward(product, output, cluster_size, band_blocks, rows.num_experts, rows.capacity, rows.hidden,
                                rows.intermediate, m, n, rows.counts.data_ptr(), pointers(inputs, 5), pointers(outputs, 4))
        self.message = ctypes.create_string_buffer(256)

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.moxie_bench_launch_backward(ctypes.byref(self.product), stream, self.message):
            raise RuntimeError(self.message.value.decode())


class Rows:
    """The rows of one rank, routed at random: compact for torch, each expert on a block of 128 for us."""

    def __init__(self, shape, seed):
        self.hidden, self.intermediate, E, K, T = SHAPES[shape]
        self.num_experts, self.seed = E, seed
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        idx = torch.rand(2 * T, 2 * E, device="cuda", generator=self.generator).topk(K, 1).indices.flatten()
        self.counts = torch.bincount(idx[idx < E], minlength=E)[:E].to(torch.int32)
        self.offsets = self.counts.cumsum(0).to(torch.int32)
        self.num_rows = int(self.counts.sum())
        padded = (self.counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        first = padded.cumsum(0) - padded
        self.experts = torch.repeat_interleave(torch.arange(E, device="cuda"), self.counts.long())
        self.real = (torch.arange(self.num_rows, device="cuda") - (self.offsets - self.counts)[self.experts] +
                     first[self.experts]).long()
        self.capacity = int(padded.sum())

    def randn(self, *shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=self.generator)

    def poisoned(self, *shape):
        return torch.full(shape, -1, device="cuda", dtype=torch.int16).view(torch.bfloat16)

    def spread(self, compact):  # padding stays 0xFF = NaN
        full = self.poisoned(self.capacity, compact.shape[1])
        full[self.real] = compact
        return full

    def samples(self, count=8):
        picks = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.seed))[:count].tolist()
        return picks + [0, self.num_rows - 1]


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
    for baseline, mode in [(b, mode) for b in samples if b.startswith("torch") for mode in samples[b]]:
        ours = [ms for ms, _ in samples[variant][mode]]
        base = [ms for ms, _ in samples[baseline][mode]]
        ms, torch_ms = statistics.median(ours), statistics.median(base)
        result.append({"shape": shape, "product": product, "variant": variant, "baseline": baseline, "mode": mode, "ours_ms": ms, "torch_ms": torch_ms,
                       "ratio": torch_ms / ms, "tflops": flops / ms / 1e9, "torch_tflops": flops / torch_ms / 1e9,
                       "p10": quantile(ours, 0.1), "p90": quantile(ours, 0.9), "torch_p10": quantile(base, 0.1),
                       "torch_p90": quantile(base, 0.9), "n": len(ours),
                       "mhz": statistics.median(f for _, f in samples[variant][mode]),
                       "torch_mhz": statistics.median(f for _, f in samples[baseline][mode]),
                       "samples": ours, "torch_samples": base, **common})
        r = result[-1]
        print(f"{shape:13s} {product:14s} {variant:12s} {mode:9s} ours {ms:7.3f} ms {r['tflops']:4.0f} TF {r['mhz']:5.0f} MHz   "
              f"{baseline} {torch_ms:7.3f} ms {r['torch_tflops']:4.0f} TF {r['torch_mhz']:5.0f} MHz   ratio {r['ratio']:.3f}", flush=True)
    return result


FORWARD = ["gate", "down", "fc1"]
BACKWARD = ["dgrad", "dx", "wgrad-down", "wgrad-gate", "wgrad-gate-add", "wgrads"]


def bench_shape(name, libraries, args, common):
    clock = Clock(libraries[0][1])
    rows = Rows(name, args.seed)
    results = []
    for product in args.products:
        run = forward_product if product in FORWARD else backward_product
        flops, torch_runs, make_ours, check_ours, facts = run(name, product, rows, args)
        contenders = dict(torch_runs)
        for label, library in libraries:
            for cluster in args.clusters:
                for band in args.bands:
                    variant = f"{label}c{cluster}b{band}"
                    ours = make_ours(library, cluster, band)
                    ours()
                    torch.cuda.synchronize()
                    if not args.unchecked:
                        check_ours(f"{name} {product} {variant}")
                    contenders[variant] = ours
        samples = measure(contenders, clock, args.rounds, args.modes)
        for variant in contenders:
            if variant not in torch_runs:
                results += rows_of(name, product, flops, samples, variant,
                                   {**common, "rows": rows.num_rows, "padded_rows": rows.capacity, **facts,
                                    "experts": rows.num_experts})
        del contenders, torch_runs, make_ours, check_ours, ours
        torch.cuda.empty_cache()
    return results


def forward_product(name, product, rows, args):
    """(FLOPs, torch's launches, ours(library, cluster, band), check(name), facts for the result)"""
    E, mm = rows.num_experts, torch._grouped_mm
    n, k = (rows.hidden, rows.intermediate) if product == "down" else (rows.intermediate, rows.hidden)
    scale = k**-0.5 if product == "fc1" else 1.0
    x, w = rows.randn(rows.num_rows, k), rows.randn(E, n, k) * scale
    w_up = rows.randn(E, n, k) * scale if product == "fc1" else None
    weight = torch.rand(rows.capacity, device="cuda", generator=rows.generator) if product == "fc1" else None
    full, out = rows.spread(x), rows.poisoned(rows.capacity, n)
    flops = 2.0 * rows.num_rows * n * k * (2 if product == "fc1" else 1)
    if product == "fc1":
        torch_run = lambda: (mm(x, w.transpose(1, 2), offs=rows.offsets), mm(x, w_up.transpose(1, 2), offs=rows.offsets))
    else:
        torch_run = lambda: mm(x, w.transpose(1, 2), offs=rows.offsets)

    reference_rows = []
    for i in rows.samples():
        e, row = int(rows.experts[i]), int(rows.real[i])
        wanted = w[e].double() @ x[i].double()
        if product == "fc1":
            wanted = wanted * torch.sigmoid(wanted) * (w_up[e].double() @ x[i].double()) * weight[row].double()
        reference_rows.append((row, wanted))

    def make_ours(library, cluster, band):
        out.view(torch.int16).fill_(-1)
        return Ours(library, a=full, b=w, b_up=w_up, row_weight=weight, out=out, counts=rows.counts, cluster_size=cluster,
                    band_blocks=band)

    def check_ours(title):
        check(title, out, None if product == "fc1" else torch_run(), rows.real, reference_rows)

    return flops, {"torch": torch_run}, make_ours, check_ours, {"n_columns": n, "k": k}


def backward_product(name, product, rows, args):
    """The same for the backward."""
    E, H, I, mm = rows.num_experts, rows.hidden, rows.intermediate, torch._grouped_mm
    if product == "dgrad":
        return dgrad_product(rows, args)
    if product == "dx":
        dgate, dup = rows.randn(rows.num_rows, I), rows.randn(rows.num_rows, I)
        gate, up = rows.randn(E, I, H), rows.randn(E, I, H)
        inputs, out = [rows.spread(dgate), rows.spread(dup), gate, up], rows.poisoned(rows.capacity, H)
        torch_run = lambda: (mm(dgate, gate, offs=rows.offsets), mm(dup, up, offs=rows.offsets))
        reference_rows = [(int(rows.real[i]), dgate[i].double() @ gate[rows.experts[i]].double() +
                           dup[i].double() @ up[rows.experts[i]].double()) for i in rows.samples()]

        def make_ours(library, cluster, band):
            out.view(torch.int16).fill_(-1)
            return OursBackward(library, OursBackward.DX, rows, inputs, [out], cluster_size=cluster, band_blocks=band)

        return (4.0 * rows.num_rows * H * I, {"torch": torch_run}, make_ours,
                lambda title: check(title, out, None, rows.real, reference_rows), {"n_columns": H, "k": 2 * I})

    if product == "wgrads":
        return wgrads_product(rows, args)
    m, n = (H, I) if product == "wgrad-down" else (I, H)
    adds = product.endswith("add")
    left, right = rows.randn(rows.num_rows, m), rows.randn(rows.num_rows, n)
    inputs = [rows.spread(left), rows.spread(right)]
    torch_product = lambda: mm(left.t(), right, offs=rows.offsets)
    torch_run = torch_product
    out = rows.poisoned(E, m, n)
    if adds:
        out, main_grad = torch.zeros(E, m, n, device="cuda"), torch.zeros(E, m, n, device="cuda")
        torch_run = lambda: main_grad.add_(torch_product())

    def make_ours(library, cluster, band):
        out.zero_()
        return OursBackward(library, OursBackward.WGRAD, rows, inputs, [out], m=m, n=n, cluster_size=cluster, band_blocks=band,
                            output=OursBackward.ADD_F32 if adds else OursBackward.BF16)

    def check_ours(title):
        begin = (rows.offsets - rows.counts).tolist()
        picks = [(i * 7919 % E, i * 104729 % m) for i in range(8)] + [(0, 0), (E - 1, m - 1)]
        reference_rows = [(e * m + row, left[begin[e]:begin[e] + int(rows.counts[e]), row].double() @
                           right[begin[e]:begin[e] + int(rows.counts[e])].double()) for e, row in picks]
        check(title, out.view(E * m, n), torch_product().view(E * m, n), torch.arange(E * m, device="cuda"), reference_rows)

    return 2.0 * rows.num_rows * H * I, {"torch": torch_run}, make_ours, check_ours, {"n_columns": n, "m_rows": m}


def wgrads_product(rows, args):
    """Gate, up and down in one launch; torch: three."""
    E, H, I, mm = rows.num_experts, rows.hidden, rows.intermediate, torch._grouped_mm
    widths = {"dgate": I, "dup": I, "dy": H, "x": H, "wa": I}
    compact = {name: rows.randn(rows.num_rows, width) for name, width in widths.items()}
    inputs = [rows.spread(t) for t in compact.values()]
    pairs = [("dgate", "x"), ("dup", "x"), ("dy", "wa")]
    outputs = [rows.poisoned(E, widths[left], widths[right]) for left, right in pairs]
    torch_run = lambda: [mm(compact[left].t(), compact[right], offs=rows.offsets) for left, right in pairs]

    def make_ours(library, cluster, band):
        for out in outputs:
            out.view(torch.int16).fill_(-1)
        return OursBackward(library, OursBackward.WGRADS, rows, inputs, outputs, cluster_size=cluster, band_blocks=band)

    def check_ours(title):
        for (left, right), out, wanted in zip(pairs, outputs, torch_run()):
            lines = torch.arange(out.shape[0] * out.shape[1], device="cuda")
            check(f"{title} {left}", out.view(-1, out.shape[2]), wanted.view(-1, out.shape[2]), lines, [])

    return 6.0 * rows.num_rows * H * I, {"torch": torch_run}, make_ours, check_ours, {"n_columns": H, "m_rows": I}


def swiglu_backward(da, z, weight):
    gate, up = z.float().chunk(2, 1)
    s = torch.sigmoid(gate)
    glu, da = gate * s, da.float()
    value, weighted = glu * up, da * weight[:, None]
    d_gate = weighted * up * (s + glu * (1 - s))
    return (d_gate.to(torch.bfloat16), (weighted * glu).to(torch.bfloat16), (value * weight[:, None]).to(torch.bfloat16),
            (da * value).sum(1))


def dgrad_product(rows, args):
    E, H, I, mm = rows.num_experts, rows.hidden, rows.intermediate, torch._grouped_mm
    dy, down, z = rows.randn(rows.num_rows, H), rows.randn(E, H, I) * H**-0.5, rows.randn(rows.num_rows, 2 * I)
    weight = torch.rand(rows.num_rows, device="cuda", generator=rows.generator)
    full_weight = torch.full((rows.capacity,), float("nan"), device="cuda")
    full_weight[rows.real] = weight
    outputs = [rows.poisoned(rows.capacity, I) for _ in range(3)]
    partial = torch.full((rows.capacity, (I + 255) // 256), float("nan"), device="cuda")
    inputs = [rows.spread(dy), down, rows.spread(z), full_weight]
    torch_runs = {"torch": lambda: mm(dy, down, offs=rows.offsets)}
    if args.elementwise:
        elementwise = torch.compile(swiglu_backward)
        torch_runs["torch-elementwise"] = lambda: elementwise(mm(dy, down, offs=rows.offsets), z, weight)
    reference = []
    for i in rows.samples():
        da = dy[i].double() @ down[rows.experts[i]].double()
        gate, up = z[i].double().chunk(2)
        s, w = torch.sigmoid(gate), weight[i].double()
        reference.append((int(rows.real[i]), w * da * up * (s + gate * s * (1 - s)), w * da * gate * s, w * gate * s * up,
                          (da * gate * s * up).sum()))

    def make_ours(library, cluster, band):
        for out in outputs:
            out.view(torch.int16).fill_(-1)
        return OursBackward(library, OursBackward.DGRAD, rows, inputs, outputs + [partial], cluster_size=cluster,
                            band_blocks=band)

    def check_ours(title):
        for which, (out, what) in enumerate(zip(outputs, ("dgate", "dup", "wA"))):
            check(f"{title} {what}", out, None, rows.real, [(r[0], r[1 + which]) for r in reference])
        for row, _, _, _, wanted in reference:
            if not abs(float(partial[row].double().sum() - wanted)) <= 1e-2 * abs(float(wanted)) + 1e-1:
                raise SystemExit(f"{title}: weight gradient of row {row}: {float(partial[row].sum())} for {float(wanted)}")

    return 2.0 * rows.num_rows * H * I, torch_runs, make_ours, check_ours, {"n_columns": I, "k": H}


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
    parser.add_argument("--products", nargs="+", default=FORWARD, choices=FORWARD + BACKWARD)
    parser.add_argument("--unchecked", action="store_true", help="for ablations whose results are wrong on purpose")
    parser.add_argument("--elementwise", action="store_true", help="dgrad: also against torch's product and a compiled kernel")
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
