"""The model of a run: found wherever it is, built as ``from_pretrained`` builds it, or refused with one message."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import outcore
from outcore.command.train.model.byte_tokenizer import END, PAD, TURN, byte_tokenizer
from outcore.command.train.model.source import ModelSource, build_model, find_model, load_tokenizer
from outcore.core.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 260,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
MIXTURE = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "mixture": MIXTURE}
BUDGET = outcore.Budget(device="8MiB", host="16MiB")


def write_config(folder: Path, config: Mapping[str, Any] = LLAMA, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**config, **changes}.items() if value is not ...}))
    return path


def saved(folder: Path, config: Mapping[str, Any] = LLAMA, **options: Any) -> Path:
    """Save a checkpoint of random weights in fp32, with its own generation settings."""
    source = find_model(str(write_config(folder / "new", config)))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(source.config)
    for buffer in model.buffers():
        if buffer.dim() and not buffer.is_meta and len(buffer) == 4:
            buffer.uniform_()  # a router's bias, which starts at zero
    model.generation_config.update(do_sample=True, temperature=0.25)
    model.save_pretrained(folder / "saved", **options)
    return folder / "saved"


def values(model: PreTrainedModel, **options: Any) -> dict[str, torch.Tensor]:
    """Prepare a model and return a copy of all its values."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with outcore.prepare(model, optimizer, budget=BUDGET, **options):
        return dict(outcore.named_tensors(model))


class TestBuilding:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_equals_from_pretrained(self, tmp_path: Path, name: str, precision: str):
        source = find_model(str(saved(tmp_path, CONFIGS[name])))
        model = build_model(source, precision)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        plain = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=torch.float32 if precision == "fp32" else torch.bfloat16
        )
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()
        assert model.config.to_dict() == plain.config.to_dict()
        assert type(model) is type(plain)
        found = values(model, weights=source.weights, precision=precision)
        expected = dict(plain.named_parameters()) | {k: v for k, v in plain.named_buffers() if k in plain.state_dict()}
        assert set(found) == set(expected)
        assert [k for k in found if found[k].dtype != expected[k].dtype or not torch.equal(found[k], expected[k])] == []

    @pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_adapters_on_meta(self, tmp_path: Path, name: str):
        source = find_model(str(saved(tmp_path, CONFIGS[name])))
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear")
        model = peft.get_peft_model(build_model(source, "fp32"), config)
        assert model.peft_config["default"].base_model_name_or_path == str(source.folder)
        torch.manual_seed(1)
        found = values(model, weights=source.weights)
        plain = dict(AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).named_parameters())
        for name, tensor in found.items():
            if "lora_" in name:
                assert bool(tensor.any()) == ("lora_A" in name)
            else:
                assert torch.equal(tensor, plain[name.removeprefix("base_model.model.").replace(".base_layer", "")])
        assert sum("lora_" in name for name in found) > 4

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_random_initialisation_follows_the_seed(self, tmp_path: Path, name: str, precision: str):
        source = find_model(str(write_config(tmp_path, CONFIGS[name])))
        assert source.weights is None
        made = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            made.append(values(build_model(source, precision), precision=precision))
        first, again, other = made
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not any(torch.equal(first[key], other[key]) for key in first if "embed" in key or "wte" in key)
        assert {tensor.dtype for tensor in first.values()} == {torch.float32 if precision == "fp32" else torch.bfloat16}

    def test_the_index_of_a_layer_is_no_number_of_layers(self, tmp_path: Path):
        assert find_model(str(write_config(tmp_path, vision_feature_layer=-2))).config.vision_feature_layer == -2

    def test_building_does_not_change_the_source(self, tmp_path: Path):
        source = find_model(str(write_config(tmp_path, dtype="float16")))
        before = source.config.to_dict()
        build_model(source, "bf16")
        assert source.config.to_dict() == before

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"num_attention_heads": 3, "head_dim": ..., "hidden_size": 16}, "16.*3|head"),
            ({"hidden_act": "nothing"}, "nothing"),
            ({"hidden_size": -4}, "negative|-4"),
        ],
    )
    def test_numbers_that_do_not_fit_together(self, tmp_path: Path, changes: dict[str, Any], said: str):
        path = write_config(tmp_path, **changes)
        with pytest.raises(ConfigError, match=f"^--model '{path}': expected.*(?:{said})") as refusal:
            build_model(find_model(str(path)), "fp32")
        assert "\n" not in str(refusal.value)

    def test_broken_generation_settings(self, tmp_path: Path):
        path = write_config(tmp_path)
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(ConfigError, match="expected generation settings in generation_config.json"):
            build_model(find_model(str(path)), "fp32")


