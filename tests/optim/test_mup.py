"""muP: what every parameter is, how it starts, and at which rate it learns."""

import copy
import math
import re

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import structattn as sa
from structattn import mup
from structattn.errors import ConfigError
from structattn.layers.scoring import Matrix
from structattn.layout.text import TextUnits
from structattn.matrices import FAMILIES, Butterfly, Structure
from structattn.models.forecaster import Forecaster
from structattn.models.icl_regressor import ICLRegressor
from structattn.optim.roles import Role
from structattn.spec.attention import FORMS, parse_spec
from structattn.testing.tolerances import assert_close

E, H = 32, 4
SIZES = {"embed_dim": E, "num_layers": 1, "num_heads": H}


def icl(spec: str = "standard", **options) -> ICLRegressor:
    return ICLRegressor(spec, dim=4, num_points=4, **{**SIZES, **options})


def hidden(fan_in: int) -> Role:
    return Role(kind="hidden", fan_in=fan_in)


def output(fan_in: int) -> Role:
    return Role(kind="output", fan_in=fan_in)


def factor(fan_in: int, uses: int = 1) -> Role:
    return Role(kind="factor", fan_in=fan_in, uses=uses)


NORM, BIAS, GAIN, EMBEDDING = (Role(kind=kind) for kind in ("norm", "bias", "gain", "embedding"))
BLOCK = {
    "attention_norm.weight": NORM,
    "mlp_norm.weight": NORM,
    "attention.value_proj.weight": hidden(E),
    "attention.out_proj.weight": output(E),
    "mlp.up.weight": hidden(E),
    "mlp.down.weight": output(4 * E),
}
HEAD_NORMS = {"attention.scoring.q_norm.weight": NORM, "attention.scoring.k_norm.weight": NORM}
# By hand, at E = 32 = 8 * 4: c = 8, d = 4, b = 4, a = 8 of a BTT.
SCORING = {
    "standard": {"left": factor(32), "right": factor(32)},
    "bilinear-btt:1": {"left": factor(8), "right": factor(4)},
    "bilinear-btt:2": {"left": factor(16), "right": factor(4)},
    "bilinear-mlr:4|2|2": {
        f"{side}.{level}": factor(32 // 2**level) for side in ("left", "right") for level in range(3)
    },
    "bilinear-lowrank:8": {"left": factor(8), "right": factor(32)},
    "bilinear-dense": {"weight": factor(32)},
    "bilinear-monarch": {"left": factor(8), "right": factor(4)},
    "bilinear-kronecker": {"outer": factor(8, 4), "inner": factor(4, 8)},
    "mlr:4|2|2": {"left": factor(32), "right": factor(32)},
}


@pytest.mark.parametrize("spec", SCORING)
def test_roles_of_a_block_by_hand(spec) -> None:
    model = icl(spec)
    roles = mup.roles_of(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    expected = {f"trunk.blocks.0.{name}": role for name, role in BLOCK.items()}
    expected |= {f"trunk.blocks.0.attention.scoring.matrix.{name}": role for name, role in SCORING[spec].items()}
    expected |= {"trunk.position": EMBEDDING, "trunk.norm.weight": NORM, "read_out.weight": output(E)}
    found = {name: role for name, role in roles.items() if "scoring" not in name or "matrix" in name}
    assert found.pop("read_in.weight").kind == "embedding"
    assert found == expected
    assert {role for name, role in roles.items() if "scoring" in name and "matrix" not in name} == {NORM}


@pytest.mark.parametrize("example", [f.example for f in FORMS.values() if parse_spec(f.example).custom is None])
def test_every_form_has_roles_and_both_ends(example) -> None:
    with torch.device("meta"):
        model = sa.LanguageModel(
            50,
            str(parse_spec(example).with_scaling("mup")),
            embed_dim=256,
            num_layers=2,
            num_heads=4,
            context_length=64,
            text_units=TextUnits.of(["a"] * 50),
        )
    roles = mup.roles_of(model)
    assert set(roles) == {name for name, _ in model.named_parameters()}
    assert roles["embedding.weight"] == EMBEDDING
    assert roles["read_out.weight"] == output(256)
    kinds = {role.kind for role in roles.values()}
    assert kinds <= {"embedding", "norm", "hidden", "output", "factor", "gain"}


def test_roles_of_the_other_models() -> None:
    forecaster = Forecaster("mlr:4|4", look_back=32, horizon=4, patch_length=8, stride=8, **SIZES)
    roles = mup.roles_of(forecaster)
    assert roles["embed.weight"].kind == "embedding"
    assert roles["embed.bias"] == roles["head.bias"] == BIAS
    assert roles["head.weight"] == output(4 * E)
    bilinear = mup.roles_of(sa.Attention(32, 2, scoring=sa.scoring.BTT(rank=1)))
    assert bilinear["value_proj.weight"] == hidden(32)
    assert bilinear["scoring.matrix.left"] == factor(8)
    biased = mup.roles_of(sa.Attention(32, 4, bias=True))
    assert biased["value_proj.bias"] == biased["out_proj.bias"] == biased["scoring.q_norm.bias"] == BIAS


@pytest.mark.parametrize("tied", [False, True])
def test_roles_of_the_hugging_face_model(tied) -> None:
    pytest.importorskip("transformers")
    from structattn.integrations.transformers import StructAttnConfig, StructAttnForCausalLM

    config = StructAttnConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=tied, attention="standard",
    )  # fmt: skip
    model = StructAttnForCausalLM(config)
    roles = mup.roles_of(model)
    assert set(roles) == {name for name, _ in model.named_parameters()}
    assert roles["model.embed_tokens.weight"] == EMBEDDING
    assert ("lm_head.weight" in roles) != tied
    assert tied or roles["lm_head.weight"] == output(32)
    ends = {name.split(".", 3)[-1]: role for name, role in roles.items() if "layers" in name}
    assert ends["mlp.gate_proj.weight"] == ends["mlp.up_proj.weight"] == hidden(32)
    assert ends["mlp.down_proj.weight"] == output(48)
    mup.initialize(model)
    assert model.lm_head.weight.detach().std() == pytest.approx(0.02 if tied else 0.0, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_of_structured_layers(family) -> None:
    layer = sa.StructuredLinear(32, 32, FAMILIES[family].example if family != "mlbtc" else "mlbtc:1x1x8|4x4x16s")
    roles = mup.roles_of(layer)
    assert roles.pop("bias") == BIAS
    for name, role in roles.items():
        short = name.removeprefix("matrix.")
        fan_ins = layer.matrix.product_fan_ins
        assert (role.kind, role.fan_in) == (("factor", fan_ins[short]) if short in fan_ins else ("gain", 1))
    assert len(roles) == sum(1 for _ in layer.matrix.parameters())


@pytest.mark.parametrize("spec", ["standard", "bilinear-btt:1", "bilinear-btt:2", "bilinear-mlr:32|16|8|8"])
def test_initial_scales_of_a_wide_model(spec) -> None:
    model = icl(spec, embed_dim=256)
    torch.manual_seed(0)
    mup.initialize(model)
    for name, role in mup.roles_of(model).items():
        value = model.get_parameter(name).detach()
        match role.kind:
            case "hidden" | "factor":
                assert value.std() == pytest.approx(role.fan_in**-0.5, rel=0.05)
                assert abs(value.mean()) < 0.2 * value.std()
            case "embedding":
                assert value.std() == pytest.approx(role.init_std, rel=0.1)
            case "output":
                assert not value.any()
            case "norm":
                assert (value == 1).all()
            case other:
                pytest.fail(other)


def test_every_factor_of_every_family_starts_at_its_fan_in() -> None:
    for family in FAMILIES.values():
        layer = sa.StructuredLinear(256, 256, family.example)
        mup.initialize(layer)
        # The one matrix of a dense layer is a hidden weight, not a factor.
        kinds = {"hidden", "factor"}
        factors = {name: role for name, role in mup.roles_of(layer).items() if role.kind in kinds}
        assert set(factors) == {name for name, _ in layer.named_parameters() if layer.get_parameter(name).dim() > 1}
        for name, role in factors.items():
            value = layer.get_parameter(name).detach()
            mean_square = value.square().mean()
            # The stages of a butterfly are orthogonal, so their mean square is exact.
            assert mean_square == pytest.approx(1 / role.fan_in, rel=0.25 if value.numel() > 500 else 0.5), (
                family,
                name,
            )


def test_butterflies_start_orthogonal() -> None:
    layer = sa.StructuredLinear(64, 64, "butterfly", bias=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    mup.initialize(layer)
    dense = layer.weight
    assert_close(dense @ dense.T, torch.eye(64))


class Own(nn.Module):
    """What a user writes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.read_in = nn.Linear(3, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width)
        self.read_out = nn.Linear(width, 2)

    def parameter_roles(self):
        width = self.mix.in_features
        return {
            "read_in.weight": EMBEDDING,
            "read_in.bias": BIAS,
            "mix.weight": hidden(width),
            "scale": GAIN,
            "read_out.weight": output(width),
            "read_out.bias": BIAS,
        }

    def forward(self, x):
        return self.read_out(self.norm(self.scale * self.mix(self.read_in(x))))


def test_own_module() -> None:
    model = Own()
    roles = mup.roles_of(model)
    assert roles["norm.weight"] == NORM
    assert roles["norm.bias"] == BIAS
    mup.initialize(model)
    assert (model.scale == 1).all()
    assert model.read_in.weight.detach().std() == pytest.approx(0.02, rel=0.2)


def test_undeclared_and_missing_parameters_are_named() -> None:
    model = nn.Sequential(Own(), nn.Linear(2, 5))
    with pytest.raises(ConfigError, match=re.escape("1.weight (5, 2)")):
        mup.roles_of(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError):
        mup.initialize(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    class Wrong(Own):
        def parameter_roles(self):
            return {**super().parameter_roles(), "mixx.weight": hidden(4)}

    with pytest.raises(ConfigError, match=r"Wrong declares a role for 'mixx\.weight'.*it has scale, read_in\.weight"):
        mup.roles_of(Wrong())

    class NoRole(Own):
        def parameter_roles(self):
            return {**super().parameter_roles(), "scale": "gain"}

    with pytest.raises(ConfigError, match="must declare a Role for 'scale', got 'gain'"):
        mup.roles_of(NoRole())


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "matrix"},
        {"kind": "hidden", "fan_in": 0},
        {"kind": "hidden", "fan_in": 2.0},
        {"kind": "hidden", "fan_in": True},
        {"kind": "bias", "fan_in": 3},
        {"kind": "hidden", "fan_in": 3, "std": 0.1},
        {"kind": "embedding", "std": 0.0},
        {"kind": "gain", "uses": 2},
        {"kind": "factor", "fan_in": 3, "uses": 0},
    ],
)
def test_wrong_roles(arguments) -> None:
    with pytest.raises(ConfigError):
        Role(**arguments)


class Holder(nn.Module):
    """Declares a role for a linear layer, which may be shared."""

    def __init__(self, layer: nn.Module, role: Role) -> None:
        super().__init__()
        self.layer = layer
        self.role = role

    def parameter_roles(self):
        return {"layer.weight": self.role}


def test_sharing_and_who_wins() -> None:
    shared = nn.Linear(8, 8, bias=False)
    both = nn.ModuleList([Holder(shared, hidden(8)), Holder(shared, output(8))])
    with pytest.raises(ConfigError, match="has two roles"):
        mup.roles_of(both)
    agreed = nn.ModuleList([Holder(shared, hidden(8)), Holder(shared, hidden(8))])
    assert mup.roles_of(agreed) == {"0.layer.weight": hidden(8)}
    # A module overrules its parts, however deep they are.
    outer = Holder(nn.Sequential(Holder(shared, hidden(8))), output(8))
    outer.parameter_roles = lambda: {"layer.0.layer.weight": output(8)}  # type: ignore[method-assign]
    assert mup.roles_of(outer) == {"layer.0.layer.weight": output(8)}
    # Depth is not enough: of two sibling modules, neither takes precedence.
    for parts in (
        [nn.ModuleList([Holder(shared, hidden(8))]), Holder(shared, output(8))],
        [Holder(shared, output(8)), outer.layer],
    ):
        with pytest.raises(ConfigError, match="has two roles"):
            mup.roles_of(nn.ModuleList(parts))


def test_a_conflict_below_the_winner_does_not_matter() -> None:
    shared = nn.Linear(8, 8, bias=False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Holder(shared, hidden(8)), Holder(shared, output(8))])

        def parameter_roles(self):
            return {"parts.0.layer.weight": hidden(8)}

    assert mup.roles_of(Both()) == {"parts.0.layer.weight": hidden(8)}
    # A conflict found after a deeper declaration is one all the same.
    late = nn.ModuleList(
        [nn.ModuleList([Holder(shared, hidden(8))]), Holder(shared, output(8)), Holder(shared, hidden(8))]
    )
    with pytest.raises(ConfigError, match="has two roles"):
        mup.roles_of(late)


class AddedLayer(nn.Module):
    """Embedding and read-out share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.read_out = nn.Linear(8, 10, bias=False)
        self.read_out.weight = self.embedding.weight

    def parameter_roles(self):
        return {"read_out.weight": Role(kind="embedding")}


def test_tied_weights_have_the_role_of_the_outer_module() -> None:
    model = AddedLayer()
    assert mup.roles_of(model) == {"embedding.weight": EMBEDDING}
    (group,) = mup.parameter_groups(model, learning_rate=1.0)
    assert len(group["params"]) == 1


def expected_rates(model: nn.Module, base: int) -> dict[str, float]:
    """The table of the design, written out once more."""
    out = {}
    for name, role in mup.roles_of(model).items():
        matrix = role.kind in ("hidden", "factor", "output")
        out[name] = base * math.sqrt(role.uses) / role.fan_in if matrix else 1.0
    return out


@pytest.mark.parametrize(
    ("spec", "rates"),
    [
        ("standard", {"left": 768 / 32, "right": 768 / 32}),
        ("bilinear-btt:2", {"left": 768 / 16, "right": 768 / 4}),
        (
            "bilinear-mlr:4|2|2",
            {f"{side}.{level}": 768 * 2**level / 32 for side in ("left", "right") for level in range(3)},
        ),
        ("mlr:4|2|2", {"left": 24.0, "right": 24.0}),
        ("bilinear-kronecker", {"outer": 768 * 2 / 8, "inner": 768 * math.sqrt(8) / 4}),
    ],
)
def test_groups(spec, rates) -> None:
    model = icl(spec)
    model.trunk.position.requires_grad_(False)
    groups = mup.parameter_groups(model, learning_rate=0.01, weight_decay=0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(p)]: group for group in groups for p in group["params"]}
    assert sorted(found) == sorted(name for name in names.values() if name != "trunk.position")
    assert sum(len(group["params"]) for group in groups) == len(found)
    prefix = "trunk.blocks.0."
    rates = {f"{prefix}attention.scoring.matrix.{name}": rate for name, rate in rates.items()}
    rates |= dict.fromkeys(
        [f"{prefix}{n}.weight" for n in ("attention.value_proj", "attention.out_proj", "mlp.up")], 24.0
    )
    rates |= {f"{prefix}mlp.down.weight": 6.0, "read_out.weight": 24.0}
    for name, group in found.items():
        scale = rates.get(name, 1.0)
        assert group["lr_scale"] == pytest.approx(scale)
        assert group["lr"] == pytest.approx(0.01 * scale)
        # AdamW shrinks a weight by rate times decay: the same for every matrix, and nothing else decays.
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.003 if name in rates else 0.0)
    assert {name: group["lr_scale"] for name, group in found.items()} == pytest.approx(
        {name: rate for name, rate in expected_rates(model, 768).items() if name != "trunk.position"}
    )


def test_base_fan_in_and_wrong_numbers() -> None:
    groups = mup.parameter_groups(icl(), learning_rate=1.0, base_fan_in=E)
    assert {group["lr_scale"] for group in groups} == {1.0, 0.25}
    for wrong in (
        {"learning_rate": 0.0},
        {"learning_rate": 1.0, "weight_decay": -1},
        {"learning_rate": 1.0, "base_fan_in": 0},
    ):
        with pytest.raises(ConfigError, match="must be a finite number"):
            mup.parameter_groups(icl(), **wrong)
    for wrong in (
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"learning_rate": 1.0, "weight_decay": math.nan},
    ):
        with pytest.raises(ConfigError, match="must be a finite number"):
            mup.parameter_groups(icl(), **wrong)


