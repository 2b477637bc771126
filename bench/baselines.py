"""The baselines beside which `moxie bench layer` times a layer, as a worker process that it starts.

    python3 bench/baselines.py gemm_only | nccl_torch

Reads one JSON object per line from standard input and answers each with one on standard output:
{"cmd": "setup", ...} builds a layer's tensors from the same routes; {"cmd": "measure", "mode": "burst" | "sustained"}
answers {"ms", "sm_clock_mhz"}. Ends with its input.

gemm_only: torch._grouped_mm on the rows that each rank receives, on its GPU, all ranks at once; nothing else, no SwiGLU.
Forward: three (gate, up, down). Backward: six (dA', both halves of dX, and the three weight gradients, grouped along
K, into BF16). The slowest GPU counts, as for the layer: GPUs of one kind differ by a few percent.
nccl_torch: the whole layer as people write it with torch.distributed, one process per rank: sort by expert,
all_to_all of counts and rows, grouped products with silu(gate) * up, all_to_all back, weighted sum. Backward: that layer's
backward by autograd alone, BF16 gradients, from the tensors of one forward pass. The slowest rank counts. Two tokens per rank are
checked against FP64 before anything is timed. "memory_bytes" of its setup: the most that PyTorch has allocated during a
pass (backward: and its forward), less operands and results.

burst: 120 ms idle, one warm-up, about 24 ms of passes. sustained: 170 ms of the same load before the same window.
The SM clock comes from NVML, sampled while the window runs."""
import base64
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time

IDLE_S, WINDOW_MS, LOAD_MS = 0.12, 24, 170


class Refusal(Exception):
    """A sentence for the one who asked."""


class SmClock:
    """SM clock of one GPU through NVML; None where NVML is not there."""

    def __init__(self, pci_bus_id):
        self.handle = ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            found = self.nvml.nvmlInit_v2() == 0 and self.nvml.nvmlDeviceGetHandleByPciBusId_v2(
                pci_bus_id.encode(), ctypes.byref(self.handle)) == 0
        except (OSError, AttributeError):
            found = False
        if not found:
            self.nvml = None

    def mhz(self):
        value = ctypes.c_uint()
        if self.nvml is None or self.nvml.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(value)) != 0:
            return None
        return float(value.value)


def synchronize(devices):
    for device in devices:
        torch.cuda.synchronize(device)


def window(launch, num_passes, clocks):
    """Milliseconds per pass between events and the mean SM clock while it works, of the slowest GPU of `clocks`."""
    spans = {}  # device -> its two events
    for device in clocks:
        with torch.cuda.device(device):
            spans[device] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            spans[device][0].record()
    for _ in range(num_passes):
        launch()
    for device, (_, end) in spans.items():
        with torch.cuda.device(device):
            end.record()
    samples = {device: [] for device in clocks}
    while not all(end.query() for _, end in spans.values()):
        for device, clock in clocks.items():
            samples[device].append(clock.mhz())
        time.sleep(0.001)
    synchronize(clocks)
    slowest = max(spans, key=lambda device: spans[device][0].elapsed_time(spans[device][1]))
    mhz = [value for value in samples[slowest] if value is not None]
    return spans[slowest][0].elapsed_time(spans[slowest][1]) / num_passes, sum(mhz) / len(mhz) if mhz else None


def measure(launch, clocks, *, mode, estimate_ms, meet=lambda: None):
    """`meet` brings the ranks together before the clock runs."""
    meet()
    synchronize(clocks)
    time.sleep(IDLE_S)
    for _ in range(1 if mode == "burst" else max(2, round(LOAD_MS / estimate_ms))):
        launch()
    return window(launch, max(2, round(WINDOW_MS / estimate_ms)), clocks)


def decode_ids(spec, rank, device):
    """[T, K] i64"""
    stored = {"i32": torch.int32, "i64": torch.int64}[spec["ids"]]
    ids = torch.frombuffer(bytearray(base64.b64decode(spec["expert_ids"][rank])), dtype=stored)
    return ids.view(-1, spec["top_k"]).to(device, torch.int64)


