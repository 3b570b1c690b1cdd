"""Adapters merged by an export are what peft's ``merge_and_unload`` gives, though one layer at a time is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outcore
from outcore.checkpoint import export_merged as export_merged_module
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.checkpoint.weights.merge import Merged
from outcore.core.errors import ConfigError

from . import small

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft uses the old name
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]
TIED = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}


def adapters(name: str, tmp_path: Path, **lora: Any) -> Any:
    """Save a base model, and adapters of random values. Returns the base model's class."""
    base = small.build(name, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = small.with_adapters(base, **lora)
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.3)
    model.save_pretrained(tmp_path / "adapters")
    return type(base)


def merged_by_peft(kind: Any, tmp_path: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    base = kind.from_pretrained(tmp_path / "base", dtype=dtype)
    return peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).merge_and_unload()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "experts of a mixture": ("mixtral", {}),
    "magnitudes": ("llama", {"use_dora": True}),
    "biases": ("gpt2", {"bias": "all", "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "a whole module": ("llama", {"modules_to_save": ["lm_head"]}),
    "tied modules": ("tied", TIED),
    "tied modules that differ now": ("tied", {"modules_to_save": ["embed_tokens"]}),
    "tokens": ("llama", {"trainable_token_indices": [3, 5]}),
}


@pytest.mark.skipif(small.DEVICE != "cpu", reason="an export computes on the CPU")
@pytest.mark.filterwarnings("ignore:.*(no longer tied|saved untied)")
@pytest.mark.parametrize("case", CASES)
def test_equal_to_peft(case: str, tmp_path: Path):
    name, lora = CASES[case]
    kind = adapters(name, tmp_path, **lora)
    said = export_checkpoint(tmp_path / "adapters", tmp_path / "out", "hf", merge=True)
    assert said.endswith(f"merged into '{tmp_path / 'base'}' in bf16")
    got, want = kind.from_pretrained(tmp_path / "out"), merged_by_peft(kind, tmp_path)
    assert got.config.tie_word_embeddings == want.config.tie_word_embeddings
    small.same(dict(want.state_dict()), dict(got.state_dict()))
    want.save_pretrained(tmp_path / "want")
    wanted = load_file(tmp_path / "want" / "model.safetensors")
    small.same(wanted, {n: load_file(tmp_path / "out" / "model.safetensors")[n] for n in wanted})


@pytest.mark.skipif(small.DEVICE != "cpu", reason="an export computes on the CPU")
def test_one_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every layer is merged once, and never while another one has values."""
    seen: list[str] = []
    merge = Merged._merged

    def watched(self: Merged, layer: str) -> dict[str, torch.Tensor]:
        assert self._now == ("", {})
        seen.append(layer)
        return merge(self, layer)

    monkeypatch.setattr(Merged, "_merged", watched)
    adapters("llama", tmp_path)
    export_checkpoint(tmp_path / "adapters", tmp_path / "out", "hf", merge=True)
    assert len(seen) == len(set(seen)) == 2 * 3


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
def test_tied_adapters_of_a_checkpoint(merge: bool, tmp_path: Path):
    """The copies that peft ties are one parameter, which a checkpoint has once."""
    base = small.build("tied")
    base.save_pretrained(tmp_path / "base")
    kind = type(base)
    model = small.with_adapters(kind.from_pretrained(tmp_path / "base"), **TIED).to(small.DEVICE)
    with small.prepared(model, tmp_path) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        outcore.save_pretrained(model, tmp_path / "adapters")
    export_checkpoint(tmp_path / "c", tmp_path / "out", "hf", merge=merge)
    if merge:
        want, got = merged_by_peft(kind, tmp_path, torch.float32), kind.from_pretrained(tmp_path / "out")
        small.same(dict(want.state_dict()), dict(got.state_dict()))
    else:
        want, got = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "out"))
        small.same(want, {name: got[name] for name in want})


def test_what_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(said: str, source: str = "adapters", form: Any = "hf") -> None:
        with pytest.raises(ConfigError, match=said):
            export_checkpoint(tmp_path / source, tmp_path / "out", form, merge=form == "hf")
        assert not (tmp_path / "out").exists()

    adapters("llama", tmp_path)
    refuses("--merge: expected adapters, but '.*base' holds a whole model", "base")
    refuses("--format dcp: expected a checkpoint that outcore.save_checkpoint", form="dcp")
    config = tmp_path / "adapters" / "adapter_config.json"
    text = config.read_text()
    config.write_text(text.replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    refuses("init_lora_weights='pissa' changes the weights below")
    config.write_text(text)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(export_merged_module, "_FETCHED", ())
    (tmp_path / "base").rename(tmp_path / "gone")
    refuses("which is '.*base', but it is neither a folder here nor on the hub")
