"""The layer on GPUs through DLPack: PyTorch tensors in, a reference in plain FP64 torch beside it. Skips without a GPU,
without PyTorch, or where the package was built without CUDA; run by hand: pytest tests/python/test_cuda.py"""

import numpy as np
import pytest

import moxie

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not moxie.has_cuda or not torch.cuda.is_available(), reason="no GPU, or a package without CUDA"
)

H, WIDTH, K, EXPERTS, MAX_TOKENS = 256, 192, 2, 6, 160


def make_layer(*, ranks, **world):
    problem = moxie.Problem(
        num_ranks=ranks,
        max_tokens=MAX_TOKENS,
        hidden=H,
        intermediate=WIDTH,
        num_experts=EXPERTS,
        top_k=K,
        dtype=moxie.DType.bf16,
    )
    return moxie.Layer(moxie.World.cuda(num_ranks=ranks, devices=[0] * ranks, timeout_s=20.0, **world), problem)


def make_inputs(layer, tokens, seed):
    """Random inputs on the GPU; some routes are -1."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def bf16(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, device="cuda") * scale).bfloat16()

    problem = layer.problem
    weights = []
    for rank in range(problem.num_ranks):
        n = len(problem.experts_of(rank))
        weights.append(
            moxie.Weights(
                gate=bf16(n, WIDTH, H, scale=H**-0.5),
                up=bf16(n, WIDTH, H, scale=H**-0.5),
                down=bf16(n, H, WIDTH, scale=WIDTH**-0.5),
            )
        )
    return {
        "x": [bf16(t, H) for t in tokens],
        "expert_ids": [torch.randint(-1, EXPERTS, (t, K), generator=g, device="cuda") for t in tokens],
        "route_weights": [torch.rand(t, K, generator=g, device="cuda") for t in tokens],
        "weights": weights,
    }


def reference(layer, inputs):
    problem = layer.problem
    experts = [
        (w.gate[i].double(), w.up[i].double(), w.down[i].double())
        for rank, w in enumerate(inputs["weights"])
        for i in range(len(problem.experts_of(rank)))
    ]
    results = []
    for x, ids, route_weights in zip(inputs["x"], inputs["expert_ids"], inputs["route_weights"], strict=True):
        y = torch.zeros_like(x, dtype=torch.float64)
        for k in range(K):
            for e, (gate, up, down) in enumerate(experts):
                chosen = ids[:, k] == e
                rows = x[chosen].double()
                hidden = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
                y[chosen] += route_weights[chosen, k, None].double() * (hidden @ down.T)
        results.append(y)
    return results


def outputs(inputs):
    return [torch.full_like(x, float("nan")) for x in inputs["x"]]


def assert_close(layer, inputs, y):
    for want, got in zip(reference(layer, inputs), y, strict=True):
        if want.numel() == 0:
            continue
        assert ((got.double() - want).norm() / want.norm()).item() < 5e-3


@pytest.mark.parametrize("tokens", [(160,), (37, 160), (0, 5, 64)])
def test_equals_the_reference(tokens, seed):
    layer = make_layer(ranks=len(tokens))
    inputs = make_inputs(layer, tokens, seed)
    y = outputs(inputs)
    layer.infer(**inputs, out=y)
    layer.world.synchronize()
    assert_close(layer, inputs, y)
    again = outputs(inputs)
    layer.infer(**inputs, out=again)
    layer.world.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(y, again, strict=True))


def test_passes_follow_the_current_stream(seed):
    layer = make_layer(ranks=2)
    inputs = make_inputs(layer, (64, 64), seed)
    y = outputs(inputs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    layer.world.set_stream(side.cuda_stream)
    with torch.cuda.stream(side):
        doubled = {**inputs, "x": [x * 2 for x in inputs["x"]]}  # made in the stream that the pass is put into
        layer.infer(**doubled, out=y)
        copies = [t.clone() for t in y]
    side.synchronize()
    layer.world.synchronize()
    assert_close(layer, doubled, copies)


def test_input_buffer_is_not_copied(seed):
    layer = make_layer(ranks=2)
    inputs = make_inputs(layer, (33, 160), seed)
    x = []
    for rank, values in enumerate(inputs["x"]):
        buffer = torch.from_dlpack(layer.input_buffer(rank)).view(torch.bfloat16)
        assert buffer.shape == (MAX_TOKENS, H) and buffer.is_cuda
        x.append(buffer[: values.shape[0]])
        x[rank].copy_(values)
    torch.cuda.synchronize()
    inputs["x"] = x
    y = outputs(inputs)
    layer.infer(**inputs, out=y)
    layer.world.synchronize()
    assert_close(layer, inputs, y)


def test_a_captured_pass_reads_new_inputs(seed):
    layer = make_layer(ranks=1)
    inputs = make_inputs(layer, (96,), seed)
    y = outputs(inputs)
    stream = torch.cuda.Stream()
    layer.world.set_stream(stream.cuda_stream)
    torch.cuda.synchronize()
    layer.infer(**inputs, out=y)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        layer.infer(**inputs, out=y)
    fresh = make_inputs(layer, (96,), seed + 1)
    for name in ("x", "expert_ids", "route_weights"):
        inputs[name][0].copy_(fresh[name][0])
    torch.cuda.synchronize()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_close(layer, inputs, y)


def test_refuses_what_it_cannot_take(seed):
    layer = make_layer(ranks=1)
    inputs = make_inputs(layer, (8,), seed)
    y = outputs(inputs)

    def refused(words, **changes):
        with pytest.raises(moxie.Error) as error:
            layer.infer(**{**inputs, "out": y, **changes})
        assert words in str(error.value), str(error.value)

    refused("x of rank 0 is in CPU memory", x=[inputs["x"][0].cpu()])
    refused("x of rank 0 is [8, 256] float32", x=[inputs["x"][0].float()])
    refused("must be C-contiguous", x=[torch.empty(H, 8, device="cuda", dtype=torch.bfloat16).T])
    refused("is in CPU memory", out=[np.empty((8, H), np.uint16)])
    refused("out", out=None)
    _, context = layer.forward(**inputs, out=y)
    layer.world.synchronize()
    with pytest.raises(moxie.Error):
        layer.backward(context, x=inputs["x"], dy=y, weights=inputs["weights"])
    layer.infer(**inputs, out=y)
    layer.world.synchronize()
    assert_close(layer, inputs, y)
    layer.world.close()
    refused("World")