class GroupedProducts:
    """gemm_only: the products of one rank."""

    def __init__(self, spec, rank):
        self.device = device = torch.device("cuda", spec["devices"][rank])
        # Experts in contiguous parts, the first ranks one more where they do not divide.
        few, extra = divmod(spec["num_experts"], len(spec["tokens"]))
        first, num_local = rank * few + min(rank, extra), few + (rank < extra)
        counts = torch.tensor(spec["rows_per_expert"][first : first + num_local], device=device)
        rows, H, I = int(counts.sum()), spec["hidden"], spec["intermediate"]
        generator = torch.Generator(device=device).manual_seed(spec["seed"])
        randn = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)
        self.offsets = counts.cumsum(0).to(torch.int32)
        self.x, self.hidden = randn(rows, H), randn(rows, I)
        gate, up = (randn(num_local, I, H).mul_(H**-0.5) for _ in range(2))
        down = randn(num_local, H, I).mul_(I**-0.5)
        if spec["direction"] == "forward":
            self.products = [(self.x, gate.transpose(1, 2)), (self.x, up.transpose(1, 2)), (self.hidden, down.transpose(1, 2))]
        else:
            dy, dgate, dup = randn(rows, H), randn(rows, I), randn(rows, I)
            self.products = [(dy, down), (dgate, gate), (dup, up),
                             (dgate.t(), self.x), (dup.t(), self.x), (dy.t(), self.hidden)]

    def __call__(self):
        with torch.cuda.device(self.device):
            for a, b in self.products:
                torch._grouped_mm(a, b, offs=self.offsets)


