"""Loading and exporting one MoE layer of Hugging Face checkpoints. The files are small, random, and written here; what
the layer computes is judged against each family's own formula on the checkpoint's own tensors."""

import json

import numpy as np
import pytest
import reference
from cases import make_ids, same_bits

import moxie
from moxie import checkpoint

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors = pytest.importorskip("safetensors.numpy")

E, H, I, S, K = 5, 64, 128, 64, 2  # noqa: E741
LAYER = 3
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def make_tensors(family, rng, dtype):
    def random(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(dtype)

    at = f"model.layers.{LAYER}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}."
    if family == "gpt_oss":
        return {
            at + "router.weight": random(E, H),
            at + "router.bias": random(E),
            at + "experts.gate_up_proj": random(E, H, 2 * I),
            at + "experts.gate_up_proj_bias": random(E, 2 * I),
            at + "experts.down_proj": random(E, I, H),
            at + "experts.down_proj_bias": random(E, H),
        }
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    tensors = {at + "gate.weight": random(E, H)}
    for e in range(E):
        for name in names:
            shape = (H, I) if name in ("w2", "down_proj") else (I, H)
            tensors[f"{at}experts.{e}.{name}.weight"] = random(*shape)
    if family == "deepseek_v3":
        tensors[at + "gate.e_score_correction_bias"] = rng.standard_normal(E).astype(np.float32)
        for name in names:
            tensors[f"{at}shared_experts.{name}.weight"] = random(*((H, S) if name == "down_proj" else (S, H)))
    return tensors


def write(folder, tensors, *, num_shards=1, config=True):
    """A model folder; with shards, neighbouring tensors go to different files."""
    folder.mkdir(exist_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps({"num_experts_per_tok": K, "swiglu_limit": 2.0}))
    if num_shards == 1:
        safetensors.save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        safetensors.save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def wide(array):
    return np.asarray(array, dtype=np.float64)


def expert_output(family, tensors, e, x):
    """As the family's own code computes it: x [H] -> [H]."""
    t = {name.split(".", 4)[-1]: wide(a) for name, a in tensors.items()}
    if family == "gpt_oss":
        gate_up = x @ t["experts.gate_up_proj"][e] + t["experts.gate_up_proj_bias"][e]
        gate, up = np.minimum(gate_up[0::2], 2.0), np.clip(gate_up[1::2], -2.0, 2.0)
        glu = gate * reference.sigmoid(1.702 * gate)
        return ((up + 1) * glu) @ t["experts.down_proj"][e] + t["experts.down_proj_bias"][e]
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    where = "shared_experts" if e == "shared" else f"experts.{e}"
    g, u = (t[f"{where}.{name}.weight"] @ x for name in (gate, up))
    return t[f"{where}.{down}.weight"] @ (g * reference.sigmoid(g) * u)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_computes_what_the_checkpoint_means(family, num_shards, rng, tmp_path):
    tensors = make_tensors(family, rng, ml_dtypes.bfloat16)
    folder = write(tmp_path / "model", tensors, num_shards=num_shards)
    num_ranks = 3  # E = 5 does not divide
    loaded = checkpoint.load_layer(folder, layer=LAYER, num_ranks=num_ranks)
    problem = loaded.problem(max_tokens=8)
    assert loaded.family == family and problem.top_k == K and problem.dtype == moxie.DType.bf16
    assert [len(w.gate) for w in loaded.weights] == [2, 2, 1]
    tokens = (8, 0, 3)
    x = [rng.standard_normal((t, H)).astype(ml_dtypes.bfloat16) for t in tokens]
    ids = [make_ids(problem, rng, t, "random").astype(np.int32) for t in tokens]
    route_weights = [rng.random((t, K), dtype=np.float32) for t in tokens]
    with moxie.World.cpu(num_ranks=num_ranks) as world:
        layer = moxie.Layer(world, problem)
        y = layer.infer(x=x, expert_ids=ids, route_weights=route_weights, weights=loaded.weights)
    for r in range(num_ranks):
        want = np.zeros((tokens[r], H))
        for t, row in enumerate(wide(x[r])):
            for e, w in zip(ids[r][t], route_weights[r][t], strict=True):
                want[t] += w * expert_output(family, tensors, e, row)
            if family == "deepseek_v3":
                want[t] += expert_output(family, tensors, "shared", row)
        reference.close(f"y of rank {r}", y[r], want, moxie.DType.bf16)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_the_same_tensors(family, dtype, rng, tmp_path):
    tensors = make_tensors(family, rng, dtype)
    folder = write(tmp_path / "model", tensors)
    for num_ranks in (1, 2, 7):  # 7: ranks without experts
        loaded = checkpoint.load_layer(folder, layer=LAYER, num_ranks=num_ranks)
        out = checkpoint.export_layer(loaded)
        assert out.keys() == tensors.keys()
        assert all(same_bits(out[name], tensors[name]) for name in tensors)
    checkpoint.save(tmp_path / "again.safetensors", out)
    again = checkpoint.load_layer(tmp_path / "again.safetensors", layer=LAYER, num_ranks=7)
    assert again.top_k is None
    assert same_bits(again.weights[0].gate, loaded.weights[0].gate)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.safetensors", "model"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_ranks_part(family, rng, tmp_path):
    folder = write(tmp_path / "model", make_tensors(family, rng, ml_dtypes.bfloat16), num_shards=2)
    whole = checkpoint.load_layer(folder, layer=LAYER, num_ranks=3)
    part = checkpoint.load_layer(folder, layer=LAYER, num_ranks=3, ranks=[1])
    assert part.ranks == [1] and len(part.weights) == 1
    assert same_bits(part.weights[0].down, whole.weights[1].down)
    with pytest.raises(moxie.InvalidArgumentError, match=r"has the weights of ranks \[1\], must have all 3 in order"):
        checkpoint.export_layer(part)
    with pytest.raises(moxie.InvalidArgumentError, match="rank 3 of load_layer must be between 0 and 2"):
        checkpoint.load_layer(folder, layer=LAYER, num_ranks=3, ranks=[3])


def refused(words, path, **options):
    with pytest.raises(moxie.InvalidArgumentError) as caught:
        checkpoint.load_layer(path, **{"layer": LAYER, **options})
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_tensor_is_named_with_its_file(family, rng, tmp_path):
    tensors = make_tensors(family, rng, ml_dtypes.bfloat16)
    optional = ("router.bias", "e_score_correction_bias")
    for i, name in enumerate(tensors):
        if name.endswith(optional) or not any(w in name for w in (".0.", ".4.", "router", "gate.", "shared", "proj")):
            continue
        folder = write(tmp_path / str(i), {n: a for n, a in tensors.items() if n != name})
        refused([f"tensor {name} is missing in", "model.safetensors"], folder, family=family)


def test_broken_files(rng, tmp_path):
    tensors = make_tensors("qwen3_moe", rng, ml_dtypes.bfloat16)
    refused(["nowhere does not exist"], tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused(["has neither model.safetensors.index.json nor a .safetensors file"], tmp_path / "empty")
    folder = write(tmp_path / "model", tensors, num_shards=3)
    refused(["layer 7 of", "has no MoE block of a known family"], folder, layer=7)
    refused(["family is 'llama', must be one of mixtral"], folder, family="llama")
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    refused([f"file {shard} is no whole safetensors file"], folder)
    shard.unlink()
    refused([f"file {shard} does not exist", "index.json says that it has tensor model.layers.3"], folder)
    one = list(tensors)[2]
    safetensors.save_file({n: a for n, a in list(tensors.items())[1::3] if n != one}, shard)
    lost = list(tensors)[1::3]
    safetensors.save_file({n: tensors[n] for n in lost[1:]}, shard)
    refused([f"tensor {lost[0]} is missing in {shard}", "index.json says it is"], folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(["index.json is no index of shards"], folder)


def test_wrong_tensors(rng, tmp_path):
    name = f"model.layers.{LAYER}.mlp.experts.1.up_proj.weight"
    tensors = make_tensors("qwen3_moe", rng, ml_dtypes.bfloat16)
    shapes = write(tmp_path / "shape", {**tensors, name: tensors[name][:, :32].copy()})
    refused([f"tensor {name} of", "is [128, 32], must be [128, 64]"], shapes)
    types = write(tmp_path / "type", {**tensors, name: tensors[name].astype(np.float16)})
    refused([f"tensor {name} of", "is F16, must be BF16 or F32"], types)
    mixed = write(tmp_path / "mixed", {**tensors, name: tensors[name].astype(np.float32)})
    refused([f"tensor {name} of", "is float32, must be bfloat16"], mixed)
    fp8 = write(tmp_path / "fp8", {**tensors, name: tensors[name].astype(ml_dtypes.float8_e4m3fn)})
    refused([f"tensor {name} of", "is F8_E4M3, must be BF16 or F32"], fp8)
    tensors = make_tensors("gpt_oss", rng, ml_dtypes.bfloat16)
    fused = f"model.layers.{LAYER}.mlp.experts.gate_up_proj"
    tensors[fused + "_blocks"] = tensors.pop(fused).view(np.uint8)
    refused([f"tensor {fused}_blocks of", "is MXFP4"], write(tmp_path / "mxfp4", tensors))


def test_top_k_must_be_known(rng, tmp_path):
    folder = write(tmp_path / "model", make_tensors("mixtral", rng, np.float32), config=False)
    loaded = checkpoint.load_layer(folder, layer=LAYER)
    with pytest.raises(moxie.InvalidArgumentError, match="top_k is not known"):
        loaded.problem(max_tokens=4)
    assert loaded.problem(max_tokens=4, top_k=2).dtype == moxie.DType.f32
