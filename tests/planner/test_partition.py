"""Partition of plain modules: every rule of docs/explanation/units.md, 'How units are found'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.model.partition import choose_precision, partition
from outcore.model.unit_modules import LARGE_EMBEDDING_NUMEL

from .models import Block, Plain, Stack


def names(model, **options):
    return [u.name for u in partition(model, **options).spec.units]


def owners(model, **options):
    """Parameter name -> unit name."""
    return {p.name: u.name for u in partition(model, **options).spec.units for p in u.params}


class Other(Block):
    """A block of another class."""


class Large(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(LARGE_EMBEDDING_NUMEL // 8, 8, device="meta")


class TestBlocks:
    def test_module_list(self):
        assert names(Stack(3)) == ["", "blocks.0", "blocks.1", "blocks.2"]

    def test_a_list_of_one(self):
        assert names(Stack(1)) == ["", "blocks.0"]

    def test_a_list_of_different_blocks(self):
        model = Plain(layers=nn.ModuleList([Block(), Other(), Block(3)]))
        assert names(model) == ["", "layers.0", "layers.1", "layers.2"]

    def test_a_list_with_leaves_counts_only_blocks_that_come_twice(self):
        model = Plain(layers=nn.ModuleList([nn.Linear(5, 5), Block(), Block(), Other()]))
        assert names(model) == ["", "layers.1", "layers.2"]

    def test_sequential(self):
        blocks = nn.Sequential(Block(), Block())
        assert names(nn.Sequential(nn.Linear(5, 5), blocks, nn.Linear(5, 2))) == ["", "1.0", "1.1"]

    def test_sequential_of_sequentials(self):
        layers = [nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(3)]
        assert names(nn.Sequential(*layers)) == ["", "0", "1", "2"]

    def test_stages_of_blocks(self):
        model = Plain(stage1=nn.Sequential(Block(), Block()), stage2=nn.Sequential(Block(), Block()))
        assert names(model) == ["", "stage1.0", "stage1.1", "stage2.0", "stage2.1"]

    def test_module_dict(self):
        model = Plain(towers=nn.ModuleDict({"left": Block(), "right": Block()}))
        assert names(model) == ["", "towers.left", "towers.right"]

    def test_attributes_of_one_class(self):
        model = Plain(first=Block(), second=Block(), head=nn.Linear(5, 2))
        assert names(model) == ["", "first", "second"]

    def test_encoder_beside_decoder(self):
        model = Plain(encoder=Stack(2), decoder=Stack(1))
        assert names(model) == ["", "encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.0"]

    def test_the_outermost_wins(self):
        experts = [Plain(experts=nn.ModuleList([Block(), Block()]), router=nn.Linear(5, 2)) for _ in range(2)]
        assert names(Plain(layers=nn.ModuleList(experts))) == ["", "layers.0", "layers.1"]

    def test_torch_transformer(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        assert names(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) == ["", "layers.0", "layers.1"]

    @pytest.mark.parametrize(
        "model",
        [
            nn.Linear(3, 3),
            nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
            Plain(layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(4))),
            Plain(a=nn.LSTM(3, 3), b=nn.LSTM(3, 3)),
            Block(),
            nn.ReLU(),
        ],
    )
    def test_without_blocks_all_is_root(self, model):
        assert names(model) == [""]
        assert len(partition(model).params[0]) == len(list(model.parameters()))

    def test_lists_are_never_units(self):
        model = Plain(towers=nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])]))
        assert names(model) == ["", "towers.0.0", "towers.0.1", "towers.1.0"]

    def test_modules_without_forward_are_never_units(self):
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Block()

        assert names(Plain(a=Holder(), b=Holder())) == [""]

    def test_a_module_under_two_names_is_one_unit(self):
        shared = Block()
        model = Plain(layers=nn.ModuleList([shared, Block(), shared]))
        found = partition(model)
        assert [u.name for u in found.spec.units] == ["", "layers.0", "layers.1"]
        assert found.modules == (model, shared, model.layers[1])
        assert all(p.name.startswith("layers.0") for p in found.spec.units[1].params)

    def test_a_unit_inside_another_by_a_second_name_is_none(self):
        shared = Block()
        model = Plain(layers=nn.ModuleList([shared, Plain(inner=shared, out=nn.Linear(5, 5))]))
        assert names(model) == ["", "layers.1"]
        assert owners(model)["layers.0.up.weight"] == ""


class TestEmbeddings:
    def test_large_ones_are_units(self):
        model = Plain(embed=Large(), small=nn.Embedding(9, 8), blocks=Stack(2), head=nn.Linear(8, 3))
        assert names(model) == ["", "embed", "blocks.blocks.0", "blocks.blocks.1"]

    def test_not_when_tied(self):
        model = Plain(embed=Large(), head=nn.Linear(8, 3, bias=False))
        model.head.weight = model.embed.weight
        assert names(model) == [""]
        assert owners(model) == {"embed.weight": ""}

    def test_not_when_it_is_the_output_embedding(self):
        model = Plain(embed=Large(), out=Large())
        model.get_output_embeddings = lambda: model.out
        assert names(model) == ["", "embed"]

    def test_not_inside_a_unit(self):
        model = Plain(layers=nn.ModuleList([Plain(embed=Large(), up=Block()) for _ in range(2)]))
        assert names(model) == ["", "layers.0", "layers.1"]

    def test_output_embeddings_inside_a_unit_stay_in_the_root(self):
        model = Stack(2)
        model.get_output_embeddings = lambda: model.blocks[1].down
        assert owners(model)["blocks.1.down.weight"] == owners(model)["blocks.1.down.bias"] == ""
        assert owners(model)["blocks.1.up.weight"] == "blocks.1"


class TestSharing:
    def test_a_parameter_of_two_units_is_the_roots(self):
        model = Stack(3)
        model.blocks[2].up.weight = model.blocks[0].up.weight
        assert owners(model)["blocks.0.up.weight"] == ""
        assert "blocks.2.up.weight" not in owners(model)
        assert sum(len(u.params) for u in partition(model).spec.units) == 11

    def test_a_parameter_of_a_unit_and_the_root_is_the_roots(self):
        model = Plain(head=nn.Linear(5, 10), stack=Stack(2))
        model.head.weight = model.stack.blocks[0].up.weight
        assert owners(model)["head.weight"] == ""

    def test_a_module_of_two_units_is_the_roots(self):
        model = Stack(2)
        model.blocks[0].shared = model.blocks[1].shared = nn.BatchNorm1d(5)
        found = partition(model)
        assert owners(model)["blocks.0.shared.weight"] == ""
        assert [u.buffer_bytes for u in found.spec.units] == [4096, 0, 0]

    def test_tied_inside_one_unit_is_one_parameter(self):
        model = Stack(2)
        model.blocks[0].tied = nn.Linear(5, 10)
        model.blocks[0].tied.weight = model.blocks[0].up.weight
        assert [p.name for p in partition(model).spec.units[1].params].count("blocks.0.up.weight") == 1
        assert owners(model)["blocks.0.up.weight"] == "blocks.0"
        assert "blocks.0.tied.weight" not in owners(model)


class TestParameters:
    def test_everything_once_and_parallel(self):
        model = Plain(head=nn.Linear(5, 3), stack=Stack(2), extra=nn.BatchNorm1d(5))
        found = partition(model)
        expected = dict(model.named_parameters())
        pairs = [
            (spec, param)
            for unit, params in zip(found.spec.units, found.params, strict=True)
            for spec, param in zip(unit.params, params, strict=True)
        ]
        assert {s.name: p for s, p in pairs} == expected
        assert len(pairs) == len(expected)
        assert all(s.shape == tuple(p.shape) for s, p in pairs)
        assert [m is n for m, n in zip(found.modules, (model, *model.stack.blocks), strict=True)] == [True] * 3

    def test_trainable_first_in_module_order(self):
        model = Stack(2)
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[0].down.weight.requires_grad_(False)
        unit = partition(model).spec.units[1]
        assert [(p.name.removeprefix("blocks.0."), p.requires_grad) for p in unit.params] == [
            ("up.bias", True),
            ("down.bias", True),
            ("up.weight", False),
            ("down.weight", False),
        ]

    def test_empty_parameters_are_legal(self):
        model = Stack(2)
        model.blocks[0].empty = nn.Parameter(torch.empty(0, 3))
        assert owners(model)["blocks.0.empty"] == "blocks.0"

    def test_buffers_are_counted_in_pages_once(self):
        model = Stack(2)
        model.blocks[0].register_buffer("mask", torch.zeros(1025))
        model.blocks[0].register_buffer("again", model.blocks[0].mask, persistent=False)
        assert [u.buffer_bytes for u in partition(model).spec.units] == [0, 8192, 0]

    def test_parametrizations_are_just_parameters(self):
        model = Stack(2)
        nn.utils.parametrizations.weight_norm(model.blocks[0].up)
        assert owners(model)["blocks.0.up.parametrizations.weight.original0"] == "blocks.0"

    def test_reads_no_value(self):
        with torch.device("meta"):
            assert names(Stack(2)) == ["", "blocks.0", "blocks.1"]


class TestPrecision:
    def dtypes(self, model, precision=None):
        found = partition(model, precision=precision).spec
        return found.precision, {p.name: (p.dtype, p.update_dtype) for u in found.units for p in u.params}

    def test_fp32(self):
        precision, dtypes = self.dtypes(Stack(1))
        assert precision == "fp32"
        assert set(dtypes.values()) == {("float32", "float32")}

    def test_bf16(self):
        precision, dtypes = self.dtypes(Stack(1).bfloat16())
        assert precision == "bf16"
        assert set(dtypes.values()) == {("bfloat16", "float32")}

    def test_fp16_and_fp64(self):
        assert set(self.dtypes(Stack(1).half())[1].values()) == {("float16", "float32")}
        assert self.dtypes(Stack(1).half())[0] == "fp16"
        assert set(self.dtypes(Stack(1), "fp16")[1].values()) == {("float16", "float32")}
        assert self.dtypes(Stack(1).double()) == self.dtypes(Stack(1), "fp64")
        assert set(self.dtypes(Stack(1), "fp64")[1].values()) == {("float64", "float64")}
        assert set(self.dtypes(Stack(1).double(), "bf16")[1].values()) == {("bfloat16", "float32")}

    def test_adapters_in_fp32_on_a_frozen_bf16_base_stay_so(self):
        model = Stack(1).bfloat16().requires_grad_(False)
        model.blocks[0].adapter = nn.Linear(5, 5)
        for precision in (None, "fp32"):
            chosen, dtypes = self.dtypes(model, precision)
            assert chosen == "fp32"
            assert dtypes["blocks.0.adapter.weight"] == ("float32", "float32")
            assert dtypes["blocks.0.up.weight"] == ("bfloat16", "float32")
        precision, dtypes = self.dtypes(model, "bf16")  # the model is in bf16 already: nothing is converted
        assert precision == "bf16"
        assert dtypes["blocks.0.adapter.weight"] == ("float32", "float32")
        assert dtypes["blocks.0.up.weight"] == ("bfloat16", "float32")

    def test_an_fp32_norm_in_a_bf16_model_stays_fp32(self):
        model = Stack(1).bfloat16()
        model.norm = nn.LayerNorm(5)
        assert self.dtypes(model)[1]["norm.weight"] == ("float32", "float32")
        assert self.dtypes(model, "bf16")[1]["norm.weight"] == ("float32", "float32")
        precision, dtypes = self.dtypes(model, "pure_bf16")
        assert precision == "pure_bf16"
        assert dtypes["norm.weight"] == ("float32", "float32")
        assert dtypes["blocks.0.up.weight"] == ("bfloat16", "bfloat16")

    @pytest.mark.parametrize("asked", ["bf16", "pure_bf16"])
    def test_another_precision_converts_all(self, asked):
        update_dtype = "float32" if asked == "bf16" else "bfloat16"
        assert set(self.dtypes(Stack(1), asked)[1].values()) == {("bfloat16", update_dtype)}

    def test_fp32_asked_of_a_bf16_model(self):
        assert set(self.dtypes(Stack(1).bfloat16(), "fp32")[1].values()) == {("float32", "float32")}

    def test_of_a_frozen_model_is_that_of_its_weights(self):
        assert choose_precision(Stack(1).bfloat16().requires_grad_(False)) == "bf16"
        assert choose_precision(Stack(1).requires_grad_(False)) == "fp32"

    def test_unknown(self):
        with pytest.raises(ConfigError, match="expected one of fp32, .* or None, but got 'fp8'"):
            partition(Stack(1), precision="fp8")


class TestChosenUnits:
    model = Plain(embed=Large(), stack=Stack(3), other=Other(), head=nn.Linear(5, 2))

    @pytest.mark.parametrize(
        ("units", "expected"),
        [
            ([], []),
            ([Block], ["stack.blocks.0", "stack.blocks.1", "stack.blocks.2", "other"]),  # subclasses too
            (["Block"], ["stack.blocks.0", "stack.blocks.1", "stack.blocks.2"]),
            (["Stack", "embed"], ["embed", "stack"]),
            (["head", "stack.blocks.1"], ["stack.blocks.1", "head"]),  # in module order
            (["stack.blocks.*"], ["stack.blocks.0", "stack.blocks.1", "stack.blocks.2"]),
            (["stack.blocks.[02]", "stack.blocks.0"], ["stack.blocks.0", "stack.blocks.2"]),
            (("*.blocks.2.up", nn.Embedding), ["embed", "stack.blocks.2.up"]),
        ],
    )
    def test_exactly_these(self, units, expected):
        assert names(self.model, units=units) == ["", *expected]

    @pytest.mark.parametrize(
        ("units", "message"),
        [
            (["stack.block.*"], r"'stack.block.\*' matches nothing inside the model; nearest: 'stack.blocks"),
            (["Blok"], "'Blok' matches nothing inside the model; nearest: 'Block'"),
            (["zzz"], "'zzz' matches nothing inside the model$"),
            ([nn.LSTM], "'LSTM' matches nothing"),
            (["Plain"], "'Plain' matches nothing"),  # the model itself is the root
            (["stack", "stack.blocks.1"], "'stack.blocks.1' lies inside 'stack'"),
            (["stack.blocks"], r"'stack.blocks' \(ModuleList\) has no forward; name its children"),
            ("Block", r"expected a list of classes or names, but got 'Block'; write units=\[...\]"),
            (Block, "expected a list of classes or names"),
            ([3], "expected classes, names of classes or names of modules, but got 3"),
        ],
    )
    def test_refuses(self, units, message):
        with pytest.raises(ConfigError, match=message):
            names(self.model, units=units)


class AbsentParameter(nn.Parameter):
    """A stand-in for the runtime's class of that name."""