def define_functions():
    """Moves of rows whose backward is a move, too: autograd's own adds rows up one by one."""
    global AllToAll, Permute, PermuteBack, SpreadTokens

    class AllToAll(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, receive, send):
            ctx.sizes = receive, send
            received = rows.new_empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(received, rows, receive, send)
            return received

        @staticmethod
        def backward(ctx, grad):
            receive, send = ctx.sizes
            returned = grad.new_empty(sum(send), grad.shape[1])
            dist.all_to_all_single(returned, grad.contiguous(), send, receive)
            return returned, None, None

    class Permute(torch.autograd.Function):
        """Row i comes from row order[i]."""

        @staticmethod
        def forward(ctx, rows, order):
            ctx.save_for_backward(order)
            return rows.index_select(0, order)

        @staticmethod
        def backward(ctx, grad):
            (order,) = ctx.saved_tensors
            return torch.empty_like(grad).index_copy_(0, order, grad), None

    class PermuteBack(torch.autograd.Function):
        """Row i goes to row order[i]."""

        @staticmethod
        def forward(ctx, rows, order):
            ctx.save_for_backward(order)
            return torch.empty_like(rows).index_copy_(0, order, rows)

        @staticmethod
        def backward(ctx, grad):
            (order,) = ctx.saved_tensors
            return grad.index_select(0, order), None

    class SpreadTokens(torch.autograd.Function):
        """Row i is the token of route order[i]; a token has top_k routes."""

        @staticmethod
        def forward(ctx, tokens, order, top_k):
            ctx.save_for_backward(order)
            ctx.top_k = top_k
            return tokens.index_select(0, order // top_k)

        @staticmethod
        def backward(ctx, grad):
            (order,) = ctx.saved_tensors
            by_route = torch.empty_like(grad).index_copy_(0, order, grad)
            return by_route.view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None


class ExpertParallelLayer:
    """nccl_torch: one rank's part of the layer. Calling it runs the direction that is timed."""

    def __init__(self, spec, rank):
        self.backward = spec["direction"] == "backward"
        self.rank, self.num_ranks = rank, len(spec["tokens"])
        self.device = torch.device("cuda", spec["devices"][rank])
        self.H, self.I, self.E, self.seed = spec["hidden"], spec["intermediate"], spec["num_experts"], spec["seed"]
        self.L = self.E // self.num_ranks
        self.ids = decode_ids(spec, rank, self.device)  # [T, K]
        self.T, self.K = self.ids.shape
        generator = torch.Generator(device=self.device).manual_seed(self.seed * 1_000_003 + self.E + rank)
        self.x = torch.randn(self.T, self.H, device=self.device, dtype=torch.bfloat16, generator=generator)
        weights = 0.1 + 0.9 * torch.rand(self.T, self.K, device=self.device, generator=generator)
        self.route_weights = weights / weights.sum(1, keepdim=True)  # [T, K] f32
        mine = [self.expert(rank * self.L + e) for e in range(self.L)]
        self.gate, self.up, self.down = (torch.stack(part) for part in zip(*mine))  # [L, I, H] twice, [L, H, I]
        self.operands = [self.x, self.route_weights, self.gate, self.up, self.down]
        if self.backward:
            self.dy = torch.randn(self.T, self.H, device=self.device, dtype=torch.bfloat16, generator=generator)
            for operand in self.operands:
                operand.requires_grad_()
            self.y = None

    def expert(self, e):
        """gate [I, H], up [I, H], down [H, I] of expert e: the same on every rank."""
        generator = torch.Generator(device=self.device).manual_seed(self.seed * 1_000_003 + e)
        randn = lambda *shape: torch.randn(*shape, device=self.device, dtype=torch.bfloat16, generator=generator)
        return (randn(self.I, self.H).mul_(self.H**-0.5), randn(self.I, self.H).mul_(self.H**-0.5),
                randn(self.H, self.I).mul_(self.I**-0.5))

    def __call__(self):
        if not self.backward:
            return self.forward()
        if self.y is None:
            self.y = self.forward()
        return torch.autograd.grad(self.y, self.operands, self.dy, retain_graph=True)

    def forward(self):
        # Dispatch: own routes by expert; every rank learns how many rows of each expert come from whom.
        ids = self.ids.flatten()
        order = torch.argsort(ids, stable=True)
        sent = torch.zeros(self.E, dtype=torch.int64, device=self.device).scatter_add_(0, ids, torch.ones_like(ids))
        received = torch.empty_like(sent)  # [source, local expert]
        dist.all_to_all_single(received, sent)
        received = received.view(self.num_ranks, self.L)
        # The one moment the host must know: NCCL wants the sizes.
        send_rows, receive_rows = torch.stack((sent.view(self.num_ranks, self.L).sum(1), received.sum(1))).tolist()
        outgoing = SpreadTokens.apply(self.x, order, self.K)
        incoming = AllToAll.apply(outgoing, receive_rows, send_rows)
        # Experts: rows came by source, the products want them by expert.
        expert = torch.arange(self.L, device=self.device).repeat(self.num_ranks)
        expert = expert.repeat_interleave(received.flatten(), output_size=incoming.shape[0])
        by_expert = torch.argsort(expert, stable=True)
        offsets = received.sum(0).cumsum(0).to(torch.int32)
        rows = Permute.apply(incoming, by_expert)
        gate = torch._grouped_mm(rows, self.gate.transpose(1, 2), offs=offsets)
        up = torch._grouped_mm(rows, self.up.transpose(1, 2), offs=offsets)
        hidden = torch.nn.functional.silu(gate)
        hidden = hidden * up if self.backward else hidden.mul_(up)
        results = torch._grouped_mm(hidden, self.down.transpose(1, 2), offs=offsets)
        # Combine: back into the order they came in, home, back into token order, weighted sum.
        by_source = PermuteBack.apply(results, by_expert)
        returned = AllToAll.apply(by_source, send_rows, receive_rows)
        slots = PermuteBack.apply(returned, order).view(self.T, self.K, self.H)
        return (slots * self.route_weights.to(slots.dtype).unsqueeze(-1)).sum(1)

    def memory_bytes(self):
        """What one pass needs at most, beside operands and results."""
        self.y = None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        y = self.forward()
        results = [y, *torch.autograd.grad(y, self.operands, self.dy)] if self.backward else [y]
        peak = torch.cuda.max_memory_allocated(self.device)
        return peak - before - sum(result.numel() * result.element_size() for result in results)

    def max_relative_error(self):
        y, worst = self.forward(), 0.0
        dx, dw = torch.autograd.grad(y, self.operands, self.dy)[:2] if self.backward else (None, None)
        distance = lambda got, wanted: float((got.double() - wanted).norm() / wanted.norm())
        for t in sorted({0, self.T - 1}) if self.T else []:
            with torch.set_grad_enabled(self.backward):
                x, weights = (part[t].detach().double().requires_grad_(self.backward) for part in (self.x, self.route_weights))
                outputs = []
                for e in self.ids[t].tolist():
                    gate, up, down = (part.double() for part in self.expert(e))
                    g = gate @ x
                    outputs.append(down @ (g * torch.sigmoid(g) * (up @ x)))
                wanted = weights @ torch.stack(outputs)
                worst = max(worst, distance(y[t].detach(), wanted.detach()))
                if self.backward:
                    wanted_dx, wanted_dw = torch.autograd.grad(wanted, (x, weights), self.dy[t].double())
                    # Sums of signed terms, which may be near zero: by their usual size.
                    size = (self.dy[t].double() * torch.stack(outputs).detach()).norm()
                    worst = max(worst, distance(dx[t], wanted_dx), float((dw[t].double() - wanted_dw).norm() / size))
        return worst


def rank_main(rank, num_ranks, device, port, pipe):
    """One rank of nccl_torch: does what comes through the pipe, together with the others."""
    import_torch()
    define_functions()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks,
                            device_id=torch.device("cuda", device))
    layer = clocks = estimate_ms = None
    while True:
        try:
            spec = pipe.recv()
        except EOFError:
            return
        try:
            if spec["cmd"] == "setup":
                layer = None
                torch.cuda.empty_cache()
                layer, clocks = ExpertParallelLayer(spec, rank), {device: SmClock(spec["pci_bus_ids"][rank])}
                error, num_bytes = layer.max_relative_error(), layer.memory_bytes()
                layer()
                estimate = torch.tensor(window(layer, 3, clocks)[0], device=layer.device)
                dist.all_reduce(estimate, op=dist.ReduceOp.MAX)  # the same number of passes everywhere
                estimate_ms = estimate.item()
                pipe.send({"max_rel_l2": error, "memory_bytes": num_bytes})
            else:
                ms, mhz = measure(layer, clocks, mode=spec["mode"], estimate_ms=estimate_ms, meet=dist.barrier)
                pipe.send({"ms": ms, "sm_clock_mhz": mhz})
        except Exception as error:
            pipe.send({"error": f"rank {rank}: {first_line(error)}"})


