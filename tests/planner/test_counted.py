"""Work counted from shapes alone equals what torch counts in real passes, for any model, frozen parts included."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import masking_utils

from outcore.core.errors import ConfigError
from outcore.model.equal_calls import Shape, kind_of
from outcore.model.partition import partition
from outcore.planner.forward.calls import calls_of
from outcore.planner.forward.shapes import _answer, _packs_nothing
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.profile import UnitWork, rates_for, unit_work

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
SIZES |= {"hidden_size": 64, "intermediate_size": 96, "bos_token_id": 0, "eos_token_id": 1}
BATCH, LENGTH = 2, 32


class Net(nn.Module):
    """A model with blocks, and with a convolution and a table in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.table(ids).mT).mT.contiguous()
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


def counted(model: nn.Module, **sample: torch.Tensor) -> dict[str, UnitWork]:
    return counted_work(partition(model, state_names=("exp_avg", "exp_avg_sq")), sample, CPU)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_products_are_those_of_the_shapes(device: str):
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    spec = partition(model, precision="fp32").spec
    expected = unit_work(model, spec, batch_size=BATCH, seq_len=LENGTH)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cpu")
    found = counted(model, input_ids=ids, use_cache=False)
    assert {n: w.product_flops for n, w in found.items()} == {n: w.product_flops for n, w in expected.items()}
    assert found["model.layers.0"].attention_flops > 0
    assert found["model.layers.0"] == found["model.layers.1"]
    assert all(p.device.type == device for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_of_experts_those_products_count_that_tokens_are_sent_to(precision: str, caplog: pytest.LogCaptureFixture):
    sizes = {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).to(dtype)
    spec = partition(model, precision=precision).spec
    expected = unit_work(model, spec, batch_size=BATCH, seq_len=LENGTH)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cpu")
    found = counted(model, input_ids=ids, use_cache=False)
    assert {n: w.product_flops for n, w in found.items()} == {n: w.product_flops for n, w in expected.items()}
    assert not any(w.frozen_flops for w in found.values())
    assert not caplog.records  # torch logs what it cannot follow


def test_a_mask_that_hides_nothing_leaves_attention_causal():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cpu")
    shown, hidden = torch.ones_like(ids), torch.ones_like(ids).tril()
    flops = [counted(model, input_ids=ids, attention_mask=mask, use_cache=False) for mask in (shown, hidden)]
    causal, masked = (work["model.layers.0"].attention_flops for work in flops)
    assert 2 * causal == masked == 4 * 64 * BATCH * LENGTH * LENGTH


def test_attention_that_sees_both_ways_counts_whole():
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    sizes["attention_probs_dropout_prob"] = 0.0  # otherwise attention is not a single kernel
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cpu")
    found = counted(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert found["bert.encoder.layer.0"].attention_flops == 4 * 64 * BATCH * LENGTH * LENGTH


class Kernel(nn.Module):
    """Attention as an accelerator runs it in training: one more switch is on, for backward."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.block, self._is_causal = nn.Linear(16, 48), is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.block(x).view(*x.shape[:2], 2, 3, 8).transpose(1, 2).unbind(3)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, None, True, 0.0, self._is_causal)[0].sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_other_switches_of_attention_say_nothing_of_what_it_sees(is_causal: bool):
    found = counted(Kernel(is_causal=is_causal), x=torch.empty(BATCH, LENGTH, 16, device="meta"))
    assert found[""].attention_flops == 4 * 16 * BATCH * LENGTH * LENGTH / (1 + is_causal)


@pytest.mark.parametrize("frozen", [(), ("blocks.0.0.weight",), ("table.weight", "conv.weight", "conv.bias")])
def test_forward_and_backward_are_what_torch_counts(frozen: tuple[str, ...]):
    model, ids = Net(), torch.zeros(3, 7, dtype=torch.long, device="cpu")
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    work = counted(model, ids=ids).values()
    with FlopCounterMode(display=False) as real:
        loss = model(ids)
    forward = real.get_total_flops()
    with FlopCounterMode(display=False) as real:
        loss.backward()
    assert sum(w.product_flops for w in work) == forward
    assert sum(2 * w.product_flops - w.frozen_flops for w in work) == real.get_total_flops()


def test_other_kernels_count_by_their_bytes_and_tables_by_what_they_give():
    model, ids = Net(), torch.zeros(3, 7, dtype=torch.long, device="cpu")
    found = counted(model, ids=ids)
    activation = 2 * 3 * 7 * 16 * 4  # read and written by GELU
    residual = 3 * 3 * 7 * 8 * 4
    assert found["blocks.0"].moved_bytes == activation
    looked_up = 2 * 3 * 7 * 8 * 4
    assert activation + 2 * residual + looked_up <= activation + found[""].moved_bytes < 4 * 1000 * 8


def test_it_takes_time_by_what_it_is_bound_by():
    spec = partition(Net(), state_names=(), precision="fp32").spec
    hardware = known_hardware("rtx-4090")
    rate = hardware.device.bytes_per_s
    one = UnitWork(product_flops=0, attention_flops=0, moved_bytes=rate)
    rates = rates_for(hardware, spec, {"": one})
    assert rates.forward_s[""] == pytest.approx(1)
    assert rates.backward_s[""] == pytest.approx(2)
    quantised = UnitWork(product_flops=0, attention_flops=0, moved_bytes=rate, unpacked_bytes=rate)
    rates = rates_for(hardware, spec, {"": quantised})
    assert rates.forward_s[""] == pytest.approx(2)
    assert rates.backward_s[""] == pytest.approx(3)
    assert rates.selected_forward_s[""] == pytest.approx(1)  # products are saved


def test_a_model_that_needs_values_says_so():
    class Choosy(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) if int(ids.sum()) else ids.sum()

    with pytest.raises(ConfigError, match="sample: expected keyword arguments with which the model runs on shapes"):
        counted(Choosy(), ids=torch.zeros(3, 7, dtype=torch.long, device="cpu"))


def test_blocks_that_repeat_something_more_often_are_not_the_same():
    """Equal parameters and arguments, but an attribute says how often; the number of a layer says nothing."""

    class Repeats(nn.Module):
        def __init__(self, times: int, layer_idx: int) -> None:
            super().__init__()
            self.linear, self.times, self.layer_idx = nn.Linear(16, 16), times, layer_idx

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.linear(x)
            return x

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Repeats(times, i) for i, times in enumerate((1, 5, 1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    found = counted(Tower(), x=torch.empty(BATCH, 16, device="meta"))
    flops = [found[f"blocks.{i}"].product_flops for i in range(3)]
    assert flops == [2 * BATCH * 16 * 16 * times for times in (1, 5, 1)]
    blocks = Tower().blocks
    assert len({kind_of(block, [], None) for block in blocks}) == 2


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "position_ids"])
def test_blocks_get_masks_as_in_a_real_forward(name, monkeypatch):
    """Without position IDs nothing is packed, so there is no mask; a padded row of a later batch has one."""
    model, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), torch.zeros(2, 8, dtype=torch.long)
    values = {"attention_mask": torch.ones(2, 8).tril(6), "position_ids": torch.arange(8).remainder(5).expand(2, 8)}
    sample = {"input_ids": ids, name: values.get(name, ids), "use_cache": False}
    find = masking_utils.find_packed_sequence_indices
    cut = partition(model, state_names=("exp_avg",), precision="fp32")
    (call,) = calls_of(cut, sample, torch.device("cpu")).kinds.values()
    masks = [leaf.size for leaf in call.leaves if isinstance(leaf, Shape) and len(leaf.size) == 4]
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(**sample)
    assert masks == [mask.shape for mask in seen if mask is not None]
    assert len(masks) == (name != "input_ids")
    assert masking_utils.find_packed_sequence_indices is find


def test_who_follows_shapes_puts_back_what_was_there():
    """Also if two threads do so at once: the second waits for the first."""
    find, first = masking_utils.find_packed_sequence_indices, ExitStack()
    question = "masking_utils", "find_packed_sequence_indices", _packs_nothing
    _answer(first, *question)

    def follow() -> None:
        with ExitStack() as second:
            _answer(second, *question)

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    first.close()
    thread.join(30)
    assert not thread.is_alive()
    assert masking_utils.find_packed_sequence_indices is find