def loss_of(model: nn.Module) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    xs, ys = torch.randn(4, 4, 4, generator=rng), torch.randn(4, 4, generator=rng)
    return (model(xs, ys) - ys).square().mean()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_is_that_of_adamw_with_rates_by_hand(weight_decay) -> None:
    torch.manual_seed(0)
    model = icl("bilinear-btt:2")
    mup.initialize(model)
    other = copy.deepcopy(model)
    optimizer = mup.adamw(model, learning_rate=1e-3, weight_decay=weight_decay, base_fan_in=64)
    rates = expected_rates(other, 64)
    roles = mup.roles_of(other)
    by_hand = torch.optim.AdamW(
        [
            {
                "params": [parameter],
                "lr": 1e-3 * rates[name],
                "weight_decay": weight_decay / rates[name] if roles[name].decays else 0.0,
            }
            for name, parameter in other.named_parameters()
        ],
        betas=(0.9, 0.95),
        eps=1e-20,
        foreach=False,
    )
    for _ in range(4):
        for each, step in ((model, optimizer), (other, by_hand)):
            step.zero_grad()
            loss_of(each).backward()
            step.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(mine, theirs)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_initial_weights_depend_on_the_global_seed_alone() -> None:
    drawn = []
    for first in (1, 2):
        torch.manual_seed(first)
        model = icl("bilinear-butterfly")
        loss_of(model).backward()
        wrapped = torch.compile(model, backend="eager") if first == 2 else model
        torch.manual_seed(7)
        mup.initialize(wrapped)
        drawn.append(weights(model))
    assert all(map(torch.equal, *drawn))
    torch.manual_seed(8)
    mup.initialize(model)
    assert not all(map(torch.equal, drawn[0], weights(model)))


