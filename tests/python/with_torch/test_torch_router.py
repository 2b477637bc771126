"""The included router against each token's scores by hand."""

import math

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch as mt  # noqa: E402

import moxie  # noqa: E402

H, E, K, T = 64, 8, 3, 40
KINDS = {
    "softmax": {},
    "softmax as it is": {"normalize": False, "bias": True},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "sigmoid in groups": {"score": "sigmoid", "correction": True, "num_groups": 4, "top_groups": 2, "scale": 2.5},
    "softmax of chosen": {"score": "softmax_of_chosen", "bias": True},
}


def by_hand(router, x):
    """ids and weights of one token, with Python numbers."""
    logits = [
        sum(a * b for a, b in zip(row, x, strict=True)) + (router.bias[e].item() if router.bias is not None else 0)
        for e, row in enumerate(router.weight.double().tolist())
    ]
    if router.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    correction = router.e_score_correction_bias
    rank = [s + (correction[e].item() if correction is not None else 0) for e, s in enumerate(scores)]
    size = E // router.num_groups
    groups = [sum(sorted(rank[g * size : (g + 1) * size])[-2:]) for g in range(router.num_groups)]
    open_groups = sorted(range(router.num_groups), key=lambda g: -groups[g])[: router.top_groups]
    ids = sorted((e for e in range(E) if e // size in open_groups), key=lambda e: -rank[e])[:K]
    if router.score == "softmax_of_chosen":
        weights = [math.exp(logits[e]) for e in ids]
    else:
        weights = [scores[e] for e in ids]
    if router.normalize or router.score == "softmax_of_chosen":
        weights = [w / sum(weights) for w in weights]
    return ids, [w * router.scale for w in weights]


@pytest.mark.parametrize("kind", KINDS)
def test_by_hand(kind, generator):
    router = mt.TopKRouter(H, E, K, **KINDS[kind])
    with torch.no_grad():
        router.weight.normal_(0, 0.2, generator=generator)
        for b in (router.bias, router.e_score_correction_bias):
            if b is not None:
                b.normal_(0, 0.3, generator=generator)
    x = torch.randn(2, T // 2, H, generator=generator)
    routing = router(x)
    assert routing.expert_ids.shape == (T, K) and routing.route_weights.dtype == torch.float32
    for t, row in enumerate(x.view(T, H).double().tolist()):
        ids, weights = by_hand(router, row)
        assert routing.expert_ids[t].tolist() == ids
        assert routing.route_weights[t].tolist() == pytest.approx(weights, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, generator):
    router = mt.TopKRouter(H, E, K, **KINDS[kind])
    ids = router(torch.randn(5, H, generator=generator)).expert_ids
    logits = torch.randn(5, E, generator=generator, dtype=torch.float64, requires_grad=True)

    def weights(logits):
        if router.score == "softmax_of_chosen":
            return logits.gather(1, ids).softmax(-1)
        scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
        chosen = scores.gather(1, ids)
        return chosen / chosen.sum(-1, keepdim=True) if router.normalize else chosen

    assert torch.autograd.gradcheck(weights, (logits,))
    x = torch.randn(T, H, generator=generator, requires_grad=True)
    router(x).route_weights.square().sum().backward()
    assert x.grad.abs().sum() > 0 and router.weight.grad.abs().sum() > 0


def test_balance(generator):
    even = mt.Routing(torch.arange(E).repeat(K).view(-1, K), torch.ones(E, K), torch.full((E, E), 1 / E))
    assert mt.load_balancing_loss(even).item() == pytest.approx(1.0)
    scores = torch.eye(E)[torch.zeros(T, dtype=torch.long)]
    one = mt.Routing(torch.zeros(T, K, dtype=torch.long), torch.ones(T, K), scores)
    assert mt.load_balancing_loss(one).item() == pytest.approx(E)
    router = mt.TopKRouter(H, E, K)
    mt.load_balancing_loss(router(torch.randn(T, H, generator=generator))).backward()
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"score": "tanh"}, "score is 'tanh', must be one of softmax, sigmoid"),
        ({"top_k": 9}, "top_k is 9, must be between 1 and 8; nearest legal value 8"),
        ({"num_groups": 3}, "num_groups 3 and top_groups 1 do not fit"),
        ({"num_groups": 4, "top_groups": 1}, "do not fit 8 experts with top_k 3"),
        ({"num_groups": 8, "top_groups": 4}, "must leave two experts to a group"),
    ],
)
def test_numbers_that_do_not_fit(arguments, words):
    with pytest.raises(moxie.InvalidArgumentError, match=words):
        mt.TopKRouter(H, E, **{"top_k": K, **arguments})