class TestFinding:
    def test_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        folder = saved(tmp_path)
        monkeypatch.chdir(tmp_path)
        for name in (str(folder), "saved", "./saved/"):
            source = find_model(name)
            assert (source.name, source.config.model_type, source.config.name_or_path) == (name, "llama", str(folder))
            assert source.weights is not None
            assert source.weights.samefile(folder)
            assert source.folder.samefile(folder)

    def test_shards(self, tmp_path: Path):
        folder = saved(tmp_path, max_shard_size="8KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
        assert find_model(str(folder)).weights == folder

    def test_config_alone_whatever_its_name(self, tmp_path: Path):
        folder = saved(tmp_path)
        for path in (folder / "config.json", write_config(tmp_path).rename(tmp_path / "tiny.json")):
            source = find_model(str(path))
            assert (source.weights, source.folder, source.config.hidden_size) == (None, path.parent, 16)

    def test_code_of_its_own_is_not_needed_for_what_is_known(self, tmp_path: Path):
        path = write_config(tmp_path, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
        with pytest.warns(UserWarning, match=r"code of its own \(auto_map\), which is never run; .* transformers' own"):
            source = find_model(str(path))
        assert build_model(source, "fp32").__module__.startswith("transformers.")


class TestHub:
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def cached(self, tmp_path: Path, name: str, model: Path) -> Path:
        """Write what ``huggingface_hub`` leaves behind after it has fetched a model."""
        root = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("0" * 40)
        (root / "snapshots").mkdir()
        return model.rename(root / "snapshots" / ("0" * 40))

    @pytest.mark.parametrize("name", ["owner/name", "name"])
    def test_offline_from_the_cache(self, tmp_path: Path, name: str):
        snapshot = self.cached(tmp_path, name, saved(tmp_path))
        byte_tokenizer().save_pretrained(snapshot)
        source = find_model(name)
        assert (source.weights, source.folder, source.config.name_or_path) == (snapshot, snapshot, name)
        assert values(build_model(source, "fp32"), weights=source.weights)
        assert load_tokenizer(source).eos_token == END

    def test_only_a_part_is_in_the_cache(self, tmp_path: Path):
        folder = saved(tmp_path)
        (folder / "model.safetensors").unlink()
        self.cached(tmp_path, "owner/name", folder)
        with pytest.raises(ConfigError, match="^--model 'owner/name': expected weights"):
            find_model("owner/name")

    @pytest.mark.parametrize("name", ["owner/name", "name"])
    def test_not_in_the_cache(self, tmp_path: Path, name: str):
        with pytest.raises(ConfigError, match=f"^--model '{name}': .*no such file, the hub cannot be reached"):
            find_model(name)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        "name", ["/no/such/place", "./tiny", "a/b/c", "tiny model", "..", "x" * 300, "", " ", "a\0b"]
    )
    def test_path_that_does_not_exist(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=re.escape(f"--model '{name}': expected")) as refusal:
            find_model(name)
        assert "check the path" in str(refusal.value) or name == ".."
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (GatedRepoError, "it is gated; ask for access at https://huggingface.co/owner/name"),
            (RepositoryNotFoundError, "no such file, and the hub has no such model"),
            (OSError, "expected to fetch it from the hub, but got: OSError: the reason"),
        ],
    )
    def test_hub_refuses(self, monkeypatch: pytest.MonkeyPatch, error: Any, said: str):
        def refuse(*_: object, **__: object) -> None:
            raise error.__new__(error, "the\nreason")  # its constructor needs a response

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ConfigError, match=re.escape(said)):
            find_model("owner/name")


def adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    return folder