def test_frozen_parameters_are_drawn_but_not_trained() -> None:
    model = icl().requires_grad_(False)
    mup.initialize(model)
    assert not model.read_out.weight.any()
    with pytest.raises(ConfigError, match="no parameters to train"):
        mup.adamw(model, learning_rate=1.0)
    assert mup.roles_of(nn.Identity()) == {}


def same_roles(wrapped: nn.Module, model: nn.Module) -> None:
    """The same role for the same parameter, under whatever name, and the same groups."""
    inside = {
        id(parameter): role for parameter, role in zip(model.parameters(), mup.roles_of(model).values(), strict=True)
    }
    outside = mup.roles_of(wrapped)
    assert [inside[id(p)] for _, p in wrapped.named_parameters()] == list(outside.values())
    ids = [[id(p) for p in group["params"]] for group in mup.parameter_groups(wrapped, learning_rate=1.0)]
    assert ids == [[id(p) for p in group["params"]] for group in mup.parameter_groups(model, learning_rate=1.0)]


@pytest.fixture
def one_process(tmp_path):
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_compiled_models_keep_their_roles() -> None:
    model = icl("bilinear-btt:1")
    compiled = torch.compile(model, backend="eager")
    same_roles(compiled, model)
    same_roles(nn.Sequential(compiled), model)
    inner = icl("bilinear-mlr:4|2|2")
    expected = list(mup.roles_of(inner).values())
    inner.trunk.blocks[0].attention = torch.compile(inner.trunk.blocks[0].attention, backend="eager")
    assert list(mup.roles_of(inner).values()) == expected
    inner.trunk.blocks[0].attention.compile(backend="eager")
    assert list(mup.roles_of(inner).values()) == expected


