"""``weights=``: a checkpoint is loaded to its homes tensor by tensor, and checked before any memory is taken."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import outcore
from outcore.checkpoint.weights.load_plan import plan_loading
from outcore.core.errors import ConfigError
from outcore.engine import opened
from outcore.memory.files.weights_file import WeightsDirectory

from . import small

BUDGET = outcore.Budget(device="8MiB", host="16MiB")


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def rewritten(folder: Path, change: Any) -> Path:
    """A copy of the checkpoint with ``change`` applied to its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tier", small.TIERS)
@pytest.mark.parametrize("name", small.NAMES)
def test_loads_what_was_saved(name: str, tier: str, tmp_path: Path):
    want = small.build(name)
    folder = saved(want, tmp_path / "checkpoint")
    model = small.build(name, meta=True)
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.mark = "kept"
    with small.prepared(model, tmp_path, tier, weights=folder):
        small.same(want.state_dict(), model.state_dict())
        assert {id(p): n for n, p in model.named_parameters()} == names
        assert all(p.mark == "kept" for p in model.parameters())
        for (n, b), (_, c) in zip(want.named_buffers(), model.named_buffers(), strict=True):
            assert torch.equal(b, c), n
        want.eval(), model.eval()
        with torch.no_grad():
            assert torch.equal(want(**small.batch()).loss, model(**small.batch()).loss)


@pytest.mark.parametrize("tier", small.TIERS)
def test_training_goes_on_as_from_memory(tier: str, tmp_path: Path):
    folder = saved(small.build("llama"), tmp_path / "checkpoint")
    with small.prepared(small.build("llama"), tmp_path, tier) as (model, optimizer):
        want = small.train(model, optimizer, range(3))
    with small.prepared(small.build("llama", meta=True), tmp_path, tier, weights=folder) as (model, optimizer):
        assert small.train(model, optimizer, range(3)) == want


def test_without_an_optimizer(tmp_path: Path):
    want = small.build("llama").eval()
    folder = saved(want, tmp_path / "checkpoint")
    model = small.build("llama", meta=True).eval()
    with outcore.prepare(model, None, weights=folder), torch.no_grad():
        assert torch.equal(want(**small.batch()).loss, model(**small.batch()).loss)


