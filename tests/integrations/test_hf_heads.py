"""Classification with StructAttnConfig: the heads by their definition, padding, and loading with an old or a
new head.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import VOCAB, padded, tokens

from structattn.errors import CheckpointError, ConfigError, ShapeError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    StructAttnForSequenceClassification,
    StructAttnForTokenClassification,
)
from structattn.testing.tolerances import assert_close

PROMPTS = [tokens(1, 9)[0], tokens(1, 17, seed=2)[0]]
LENGTHS = (9, 17)
AUTO = {
    StructAttnForSequenceClassification: transformers.AutoModelForSequenceClassification,
    StructAttnForTokenClassification: transformers.AutoModelForTokenClassification,
}


def config(**options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return StructAttnConfig(
        attention="mlr:4|2|2", **sizes | {"max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3} | options
    )


def make(kind, **options):
    torch.manual_seed(0)
    return kind(config(**options)).double().eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_head_of_each_row_and_token_with_padding(side) -> None:
    ids, mask = padded(PROMPTS, side)
    rows = make(StructAttnForSequenceClassification)
    found = rows(ids, attention_mask=mask).logits
    for row, prompt in enumerate(PROMPTS):
        alone = rows.score(rows.model(prompt[None]).last_hidden_state[0, -1])
        assert_close(found[row], alone)
    each = make(StructAttnForTokenClassification)
    found = each(ids, attention_mask=mask).logits
    for row, prompt in enumerate(PROMPTS):
        assert_close(found[row][mask[row].bool()], each.score(each.model(prompt[None]).last_hidden_state[0]))


def test_losses() -> None:
    ids, mask = padded(PROMPTS)
    model = make(StructAttnForSequenceClassification)
    classes = torch.tensor([2, 0])
    out = model(ids, attention_mask=mask, labels=classes)
    assert_close(out.loss, F.cross_entropy(out.logits, classes))
    out.loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0
    assert model.parameter_roles()["score.weight"].kind == "output"
    several = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    out = make(StructAttnForSequenceClassification)(ids, attention_mask=mask, labels=several)
    assert_close(out.loss, F.binary_cross_entropy_with_logits(out.logits, several))
    out = make(StructAttnForSequenceClassification, num_labels=1)(ids, attention_mask=mask, labels=several[:, 0])
    assert_close(out.loss, F.mse_loss(out.logits[:, 0], several[:, 0]))
    labels = (ids % 3).where(mask.bool(), -100)
    out = make(StructAttnForTokenClassification)(ids, attention_mask=mask, labels=labels)
    assert_close(out.loss, F.cross_entropy(out.logits[mask.bool()].float(), labels[mask.bool()]))


@pytest.mark.parametrize("kind", AUTO)
def test_saved_and_loaded(kind, tmp_path) -> None:
    ids, mask = padded(PROMPTS)
    model = make(kind, id2label={0: "bad", 1: "fair", 2: "good"})
    model.save_pretrained(tmp_path)
    loaded = AUTO[kind].from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is kind
    assert loaded.config.id2label[2] == "good"
    assert_close(loaded(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(base(ids, attention_mask=mask)[0], model.model(ids, attention_mask=mask)[0])
    weights = transformers.AutoModel.from_config(model.config).state_dict()
    model.save_pretrained(tmp_path, state_dict={f"model.{name}": weight for name, weight in weights.items()})
    with pytest.raises(CheckpointError, match=r"missing keys score"):  # its own head is not replaced by a new one
        AUTO[kind].from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", AUTO)
def test_a_new_head_on_a_language_model(kind, tmp_path) -> None:
    ids, _ = padded(PROMPTS[:1])
    base = make(StructAttnForCausalLM)
    base.save_pretrained(tmp_path)
    loaded = AUTO[kind].from_pretrained(tmp_path, num_labels=5, dtype=torch.float64).eval()
    assert_close(loaded.model(ids).last_hidden_state, base.model(ids).last_hidden_state)
    assert loaded(ids).logits.shape[-1] == 5
    assert 0.01 < loaded.score.weight.std() < 0.03  # the initializer_range
    assert loaded.score.bias is None or not loaded.score.bias.any()


def test_wrong_calls() -> None:
    ids, mask = padded(PROMPTS)
    model, each = make(StructAttnForSequenceClassification), make(StructAttnForTokenClassification)
    with pytest.raises(ConfigError, match=r"a batch of 2 rows needs config\.pad_token_id"):
        make(StructAttnForSequenceClassification, pad_token_id=None)(ids, attention_mask=mask)
    for labels in (torch.tensor([0]), torch.tensor([[0], [1]]), torch.tensor([0, 1], dtype=torch.int32), torch.ones(2)):
        with pytest.raises(ShapeError, match="num_labels=3 must be"):
            model(ids, attention_mask=mask, labels=labels)
    with pytest.raises(ShapeError, match="num_labels=1 must be floating point"):
        make(StructAttnForSequenceClassification, num_labels=1)(ids, attention_mask=mask, labels=torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="labels must be from 0 to 2, got 3"):
        model(ids, attention_mask=mask, labels=torch.tensor([0, 3]))
    with pytest.raises(ConfigError, match="labels must be from 0 to 2, got 7"):
        each(ids, attention_mask=mask, labels=torch.full_like(ids, 7))
    with pytest.raises(ShapeError, match="labels must be of shape"):
        each(ids, attention_mask=mask, labels=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ConfigError, match="a StructAttnConfig"):
        StructAttnForSequenceClassification(transformers.LlamaConfig())