@pytest.mark.full
def test_distributed_data_parallel(one_process) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = icl("bilinear-btt:1")
    wrapped = DistributedDataParallel(torch.compile(model, backend="eager"))
    same_roles(wrapped, model)
    mup.initialize(wrapped)
    assert not model.read_out.weight.any()
    optimizer = mup.adamw(wrapped, learning_rate=1e-3)
    loss_of(wrapped).backward()
    optimizer.step()
    assert model.read_out.weight.any()


def test_fully_sharded_by_modules(one_process) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = icl("bilinear-btt:1")
    expected = list(mup.roles_of(model).values())
    for block in model.trunk.blocks:
        block.attention = FullyShardedDataParallel(block.attention, use_orig_params=True, device_id=torch.device("cpu"))
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    assert list(mup.roles_of(wrapped).values()) == expected
    loss_of(wrapped).backward()
    mup.adamw(wrapped, learning_rate=1e-3).step()


def test_fully_sharded_parameters(one_process) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = icl("bilinear-btt:1")
    expected = mup.roles_of(model)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.trunk.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert mup.roles_of(model) == expected
    mup.initialize(model)
    assert model.trunk.blocks[0].mlp.up.weight.full_tensor().detach().std() == pytest.approx(E**-0.5, rel=0.1)
    loss_of(model).backward()
    mup.adamw(model, learning_rate=1e-3).step()
    assert model.read_out.weight.full_tensor().any()


