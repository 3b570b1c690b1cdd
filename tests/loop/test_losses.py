"""The loss without all logits at once: the plain loss up to rounding, and the same under every plan."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outcore import losses
from outcore.core.errors import ConfigError, UnsupportedError

from .rig import DEVICE, adamw, assert_same, prepared, seen

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


# PEFT warns about a name that Transformers has changed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_ROWS", 8)


def llama(**changes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **changes))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2, output_router_logits=True))


BUILDS = {
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "adapters": lambda: get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")),
}
each_model = pytest.mark.parametrize("name", BUILDS)


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return BUILDS[name]().to(DEVICE, dtype).train()


def batch(seed: int = 0) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (3, 13), generator=numbers, device="cpu").to(DEVICE)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def loss_and_gradients(model: nn.Module, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    torch.manual_seed(1)
    result = model(**batch(), **more)
    result.loss.backward()
    return result.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, result


def agree(want: Any, got: Any, of_loss: float, of_gradients: float) -> None:
    assert want[0].dtype == got[0].dtype == torch.float32
    torch.testing.assert_close(got[0], want[0], rtol=of_loss, atol=0)
    assert want[1].keys() == got[1].keys()
    for name, grad in want[1].items():
        assert got[1][name].dtype == grad.dtype
        gap = (got[1][name].double() - grad.double()).norm() / grad.double().norm().clamp(min=1e-12)
        assert gap <= of_gradients, f"{name}: {gap}"


@each_model
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 17}], ids=["mean", "sum"])
def test_plain_loss_up_to_rounding(name: str, more: dict[str, Any]):
    want = loss_and_gradients(make(name), **more)
    model = make(name)
    assert losses.chunked(model) is model
    got = loss_and_gradients(model, **more)
    agree(want, got, 1e-6, 5e-6)
    assert want[2].logits is not None
    assert got[2].logits is None
    assert set(got[2].keys()) == set(want[2].keys()) - {"logits"}


@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_half_precision(how: str):
    """The loss is as exact as the plain one; gradients have errors of the same size as the plain ones."""
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=how == "autocast"):
        want = loss_and_gradients(make("llama", dtype))
        got = loss_and_gradients(losses.chunked(make("llama", dtype)))
    agree(want, got, 2e-5, 2e-2)


def test_in_fp16_gradients_do_not_vanish_before_the_loss_is_scaled():
    """A mean over many tokens of many words: each word's share is far below what fp16 can hold."""
    torch.manual_seed(0)
    tokens, words, width, scale = 512, 8192, 16, 2.0**16
    hidden, weight = torch.randn(tokens, width), 0.1 * torch.randn(words, width)
    target = torch.randint(words, (tokens,))
    found = {}
    for dtype in (torch.float32, torch.float16):
        pair = [t.to(dtype).detach().clone().requires_grad_() for t in (hidden, weight)]
        loss = losses._ChunkedLoss.apply(target, -100, True, True, *pair)
        (scale * loss).backward()
        found[dtype] = [t.grad.float() for t in pair]
    for exact, half in zip(*found.values(), strict=True):
        assert (half - exact).norm() <= 5e-3 * exact.norm()
        assert int((half == 0).sum()) <= int((exact == 0).sum()) + half.numel() // 100


def test_without_labels_nothing_changes():
    model, twin = make("gpt2").eval(), losses.chunked(make("gpt2")).eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, twin(ids).logits)
        assert torch.equal(model.generate(ids, max_new_tokens=3), twin.generate(ids, max_new_tokens=3))
        loss = twin(ids, labels=ids).loss
        tuples = twin(ids, labels=ids, return_dict=False)
    torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=1e-6, atol=0)
    assert torch.equal(tuples[0], loss)
    assert torch.equal(copy.deepcopy(twin)(ids, labels=ids).loss, loss)


class Largest(TorchDispatchMode):
    """Records the most rows of logits that existed at once."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB,):
                self.most = max(self.most, tensor.numel() // VOCAB)
        return result


def test_few_rows_of_logits_at_once():
    with Largest() as largest:
        loss_and_gradients(losses.chunked(make("llama")))
    assert largest.most == 16  # the transposed weight; rows of logits are 8
    with Largest() as largest:
        loss_and_gradients(make("llama"))
    assert largest.most == 39


def micro_batches(model: nn.Module, optimizer: Any) -> Any:
    out = []
    for step in range(2):
        for i in range(2):
            loss = model(**batch(2 * step + i)).loss
            loss.backward()
            out.append(loss.detach())
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return out


@pytest.mark.parametrize(
    ("name", "kind", "is_first"),
    [
        ("llama", "host", True),
        ("llama", "plain", False),
        ("tied llama", "host", False),
        ("tied llama", "disk keep", True),
        ("adapters", "host", True),
        ("adapters", "host", False),
    ],
)
def test_same_under_every_plan(name: str, kind: str, is_first: bool, tmp_path: Path):
    model = losses.chunked(make(name))
    optimizer = adamw(model, fused=True)
    want = seen(micro_batches(model, optimizer), model, optimizer)
    twin = make(name)
    if is_first:
        losses.chunked(twin)
    with prepared(twin, adamw(twin), kind, tmp_path) as (twin, optimizer):
        if not is_first:
            losses.chunked(twin)
        assert_same(want, seen(micro_batches(twin, optimizer), twin, optimizer))


class Halved(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        loss = None if labels is None else self.loss_function(self.changed(logits), labels, VOCAB)
        return {"loss": loss, "logits": logits}

    def changed(self, logits: Any) -> Any:
        return logits / 2


class Clamped(Halved):
    def changed(self, logits: Any) -> Any:
        return logits.clamp(-1, 1)


class Cut(Halved):
    def changed(self, logits: Any) -> Any:
        return logits[..., : VOCAB - 1]


class Shifted(Halved):
    def changed(self, logits: Any) -> Any:
        return logits[..., :, :]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Halved, "this Halved computes with them .truediv.; keep the plain loss"),
        (Clamped, "this Clamped asks for their clamp"),
        (Cut, "this Cut leaves words out"),
    ],
)
def test_models_that_change_their_logits(kind: Any, says: str):
    model = losses.chunked(kind(LlamaConfig(**SHAPE)))
    with pytest.raises(UnsupportedError, match=says):
        model(**batch())
    assert losses.chunked(Shifted(LlamaConfig(**SHAPE)))(**batch())["loss"].isfinite()


def test_refused():
    capped = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8))
    with pytest.raises(UnsupportedError, match="this Gemma2ForCausalLM changes them by final_logit_softcapping 30.0"):
        losses.chunked(capped)
    config = LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="output embeddings are a plain nn.Linear.*leave adapters off them"):
        losses.chunked(get_peft_model(llama(), config))
    with pytest.raises(ConfigError, match="those of this Linear are a NoneType"):
        losses.chunked(nn.Linear(2, 2))
    model = losses.chunked(make("llama"))
    with pytest.raises(ConfigError, match="the loss of this LlamaForCausalLM is chunked already"):
        losses.chunked(model)
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="expected one backward through the chunked loss"):
        loss.backward()