def test_shards(tmp_path: Path):
    want = small.build("llama")
    folder = saved(want, tmp_path / "checkpoint", max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    with small.prepared(small.build("llama", meta=True), tmp_path, weights=str(folder)) as (model, _):
        small.same(want.state_dict(), model.state_dict())


@pytest.mark.parametrize("meta", [True, False])
def test_any_other_module(meta: bool, tmp_path: Path):
    """Values of a model in memory are replaced; buffers are loaded, too."""
    want = small.build("plain", seed=1)
    for block in want.blocks:
        block.norm.running_mean.normal_()
        block.norm.num_batches_tracked.fill_(7)
    save_file({k: v for k, v in want.state_dict().items() if k != "head.weight"}, tmp_path / "model.safetensors")
    with small.prepared(small.build("plain", meta=meta, seed=2), tmp_path, weights=tmp_path) as (model, _):
        small.same(want.state_dict(), model.state_dict())
        assert all(block.scale == 0.5 for block in model.blocks)


def test_a_model_partly_on_meta_keeps_the_rest(tmp_path: Path):
    want = small.build("plain", seed=1)
    state = {k: v for k, v in want.state_dict().items() if "norm" not in k and k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    model = small.build("plain", seed=2)
    kept = [block.norm.weight.data.normal_() for block in model.blocks]
    for block in model.blocks:
        block.up.to("meta")
        block.down.to("meta")
    with small.prepared(model, tmp_path, weights=tmp_path):
        got = model.state_dict()
        for i, value in enumerate(kept):
            assert torch.equal(got[f"blocks.{i}.norm.weight"].cpu(), value.cpu())
            assert torch.equal(got[f"blocks.{i}.up.weight"].cpu(), state[f"blocks.{i}.up.weight"].cpu())


class TestDtypes:
    def test_masters_have_the_precision_of_the_checkpoint(self, tmp_path: Path):
        want = small.build("llama")
        folder = saved(want, tmp_path / "checkpoint")
        model = small.build("llama", dtype=torch.bfloat16, meta=True)
        with small.prepared(model, tmp_path, weights=folder, precision="bf16") as (_, optimizer):
            for unit in optimizer.engine.units:
                for i, spec in enumerate(unit.spec.trainable):
                    exact = want.get_parameter(spec.name).cpu()
                    assert torch.equal(optimizer.engine.access.read_state(unit, "master", i).cpu(), exact), spec.name
                    assert torch.equal(optimizer.engine.access.read_weight(unit, i).cpu(), exact.bfloat16()), spec.name

    def test_bf16_checkpoint_in_fp32(self, tmp_path: Path):
        want = small.build("llama", dtype=torch.bfloat16)
        folder = saved(want, tmp_path / "checkpoint")
        with small.prepared(small.build("llama", meta=True), tmp_path, weights=folder) as (model, _):
            small.same({k: v.float() for k, v in want.state_dict().items()}, model.state_dict())


class TestNames:
    def test_base_model_prefix_is_added(self, tmp_path: Path):
        want = small.build("tied")
        folder = saved(want.model, tmp_path / "checkpoint")
        assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
        with small.prepared(small.build("tied", meta=True), tmp_path, weights=folder) as (model, _):
            small.same(want.state_dict(), model.state_dict())

    def test_base_model_prefix_is_removed(self, tmp_path: Path):
        want = small.build("tied")
        folder = saved(want, tmp_path / "checkpoint")
        with small.prepared(small.build("tied", meta=True).model, tmp_path, weights=folder) as (model, _):
            small.same(want.model.state_dict(), model.state_dict())

    @pytest.mark.parametrize("there", [("lm_head.weight",), ("lm_head.weight", "model.embed_tokens.weight")])
    def test_tied_under_any_name(self, there: tuple[str, ...], tmp_path: Path):
        want = small.build("tied")
        value = want.lm_head.weight.detach()

        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors["model.embed_tokens.weight"]
            tensors.update({name: value.clone() for name in there})

        folder = rewritten(saved(want, tmp_path / "checkpoint"), change)
        with small.prepared(small.build("tied", meta=True), tmp_path, weights=folder) as (model, _):
            small.same(want.state_dict(), model.state_dict())

    def test_tied_with_different_values(self, tmp_path: Path):
        folder = rewritten(
            saved(small.build("tied"), tmp_path / "checkpoint"),
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
        )
        with pytest.raises(
            outcore.ConfigError, match=r"embed_tokens.weight' and 'lm_head.weight'.*tie_word_embeddings"
        ):
            plan_loading(small.build("tied", meta=True), folder)

    def test_fused_experts(self, tmp_path: Path):
        want = small.build("mixtral")
        folder = saved(want, tmp_path / "checkpoint")
        names = load_file(folder / "model.safetensors")
        assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in names  # one by one, as in published checkpoints
        with small.prepared(small.build("mixtral", meta=True), tmp_path, weights=folder) as (model, _):
            small.same(want.state_dict(), model.state_dict())

    def test_experts_that_are_fused_in_the_checkpoint(self, tmp_path: Path):
        want = small.build("mixtral")
        folder = saved(want, tmp_path / "checkpoint", save_original_format=False)
        with small.prepared(small.build("mixtral", meta=True), tmp_path, weights=folder) as (model, _):
            small.same(want.state_dict(), model.state_dict())
            outcore.save_pretrained(model, tmp_path / "again")
        assert load_file(tmp_path / "again/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()

    def test_one_tensor_that_becomes_several(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        from transformers import conversion_mapping
        from transformers.core_model_loading import Chunk, WeightConverter

        parts = [f".self_attn.{n}_proj.weight" for n in "qkv"]
        rule = WeightConverter(".self_attn.qkv.weight", parts, operations=[Chunk(dim=0)])
        monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [copy.deepcopy(rule)])
        want = small.build("llama", num_key_value_heads=4)
        folder = saved(want, tmp_path / "checkpoint")
        assert "model.layers.0.self_attn.qkv.weight" in load_file(folder / "model.safetensors")
        reads: list[str] = []
        read = WeightsDirectory.read
        monkeypatch.setattr(WeightsDirectory, "read", lambda self, name: reads.append(name) or read(self, name))
        with small.prepared(small.build("llama", meta=True, num_key_value_heads=4), tmp_path, weights=folder) as run:
            small.same(want.state_dict(), run[0].state_dict())
            outcore.save_pretrained(run[0], tmp_path / "again")
        assert len(reads) == len(set(reads)), "a tensor was read twice"
        first, second = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
        small.same(dict(sorted(first.items())), dict(sorted(second.items())))

    def test_old_buffers_are_ignored(self, tmp_path: Path):
        want = small.build("llama")
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
        folder = rewritten(saved(want, tmp_path / "checkpoint"), lambda tensors: tensors.update(extra))
        with small.prepared(small.build("llama", meta=True), tmp_path, weights=folder) as (model, _):
            assert torch.equal(model.model.rotary_emb.inv_freq, want.model.rotary_emb.inv_freq)


class TestAdapters:
    @pytest.mark.parametrize("meta", [True, False])
    def test_base_weights_come_from_the_checkpoint(self, tmp_path: Path, meta: bool):
        want = small.build("llama", dtype=torch.bfloat16).cpu()
        folder = saved(want, tmp_path / "checkpoint")
        model = small.build("llama", dtype=torch.bfloat16, meta=meta, seed=3)
        model = small.with_adapters(model, modules_to_save=["lm_head"])
        own = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n and not meta}
        with small.prepared(model, tmp_path, weights=folder) as (_, optimizer):
            got = dict(outcore.named_tensors(model))
            layer = "base_model.model.model.layers.1.self_attn.q_proj."
            assert torch.equal(got[layer + "base_layer.weight"], want.model.layers[1].self_attn.q_proj.weight)
            assert all(torch.equal(got[n], value.cpu()) for n, value in own.items())
            assert got[layer + "lora_B.default.weight"].count_nonzero() == 0
            assert got[layer + "lora_A.default.weight"].std() > 0.02
            if meta:
                head = got["base_model.model.lm_head.modules_to_save.default.weight"]
                assert torch.equal(head, want.lm_head.weight.to(head.dtype))
            small.train(model, optimizer)

    def test_a_trained_copy_is_kept(self, tmp_path: Path):
        folder = saved(small.build("llama"), tmp_path / "checkpoint")
        model = small.with_adapters(small.build("llama", seed=3), modules_to_save=["lm_head"])
        trained = model.base_model.model.lm_head.modules_to_save["default"].weight.data.normal_()
        with small.prepared(model, tmp_path, weights=folder):
            got = dict(outcore.named_tensors(model))["base_model.model.lm_head.modules_to_save.default.weight"]
            assert torch.equal(got, trained.cpu())


class TestRefusals:
    """Each refusal comes before any memory is taken, and leaves the model unchanged."""

    @pytest.fixture(autouse=True)
    def _takes_no_memory(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(*_: object) -> None:
            raise AssertionError("memory was taken")

        monkeypatch.setattr(opened, "Tiers", refuse)

    def refused(self, folder: Path, match: str, model: nn.Module | None = None) -> str:
        model = model or small.build("llama", meta=True)
        with pytest.raises(outcore.ConfigError, match=match) as error:
            outcore.prepare(model, small.adamw(model), weights=folder)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        return str(error.value)

    def test_missing(self, tmp_path: Path):
        folder = saved(small.build("llama"), tmp_path)

        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name in [n for n in tensors if "mlp" in n]:
                del tensors[name]

        text = self.refused(rewritten(folder, change), "9 of the model's tensors are missing")
        assert "'model.layers.0.mlp.gate_proj.weight'" in text
        assert "and 4 more" in text
        assert "unexpected" not in text

    def test_unexpected(self, tmp_path: Path):
        folder = rewritten(saved(small.build("llama"), tmp_path), lambda t: t.update({"odd.weight": torch.ones(3)}))
        text = self.refused(folder, "1 of the checkpoint's 31 tensors are unexpected .'odd.weight'.")
        assert "missing" not in text

    def test_shape(self, tmp_path: Path):
        folder = saved(small.build("llama", intermediate_size=54), tmp_path)
        self.refused(folder, r"gate_proj.weight' has shape \(53, 40\) in the model and \(54, 40\) in the checkpoint")

    def test_shape_of_fused_experts(self, tmp_path: Path):
        folder = saved(small.build("mixtral", num_local_experts=4), tmp_path)
        model = small.build("mixtral", meta=True)
        self.refused(folder, r"gate_up_proj' has shape \(3, 106, 40\) in the model and \(4, 106, 40\)", model)

    def test_experts_that_cannot_be_fused(self, tmp_path: Path):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors["model.layers.1.block_sparse_moe.experts.1.w3.weight"]

        folder = rewritten(saved(small.build("mixtral"), tmp_path), change)
        self.refused(folder, "experts.gate_up_proj'.*from_pretrained", small.build("mixtral", meta=True))

    def test_quantized(self, tmp_path: Path):
        name = "model.layers.1.mlp.up_proj.weight"
        folder = rewritten(saved(small.build("llama"), tmp_path), lambda t: t.update({name: t[name].to(torch.int8)}))
        self.refused(
            folder, "up_proj.weight' is torch.float32 in .* quantized .torch.int8.*; name the model that it was"
        )

    def test_no_checkpoint(self, tmp_path: Path):
        self.refused(tmp_path / "nowhere", "expected model.safetensors")

    def test_hooks_would_be_lost(self, tmp_path: Path):
        folder = saved(small.build("llama"), tmp_path)
        model = small.build("llama", meta=True)
        model.lm_head.weight.register_hook(lambda grad: None)
        self.refused(folder, "'lm_head.weight'.*after outcore.prepare", model)

    def test_a_tensor_that_nobody_sets(self, tmp_path: Path):
        folder = saved(small.build("llama"), tmp_path)
        model = small.build("llama", meta=True)
        model.model.norm.table = torch.ones(3, device="meta")
        self.refused(folder, "'model.norm.table' is a plain attribute of LlamaRMSNorm", model)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_holds_one_tensor_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = saved(small.build(name, num_hidden_layers=6), tmp_path / "checkpoint")
    read = WeightsDirectory.read
    alive, most, total = [0], [0], [0]

    def forget(nbytes: int) -> None:
        alive[0] -= nbytes

    def counted(self: WeightsDirectory, name: str) -> torch.Tensor:
        tensor = read(self, name)
        alive[0] += tensor.nbytes
        total[0] += tensor.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(tensor.untyped_storage(), forget, tensor.nbytes)
        return tensor

    monkeypatch.setattr(WeightsDirectory, "read", counted)
    model = small.build(name, meta=True, num_hidden_layers=6)
    largest = max(p.nbytes for p in model.parameters())
    with small.prepared(model, tmp_path, "disk", weights=folder):
        pass
    sizes = {n: t.nbytes for n, t in load_file(folder / "model.safetensors").items()}
    assert total[0] == sum(sizes.values()), "a tensor was read twice, or not at all"
    assert most[0] <= 2 * largest < total[0] / 4


class TestFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_not_finite(self, tmp_path: Path, value: float, dtype: torch.dtype):
        """Values that are not finite are found during reading, in any dtype."""

        def change(tensors: dict[str, torch.Tensor]) -> None:
            changed = tensors["model.layers.1.mlp.up_proj.weight"].to(dtype)
            changed.view(-1)[-3] = value
            tensors["model.layers.1.mlp.up_proj.weight"] = changed

        folder, model = rewritten(saved(small.build("llama"), tmp_path), change), small.build("llama", meta=True)
        with pytest.raises(ConfigError, match="up_proj.weight': expected finite values, but 1 of [0-9,]+ are nan"):
            outcore.prepare(model, None, weights=folder, budget=BUDGET)

    def test_large_values_are_finite(self, tmp_path: Path):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.1.mlp.up_proj.weight"].fill_(torch.finfo(torch.float32).max)

        folder, model = rewritten(saved(small.build("llama"), tmp_path), change), small.build("llama", meta=True)
        outcore.prepare(model, None, weights=folder, budget=BUDGET)
        outcore.close(model)