def test_copies_and_files_need_nothing() -> None:
    model = icl("bilinear-mlr:4|2|2")
    mup.initialize(model)
    twin = copy.deepcopy(model)
    assert mup.roles_of(twin) == mup.roles_of(model)
    fresh = icl("bilinear-mlr:4|2|2")
    state = load(save(model.state_dict()))
    assert set(state) == {name for name, _ in model.named_parameters()}  # roles are no state
    fresh.load_state_dict(state)
    assert all(map(torch.equal, weights(fresh), weights(model)))
    for group, other in zip(
        mup.parameter_groups(model, learning_rate=1.0), mup.parameter_groups(fresh, learning_rate=1.0), strict=True
    ):
        assert group["lr"] == other["lr"]


def test_scaling_of_specs() -> None:
    def mup_spec(text: str) -> str:
        return str(parse_spec(text).with_scaling("mup"))

    assert mup_spec("standard") == "standard,scaling=mup"
    assert mup_spec("standard:1") == "standard:1,scaling=mup"
    assert mup_spec("bilinear-btt:2") == "bilinear-btt:2,scaling=mup"
    assert mup_spec("mlr:4|2|2") == "mlr:4|2|2,scaling=mup"
    assert mup_spec("mlr:4|2|2,scaling=paper") == "mlr:4|2|2,scaling=paper"
    assert mup_spec("bilinear-btt:1+mlr:16|16") == "bilinear-btt:1+mlr:16|16,scaling=mup"
    x = torch.randn(1, 5, E)
    for text, scale in (("standard", 8 / 8), ("bilinear-btt:1", 1 / E), ("bilinear-dense", 1 / E)):
        layer = sa.Attention.from_spec(mup_spec(text), embed_dim=E, num_heads=H, context_length=8)
        assert layer.project(x)[3] == pytest.approx(scale)