def config(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_config(folder, **changes)


def content(text: str | bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
        return folder / "config.json"

    return make


def folder_with(*names: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_config(folder)
        for name in names:
            (folder / name).write_bytes(b"x")
        return folder

    return make


def damaged_weights(folder: Path) -> Path:
    write_config(folder)
    save_file({"x": torch.zeros(9)}, folder / "model.safetensors")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(90)
    return folder


def missing_shard(folder: Path) -> Path:
    write_config(folder)
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "config.json")
    return folder / "config.json"


def huge(folder: Path) -> Path:
    with (folder / "model.gguf").open("wb") as file:
        file.truncate(2**30)
    return folder / "model.gguf"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty directory": (lambda folder: folder, "expected config.json in it, but there is none"),
    "adapter": (adapter, "expected a whole model, but there is only an adapter"),
    "no weights": (folder_with("tokenizer.json"), "expected weights .* name the config.json itself"),
    "weights to convert": (folder_with("pytorch_model.bin"), "found 'pytorch_model.bin'; convert"),
    "damaged weights": (damaged_weights, "expected a safetensors file"),
    "no weights but text": (folder_with("model.safetensors"), "expected a safetensors file"),
    "missing shard": (missing_shard, "expected the file 'model-00001-of-00002.safetensors' beside it"),
    "empty": (content(""), "expected JSON in config.json"),
    "broken": (content('{"model_type": "llama",}'), "expected JSON in config.json.*line 1"),
    "deep": (content("[" * 10**5), "expected JSON in config.json"),
    "binary": (content(b"\x80\0\xff"), "expected JSON in config.json"),
    "list": (content("[1]"), "expected a JSON object in config.json, but got \\[1\\]"),
    "another file": (huge, "expected a configuration in JSON, but got a file of 1,073,741,824 bytes"),
    "pipe": (pipe, "pipe, socket or device"),
    "link to nothing": (lambda f: (f / "x.json").symlink_to(f / "y") or f / "x.json", "expected config.json"),
    "no model_type": (config(model_type=...), "expected a model_type in its configuration.*there is none"),
    "number as model_type": (config(model_type=3), "expected a model_type in its configuration.*got 3"),
    "unknown model_type": (config(model_type="lama"), "model type `lama`.*version of Transformers is out of date"),
    "code of its own": (
        config(model_type="own", auto_map={"AutoConfig": "x.Y"}),
        r"its own code \(auto_map\) is not run",
    ),
    "too many layers": (config(num_hidden_layers=10**9), "1 to 10,000 layers.* has num_hidden_layers 1,000,000,000"),
    "too many layers of GPT-2": (config(config=GPT2, n_layer=10**9), "1 to 10,000 layers.* n_layer 1,000,000,000"),
    "too many blocks": (config(config={"model_type": "xlstm"}, num_blocks=10**9), "num_blocks 1,000,000,000"),
    "too many experts": (
        config(text_config={"num_local_experts": 10**8}),
        "1 to 10,000 .* has num_local_experts 100,000,000",
    ),
    "quantized": (
        config(quantization_config={"quant_method": "gptq"}),
        "but they are quantised by .gptq.",
    ),
    "encoder and decoder": (config(config={"model_type": "t5"}), "causal language model, but t5 is not one"),
    "no language model": (config(config={"model_type": "vit"}), "causal language model, but vit is not one"),
    "another head": (
        config(architectures=["LlamaForSequenceClassification"]),
        "it is a LlamaForSequenceClassification",
    ),
    "fills gaps": (
        config(config={"model_type": "bert", "architectures": ["BertForMaskedLM"]}),
        "it is a BertForMaskedLM",
    ),
    "text as number": (config(hidden_size="many"), "to describe a llama model, but got.*hidden_size"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", BAD)
    def test_says_what_is_wrong(self, tmp_path: Path, case: str):
        make, said = BAD[case]
        path = make(tmp_path)
        with pytest.raises(ConfigError, match=said) as refusal:
            find_model(str(path))
        assert str(refusal.value).startswith(("--model '", "--model weights '"))
        assert str(path) in str(refusal.value)
        assert "expected" in str(refusal.value)
        assert "\n" not in str(refusal.value)

    def test_unreadable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def refused(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        path = write_config(tmp_path)
        monkeypatch.setattr(Path, "read_bytes", refused)
        with pytest.raises(ConfigError, match="expected readable files, but got: Permission denied"):
            find_model(str(path))


def source_of(folder: Path, **changes: Any) -> ModelSource:
    return find_model(str(write_config(folder, **changes)))


class TestTokenizer:
    def test_bytes_where_there_is_none(self, tmp_path: Path):
        tokenizer = load_tokenizer(source_of(tmp_path, vocab_size=259))
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (259, 256, 257)

    def test_every_text_comes_back(self, tmp_path: Path):
        byte_tokenizer().save_pretrained(tmp_path)
        text = "".join(map(chr, [*range(0x3000), *range(0x1F600, 0x1F650)])) + "  a\r\n\t n't , . ' \u2028 end "
        for tokenizer in (byte_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
            ids = tokenizer(text)["input_ids"]
            assert ids == list(text.encode())
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([0x41, 0xFF, 0xC3, 0x41]).startswith("A")
            assert tokenizer(f"a{END}{PAD}{TURN}")["input_ids"] == [97, 256, 257, 258]
            assert tokenizer.decode([97, 256, 257, 258], skip_special_tokens=True) == "a"
            assert tokenizer.chat_template == byte_tokenizer().chat_template

    def test_chat(self):
        tokenizer = byte_tokenizer()
        chat = [{"role": "system", "content": " s\n"}, {"role": "user", "content": "hi"}]
        answer = [{"role": "assistant", "content": "yo"}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert asked == f"{TURN}system\n s\n{END}{TURN}user\nhi{END}{TURN}assistant\n"
        assert tokenizer.apply_chat_template(chat + answer, tokenize=False) == f"{asked}yo{END}"
        found = tokenizer.apply_chat_template(chat + answer, return_dict=True, return_assistant_tokens_mask=True)
        assert found["assistant_masks"] == [0] * (len(found["input_ids"]) - 3) + [1, 1, 1]

    def test_its_own(self, tmp_path: Path):
        own = byte_tokenizer()
        own.add_tokens(["<|more|>"])
        own.save_pretrained(tmp_path)
        assert len(load_tokenizer(source_of(tmp_path))) == 260

    def test_more_tokens_than_the_model(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="a vocab_size of at least 259.*config.json has 256; raise it"):
            load_tokenizer(source_of(tmp_path, vocab_size=256))
        folder = saved(tmp_path, {**LLAMA, "vocab_size": 200})
        byte_tokenizer().save_pretrained(folder)
        with pytest.raises(ConfigError, match="at least 259.*has 200; use the tokenizer"):
            load_tokenizer(find_model(str(folder)))

    def test_bytes_for_a_trained_model_are_told(self, tmp_path: Path):
        with pytest.warns(UserWarning, match="it has weights but no tokenizer, so every byte is a token"):
            load_tokenizer(find_model(str(saved(tmp_path))))

    def test_end_of_text(self, tmp_path: Path):
        own = byte_tokenizer()
        own.eos_token = None
        own.save_pretrained(tmp_path)
        source = source_of(tmp_path)
        with pytest.raises(ConfigError, match="an end-of-text token, but found none; .*--set eos_token=TOKEN"):
            load_tokenizer(source)
        with pytest.raises(ConfigError, match="found '<end>', which is not in its vocabulary"):
            load_tokenizer(source, eos_token="<end>")
        assert load_tokenizer(source, eos_token=TURN) is not None

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("tokenizer.json", "{"),
            ("tokenizer.json", '{"version": "1.0"}'),
            ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}'),
            ("tokenizer.model", "nonsense"),
        ],
    )
    def test_broken(self, tmp_path: Path, name: str, text: str):
        source = source_of(tmp_path)
        (tmp_path / name).write_text(text)
        with pytest.raises(
            ConfigError, match=f"^--model '.*': expected a tokenizer in '{tmp_path}', but loading"
        ) as refusal:
            load_tokenizer(source)
        assert "\n" not in str(refusal.value)
