"""What other packages add to the library, in the few lines that a user writes."""

import pytest
import torch

import structattn as sa
from structattn import extensions
from structattn.cli import main
from structattn.errors import ConfigError
from structattn.matrices import structure
from structattn.spec import positive
from structattn.spec.attention import FORMS
from structattn.testing.tolerances import assert_close


class Banded(sa.matrices.Dense):
    """A matrix that is zero where |i - j| > width."""

    def __init__(self, num_rows, num_cols, width, *, batch_shape=()):
        super().__init__(num_rows, num_cols, batch_shape=batch_shape)
        self.width = width
        distance = (torch.arange(num_rows)[:, None] - torch.arange(num_cols)).abs()
        self.register_buffer("band", (distance <= width).float(), persistent=False)

    def _matmul(self, x):
        return (self.weight * self.band).reshape(-1, self.num_rows, self.num_cols) @ x

    def _rmatmul(self, x):
        return (self.weight * self.band).reshape(-1, self.num_rows, self.num_cols).mT @ x

    def solver(self):
        return sa.matrices.Solver(lambda target, tick: self.weight.copy_(target * self.band), "the band", True)

    def block_terms(self):
        """M Iᵀ, one block."""
        term = sa.matrices.BlockTerm(left_blocks=1, right_blocks=1, inner_dim=self.num_cols)
        left = (self.weight * self.band).detach()[..., None, :, :]
        right = torch.eye(self.num_cols).expand(*self.batch_shape, 1, -1, -1)
        return [sa.matrices.TermFactors(term=term, left=left, right=right)]

    @property
    def options(self):
        return {"width": self.width}


FAMILY = sa.matrices.Family(
    Banded, "banded:W", "banded:4", "zero at distances above W", sa.matrices.TextValue("width", positive)
)


@pytest.fixture
def _family_is_forgotten():
    yield
    structure._FAMILIES.pop("banded", None)
    FORMS.pop("bilinear-banded", None)


@pytest.mark.usefixtures("_family_is_forgotten")
def test_a_matrix_family(capsys) -> None:
    sa.matrices.register("banded", FAMILY)
    value = sa.matrices.Structure.parse("banded:2")
    assert str(value) == "banded:2"
    m = value.build(12, 8)
    x = torch.randn(5, 8)
    assert_close(m.matmul(x), x @ m.to_dense().T)
    assert not m.to_dense().triu(3).any()
    assert main(["structures"]) == 0
    assert "zero at distances above W" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="structure 'banded:x': expected a positive .* Written banded:W, such as"):
        sa.matrices.Structure.parse("banded:x")


@pytest.mark.usefixtures("_family_is_forgotten")
def test_a_matrix_family_is_everywhere_where_families_are() -> None:
    sa.matrices.register("banded", FAMILY)
    layer = sa.StructuredLinear(16, 16, "banded:1")
    assert sa.mup.roles_of(layer)["matrix.weight"].fan_in == 16
    target = torch.randn(6, 6)
    fitted = sa.matrices.fit(target, like="banded:1")
    assert (fitted.method, fitted.is_optimal) == ("the band", True)
    assert torch.equal(fitted.matrix.to_dense(), target.tril(1).triu(-1))
    assert_close(sa.matrices.MLBTC.from_matrix(fitted.matrix).to_dense(), fitted.matrix.to_dense())
    attention = sa.Attention.from_spec("bilinear-banded:3+window:4", embed_dim=16, num_heads=2, context_length=8)
    assert attention(torch.randn(1, 8, 16)).isfinite().all()
    assert str(sa.parse_spec("bilinear-banded:3")) == "bilinear-banded:3"


@pytest.mark.usefixtures("_family_is_forgotten")
def test_a_matrix_family_of_a_module_that_a_variable_names(tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="unknown form 'banded'"):
        sa.matrices.Structure.parse("banded:2")
    (tmp_path / "my_matrices.py").write_text(
        f"import structattn as sa\nfrom {__name__} import FAMILY\nsa.matrices.register('banded', FAMILY)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(extensions.VARIABLE, "my_matrices")
    assert str(sa.matrices.Structure("banded", (("width", 2),))) == "banded:2"


def test_a_name_of_a_family_is_given_once() -> None:
    with pytest.raises(ConfigError, match="the family 'btt' is taken: choose another name"):
        sa.matrices.register("btt", FAMILY)
    with pytest.raises(ConfigError, match="the name of a family has letters"):
        sa.matrices.register("a:b", FAMILY)


def by_number(calibration, layers, layout):
    """The fastest rotary pairs go to the first level, in every key head."""
    shape = layers[0].shape
    return [list(range(shape.head_dim // 2))] * shape.num_kv_heads


def one_pair(calibration, layers, layout):
    return [[0]]


@pytest.fixture
def splits():
    pytest.importorskip("transformers")
    from structattn.integrations.transformers.calibration import splits

    yield splits
    for name in ("by_number", "one_pair"):
        splits._SPLITS.pop(name, None)


def test_a_split(splits, tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from structattn.integrations.transformers import calibrate, load_structurized, register_split, structurize

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=32)).eval()
    ids = torch.randint(32, (1, 32))
    calibration = calibrate(model, [ids], block_sizes=(8, 16))
    wanted = {"spec": "mlr:4|4,scaling=standard", "calibration": calibration}
    with pytest.raises(ConfigError, match="unknown rotary_split 'by_number'"):
        structurize(model, rotary_split="by_number", **wanted)
    register_split("by_number", by_number)
    register_split("one_pair", one_pair)
    for name in ("calibrated", "low_far"):
        with pytest.raises(ConfigError, match=f"the rotary_split '{name}' is taken"):
            register_split(name, by_number)
    with pytest.raises(ConfigError, match="needs each of 4 rotary pairs once, got '0'"):
        structurize(model, rotary_split="one_pair", **wanted)
    structurize(model, rotary_split="by_number", **wanted)
    assert model.config.structattn["pair_orders"] == [["0 1 2 3", "0 1 2 3"]]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(load_structurized(tmp_path)(ids).logits, model(ids).logits)