class NcclTorch:
    """Starts the ranks and asks them all; the first error is the answer."""

    def __init__(self):
        self.devices, self.ranks, self.pipes = None, [], []

    def setup(self, spec):
        devices = spec["devices"]
        if len(set(devices)) < len(devices):
            raise Refusal("NCCL takes one rank per GPU, and here are virtual ranks")
        if spec["num_experts"] % len(devices) != 0:
            raise Refusal(f"all_to_all of counts needs experts that divide by the ranks; {spec['num_experts']} do not by {len(devices)}")
        if self.devices != devices:
            self.stop()
            self.start(devices)
        answers = self.ask(spec)
        error = max(answer["max_rel_l2"] for answer in answers)
        if not error <= 2e-2:  # rows and the weighted sum are rounded to BF16 more often than in the layer
            raise Refusal(f"its result is off by {error:.2e}")
        return {"max_rel_l2": error, "memory_bytes": max(answer["memory_bytes"] for answer in answers)}

    def measure(self, spec):
        return max(self.ask(spec), key=lambda answer: answer["ms"])

    def start(self, devices):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        for rank, device in enumerate(devices):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=rank_main, args=(rank, len(devices), device, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(mine)
        self.devices = devices

    def stop(self):
        for process in self.ranks:
            process.kill()
        self.devices, self.ranks, self.pipes = None, [], []

    def ask(self, spec):
        try:
            return self.ask_all(spec)
        except Exception:
            self.stop()  # the other ranks wait in a collective; the next setup starts new ones
            raise

    def ask_all(self, spec):
        for pipe in self.pipes:
            pipe.send(spec)
        answers = {}
        while len(answers) < len(self.pipes):
            for pipe in multiprocessing.connection.wait([p for p in self.pipes if p not in answers]):
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    raise Refusal("a rank ended")
                if "error" in answers[pipe]:
                    raise Refusal(answers[pipe]["error"])
        return [answers[pipe] for pipe in self.pipes]


class GemmOnly:
    def __init__(self):
        self.ranks = []

    def setup(self, spec):
        self.ranks = []
        torch.cuda.empty_cache()
        self.ranks = [GroupedProducts(spec, rank) for rank in range(len(spec["tokens"]))]
        self.clocks = {device: SmClock(bus) for device, bus in zip(spec["devices"], spec["pci_bus_ids"])}
        synchronize(self.clocks)
        self.launch()
        self.estimate_ms = window(self.launch, 3, self.clocks)[0]
        return {"rows": [products.x.shape[0] for products in self.ranks]}

    def launch(self):
        for products in self.ranks:
            products()

    def measure(self, spec):
        ms, mhz = measure(self.launch, self.clocks, mode=spec["mode"], estimate_ms=self.estimate_ms)
        return {"ms": ms, "sm_clock_mhz": mhz}


def first_line(error):
    return (str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {error}").splitlines()[0]


def import_torch():
    global torch, dist
    import torch
    import torch.distributed as dist


def versions():
    found = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "nccl": None}
    if torch.version.cuda and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main():
    # Only answers go to the real standard output; whatever else prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message):
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    workers = {"gemm_only": GemmOnly, "nccl_torch": NcclTorch}
    if len(sys.argv) != 2 or sys.argv[1] not in workers:
        sys.exit(f"usage: python3 bench/baselines.py {' | '.join(workers)} (`moxie bench layer` starts it)")
    try:
        import_torch()
    except ImportError as error:
        return answer({"error": f"python3 has no PyTorch ({error})"})
    if not torch.cuda.is_available():
        return answer({"error": f"PyTorch {torch.__version__} finds no GPU"})
    answer(versions())
    worker = workers[sys.argv[1]]()
    for line in sys.stdin:
        try:
            command = json.loads(line)
            with torch.no_grad():
                answer(worker.setup(command) if command["cmd"] == "setup" else worker.measure(command))
        except Exception as error:
            answer({"error": first_line(error)})


if __name__ == "__main__":
    main()