class Sharded(nn.Parameter):
    """A stand-in for a tensor subclass."""


def with_parameter(param: nn.Parameter) -> nn.Module:
    model = Stack(1)
    model.blocks[0].odd = param
    return model


class TestRefusals:
    @pytest.mark.parametrize(
        ("dtype", "advice"),
        [
            (torch.complex64, "a conversion would drop its imaginary part: .* real parameter .torch.view_as_real"),
            (torch.float8_e4m3fn, "it is quantized, .* load the model in full precision, or make it a buffer"),
            (torch.int8, "it is quantized, .* load the model in full precision, or make it a buffer"),
            (torch.uint8, "it is quantized, .* load the model in full precision, or make it a buffer"),
        ],
        ids=str,
    )
    def test_dtypes(self, dtype, advice):
        param = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
        with pytest.raises(ConfigError, match=f"or float64, but 'blocks.0.odd' is {dtype}; {advice}"):
            partition(with_parameter(param))

    def test_a_prepared_model(self):
        with pytest.raises(ConfigError, match=r"'blocks\.0\.odd' are not inside it: it is prepared already"):
            partition(with_parameter(AbsentParameter(torch.zeros(3))))

    def test_subclasses(self):
        with pytest.raises(UnsupportedError, match=r"'blocks\.0\.odd' is .*Sharded; hand over the model before"):
            partition(with_parameter(Sharded(torch.zeros(3))))

    def test_lazy_modules(self):
        with pytest.raises(ConfigError, match=r"'up\.weight' is not initialized yet; run one forward pass"):
            partition(Plain(up=nn.LazyLinear(3)))

    def test_sparse_layout(self):
        param = nn.Parameter(torch.zeros(3, 3).to_sparse())
        with pytest.raises(UnsupportedError, match=r"expected dense leaf parameters, but 'blocks\.0\.odd' has layout"):
            partition(with_parameter(param))

    def test_embeddings_that_change_themselves(self):
        with pytest.raises(UnsupportedError, match="embedding 'embed' renormalizes its own in forward"):
            partition(Plain(embed=nn.Embedding(3, 3, max_norm=1.0)))

    def test_sparse_gradients(self):
        with pytest.raises(UnsupportedError, match="embedding 'embed' was built with sparse=True"):
            partition(Plain(embed=nn.EmbeddingBag(3, 3, sparse=True)))

    def test_parameters_over_the_same_memory(self):
        model = Stack(1)
        model.head = nn.Linear(5, 10)
        model.head.weight = nn.Parameter(model.blocks[0].up.weight.data)
        with pytest.raises(ConfigError, match=r"'blocks\.0\.up\.weight' and 'head\.weight' overlap; tie them"):
            partition(model)

    def test_slices_of_one_buffer_are_fine(self):
        model, flat = Plain(a=nn.Linear(2, 2), b=nn.Linear(2, 2)), torch.zeros(8)
        model.a.weight, model.b.weight = (nn.Parameter(half.view(2, 2)) for half in flat.chunk(2))
        assert len(owners(model)) == 4
