"""Small random models of four families: logits before and after the swap, training gradients, and layers that are read
from a checkpoint the model was saved to."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import moxie.hf  # noqa: E402
import moxie.torch as mt  # noqa: E402

import moxie  # noqa: E402

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
FAMILIES = {
    "mixtral": ("Mixtral", {"intermediate_size": 128, "num_local_experts": 6}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 128, "num_experts": 6, "intermediate_size": 128, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "intermediate_size": 128,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **LATENT,
        },
    ),
    "gpt_oss": ("GptOss", {"intermediate_size": 128, "num_local_experts": 6, "head_dim": 16, "sliding_window": 16}),
}


def make_model(family, dtype, seed, *, all_experts=False):
    """all_experts: K = E, for BF16, where rounding would decide between experts whose scores are nearly equal."""
    name, options = FAMILIES[family]
    if all_experts:
        options = {**options, "num_experts_per_tok": 8 if family == "deepseek_v3" else 6, "topk_group": 4}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases and corrections that matter
        for n, t in [*model.named_parameters(), *model.named_buffers()]:
            if n.endswith(("bias", "e_score_correction_bias")):
                t.normal_(0, 0.2)
    return model.to(dtype)


def blocks_of(model):
    return [m for m in model.modules() if type(m).__name__ in moxie.hf.BLOCKS]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_models_agree(place, family, ranks, seed):
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.float32 and place.kind == "cuda":
            continue
        model = make_model(family, dtype, seed, all_experts=dtype == torch.bfloat16).to(place.device)
        other = copy.deepcopy(model)
        names = moxie.hf.swap_blocks(other, world=place.world(ranks), max_tokens=64)
        assert len(names) == (2 if family == "deepseek_v3" else 3) and not blocks_of(other)
        tokens = torch.randint(96, (2, 21), device=place.device)
        with torch.no_grad():
            want, got = model(tokens).logits.double(), other(tokens).logits.double()
        place.synchronize()
        if dtype == torch.float32:
            assert (got - want).norm() < 1e-5 * want.norm()
            continue
        with torch.no_grad():  # the model's own distance from the same weights in float32 is what BF16 costs
            exact = copy.deepcopy(model).float()(tokens).logits.double()
        noise = (want - exact).norm() + 1e-3 * exact.norm()
        assert (got - exact).norm() < 1.5 * noise and (got - want).norm() < 2 * noise


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_models_train(place, family, seed):
    """Gradients of the loss, of every parameter that both have, in float32."""
    if place.kind == "cuda":
        pytest.skip("a CUDA world has no float32, which this comparison needs")
    model = make_model(family, torch.float32, seed).train()
    other = copy.deepcopy(model)
    moxie.hf.swap_blocks(other, world=place.world(2), max_tokens=64, gate_up="fused")
    tokens = torch.randint(96, (2, 21))
    losses = [
        m(tokens, labels=tokens, output_router_logits=family != "deepseek_v3" or None).loss for m in (model, other)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    mine = dict(other.named_parameters())
    shared = [n for n, p in model.named_parameters() if n in mine and p.grad is not None]
    assert sum("gate" in n or "router" in n for n in shared) >= 2
    for name, p in model.named_parameters():
        if name in shared:
            torch.testing.assert_close(mine[name].grad, p.grad, rtol=1e-3, atol=1e-5 * p.grad.abs().max().item() + 1e-8)
    # Expert gradients through the way back to transformers' layout.
    with torch.no_grad():
        for p in mine.values():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    back = moxie.hf.original_state_dict(other)
    for name, p in model.named_parameters():
        if ".experts." in name or "shared_experts" in name:
            torch.testing.assert_close(back[name], p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_back(family, seed, tmp_path):
    with moxie.World.cpu() as world:
        model = make_model(family, torch.bfloat16, seed)
        other = copy.deepcopy(model)
        moxie.hf.swap_blocks(other, world=world, max_tokens=64, experts="list")
        state, back = model.state_dict(), moxie.hf.original_state_dict(other)
        assert set(state) == set(back)
        assert all(torch.equal(state[n], back[n]) for n in state)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_saved_checkpoint(family, seed, tmp_path):
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    model = make_model(family, torch.float32, seed)
    model.save_pretrained(tmp_path / "model")
    x = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(seed))
    with moxie.World.cpu(num_ranks=2) as world:
        layers = moxie.hf.load_layers(tmp_path / "model", world=world, max_tokens=20)
        wanted = {n: m for n, m in model.named_modules() if type(m).__name__ in moxie.hf.BLOCKS}
        assert len(layers) == len(wanted)
        for (number, layer), (name, block) in zip(layers.items(), wanted.items(), strict=True):
            assert f".{number}." in name
            with torch.no_grad():
                want = block(x)
                torch.testing.assert_close(layer(x), want[0] if isinstance(want, tuple) else want, rtol=1e-4, atol=1e-4)
        # Experts from the checkpoint: the model needs none of its own.
        other = copy.deepcopy(model)
        for block in blocks_of(other):
            block.experts.to("meta")
        moxie.hf.swap_blocks(other, world=world, max_tokens=40, checkpoint=tmp_path / "model")
        tokens = torch.randint(96, (1, 17))
        with torch.no_grad():
            torch.testing.assert_close(other(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_swapped(seed):
    with pytest.raises(moxie.InvalidArgumentError, match="Linear has no MoE block to swap"):
        moxie.hf.swap_blocks(torch.nn.Linear(2, 2), max_tokens=4)
    model = make_model("mixtral", torch.float16, seed)
    with pytest.raises(moxie.InvalidArgumentError, match="experts are torch.float16"):
        moxie.hf.swap_blocks(model, max_tokens=4, world=moxie.World.cpu())
    model = make_model("mixtral", torch.float32, seed)
    model.config.hidden_act = "gelu"
    with pytest.raises(moxie.InvalidArgumentError, match="hidden_act of model.layers.0.mlp is gelu"):
        moxie.hf.swap_blocks(model, max_tokens=4, world=moxie.World.cpu())


def test_only_this_ranks_experts_are_kept(seed):
    with moxie.World.cpu(num_ranks=2) as world:
        model = make_model("qwen3_moe", torch.float32, seed)
        moxie.hf.swap_blocks(model, max_tokens=10, world=world)
        module = model.model.layers[1].mlp.experts
        assert isinstance(module, mt.MoE) and module.gate.shape == (6, 128, 64)
        with pytest.raises(moxie.InvalidArgumentError, match="x has 11 tokens, must be between 0 and 10"):
            model(torch.randint(96, (1, 11)))