# What modules can do to whoever walks over them.


class Odd(Own):
    """A property that raises, a buffer, a parameter that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))
        self.register_parameter("absent", None)

    @property
    def weight(self):
        raise RuntimeError("asked too early")

    @property
    def product_fan_ins(self):
        raise RuntimeError("asked too early")


def test_properties_that_raise_buffers_and_absent_parameters() -> None:
    model = Odd()
    assert set(mup.roles_of(model)) == {name for name, _ in model.named_parameters()}
    mup.initialize(model)

    class Names(Odd):
        def parameter_roles(self):
            return {**super().parameter_roles(), self.name: BIAS}

    for name in ("table", "absent", "weight", "forward", "norm", "", "norm..weight", "norm.eps"):
        broken = Names()
        broken.name = name
        with pytest.raises(ConfigError, match=f"declares a role for '{re.escape(name)}', which it does not have"):
            mup.roles_of(broken)


def test_parameter_lists_and_dicts() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.zeros(3, 3), torch.zeros(3)])
            self.named = nn.ParameterDict({"a": torch.zeros(2)})

        def parameter_roles(self):
            return {"parts.0": hidden(3), "parts.1": BIAS, "named.a": GAIN}

    model = Lists()
    assert mup.roles_of(model) == {"parts.0": hidden(3), "parts.1": BIAS, "named.a": GAIN}
    mup.initialize(model)
    assert model.parts[0].any()
    assert (model.named["a"] == 1).all()


def test_parametrized_and_lazy_layers() -> None:
    model = Own()
    nn.utils.parametrizations.orthogonal(model.mix)
    with pytest.raises(ConfigError, match=r"mix\.weight"):
        mup.roles_of(model)
    lazy = Holder(nn.LazyLinear(4, bias=False), hidden(8))
    assert mup.roles_of(lazy) == {"layer.weight": hidden(8)}
    with pytest.raises(ConfigError, match=r"layer\.weight has no size yet"):
        mup.initialize(lazy)
    undeclared = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ConfigError, match=r"0\.weight"):
        mup.roles_of(undeclared)


def test_norms_and_embeddings_of_torch() -> None:
    norms = nn.ModuleList(
        [
            nn.LayerNorm(4),
            nn.RMSNorm(4),
            nn.GroupNorm(2, 4),
            nn.BatchNorm1d(4),
            nn.LayerNorm(4, elementwise_affine=False),
            nn.InstanceNorm1d(4, affine=True),
            nn.Embedding(5, 4, padding_idx=2),
        ]
    )
    roles = mup.roles_of(norms)
    assert {role.kind for name, role in roles.items() if name.endswith("bias")} == {"bias"}
    assert {role.kind for name, role in roles.items() if name.endswith("weight")} == {"norm", "embedding"}
    mup.initialize(norms)
    assert not norms[-1].weight[2].any()  # padding stays zero
    assert norms[-1].weight[0].any()


def test_a_structured_layer_that_is_used_as_an_output() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = sa.StructuredLinear(16, 16, "butterfly", bias=False)

        def parameter_roles(self):
            return {f"head.matrix.{name}": output(n) for name, n in self.head.matrix.product_fan_ins.items()}

    model = Head()
    assert {role.kind for role in mup.roles_of(model).values()} == {"output"}
    mup.initialize(model)
    assert not any(p.any() for p in model.parameters())

    class Last(Head):
        def parameter_roles(self):
            return {"head.matrix.left.0": output(2)}  # one stage is enough for an output of zero

    model = Last()
    torch.manual_seed(0)
    mup.initialize(model)
    assert not model.head.matrix.left[0].any()
    rest = [p for name, p in model.named_parameters() if name != "head.matrix.left.0"]
    for stage in rest:  # the others stay rotations
        block = stage.detach()[0, 0]
        assert_close(block @ block.T, torch.eye(2))


@pytest.mark.parametrize(
    "family", ["dense", "btt:2", "kronecker", "mlr:4|2", "butterfly", "kaleidoscope", "mlbtc:1x1x8|4x4x16s"]
)
def test_layers_that_were_replaced(family) -> None:
    model = icl()
    names = sa.replace_linears(model.trunk, lambda layer: family if layer.out_features == E else None)
    assert names == tuple(f"blocks.0.{n}" for n in ("attention.value_proj", "attention.out_proj", "mlp.down"))
    roles = mup.roles_of(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    block = model.trunk.blocks[0]
    mup.initialize(model)
    assert {role.kind for name, role in roles.items() if "value_proj" in name} <= {"factor", "gain"}
    assert block.attention.value_proj.weight.detach().std() == pytest.approx(E**-0.5, rel=0.3)
    for layer in (block.attention.out_proj, block.mlp.down):
        assert not layer.weight.any()
        dense = layer.weight
        dense.backward(torch.randn_like(dense))
        assert any(p.grad is not None and p.grad.any() for p in layer.parameters())  # and can leave zero
    assert "output" in {role.kind for name, role in roles.items() if "mlp.down" in name}
    mup.adamw(model, learning_rate=1e-3)


def test_given_matrices_and_their_copies_have_roles() -> None:
    given = Structure.parse("btt:1").build(E, E)
    layer = sa.Attention(E, H, scoring=Matrix(matrix=given))
    assert mup.roles_of(layer)["scoring.matrix.left"] == factor(8)
    assert isinstance(sa.StructuredLinear(8, 8, Butterfly(8, 8)).matrix, Butterfly)
