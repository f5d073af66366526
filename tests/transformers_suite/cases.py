"""Our models as test cases of transformers' own test classes, which a checkout on the path provides."""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from transformers import GPT2Model, LlamaModel, PreTrainedConfig, Qwen3Model

import structattn.integrations.transformers as ours
from structattn.integrations.transformers import LevelCacheLayer, register_attention
from tests import test_configuration_common, test_modeling_common

# Texts of the tests have 7 tokens: with blocks of 8 and 4 both levels have an effect, and with one level nothing changes.
LEVELS, ONE_LEVEL, CONTEXT = "mlr:8|8", "mlr:16", 8
# In these lists of class names the tests look up what a class is for. transformers generates them, and knows no class of a package.
_LISTS = {
    "base_model_class": "MODEL_MAPPING_NAMES",
    "causal_lm_class": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "question_answering_class": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "sequence_classification_class": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification_class": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
# Tests that ask for weights set attn_implementation="eager" before, since SDPA has none.
_WEIGHTS = ("generate", "assisted", "prompt_lookup", "attention_outputs", "retain_grad")


class OfOurs(CausalLMModelTest):
    """What the tests ask models to replace that are not like the others: the format of the cache, and what a config needs."""

    def setUp(self) -> None:
        super().setUp()
        tester = self.model_tester
        for attribute, mapping in _LISTS.items():
            if (kind := getattr(tester, attribute)) is not None:
                names = getattr(test_modeling_common, mapping)
                self.enterContext(patch.dict(names, {tester.config_class.model_type: kind.__name__}))
        if hasattr(tester, "structattn") and any(word in self._testMethodName for word in _WEIGHTS):
            self._ignore_eager(tester.config_class)

    def _ignore_eager(self, kind: type) -> None:
        """These models have one implementation, which has weights; another one is refused."""
        plain = PreTrainedConfig._attn_implementation

        def write(config: Any, value: Any) -> None:
            plain.fset(config, config._attn_implementation if value == "eager" else value)

        self.enterContext(patch.object(kind, "_attn_implementation", property(plain.fget, write)))

    def test_config(self) -> None:
        tester = self.model_tester
        own_names = tester.config_class.attribute_map
        given = {own_names.get(name, name): getattr(tester, name) for name in tester.needed}
        self.config_tester.inputs_dict.update(given)
        with patch.dict(test_configuration_common.config_common_kwargs, given):
            self.config_tester.run_common_tests(can_init_without_params=False)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        assert len(past_key_values) == config.get_text_config(decoder=True).num_hidden_layers
        for layer in past_key_values.layers:
            assert isinstance(layer, LevelCacheLayer)
            assert (layer.batch_size, layer.get_seq_length()) == (batch_size, seq_length)

    def _check_caches_are_equal(self, cache1, cache2):
        one, other = ([layer.get_seq_length() for layer in cache.layers] for cache in (cache1, cache2))
        assert one == other


class Own(CausalLMModelTester):
    config_class = ours.StructAttnConfig
    base_model_class = ours.StructAttnModel
    causal_lm_class = ours.StructAttnForCausalLM
    sequence_classification_class = ours.StructAttnForSequenceClassification
    token_classification_class = ours.StructAttnForTokenClassification
    needed = ("attention",)
    attention = LEVELS

    def get_config(self):
        config = super().get_config()
        assert config.attention == self.attention
        return config


class OwnOneLevel(Own):
    attention = ONE_LEVEL


def structurized(plain: type, rotation: str | None) -> type:
    """A tester of structurized models, with all heads of the family."""
    name = plain.__name__.removesuffix("Model")
    endings = {
        "config_class": "Config",
        "base_model_class": "Model",
        "causal_lm_class": "LMHeadModel" if plain is GPT2Model else "ForCausalLM",
        "question_answering_class": "ForQuestionAnswering",
        "sequence_classification_class": "ForSequenceClassification",
        "token_classification_class": "ForTokenClassification",
    }
    kinds = {attribute: getattr(ours, f"StructAttn{name}{ending}") for attribute, ending in endings.items()}
    record = {
        "specs": [LEVELS, LEVELS],
        "context_length": CONTEXT,
        "rotary_split": rotation and "low_far",
        "attention": f"{name}Attention",
        "rotations": [rotation, rotation],
    }
    needed = {
        "needed": ("structattn", "num_hidden_layers"),
        "forced_config_args": [*CausalLMModelTester.forced_config_args, "structattn"],
    }
    return type(f"{name}Tester", (CausalLMModelTester,), {**kinds, **needed, "structattn": record})


class Plain(CausalLMModelTester):
    base_model_class = LlamaModel


class Registered(Plain):
    def get_config(self):
        config = super().get_config()
        config._attn_implementation = register_attention(LEVELS, name="levels", context_length=CONTEXT)
        return config


@dataclass(frozen=True)
class Model:
    """A model that is tested.

    Attributes:
        kind: what the list of reasons calls it.
        case: the test class.
    """

    kind: str
    case: type[unittest.TestCase]


def _model(kind: str, tester: type, base: type = OfOurs) -> Model:
    return Model(kind, type(tester.__name__, (base, unittest.TestCase), {"model_tester_class": tester}))


CONTROL = "Llama, unchanged"
MODELS = {
    CONTROL: _model("plain", Plain, CausalLMModelTest),
    "StructAttn, levels": _model("own", Own),
    "StructAttn, one level": _model("own", OwnOneLevel),
    "structurized Llama": _model("structurized", structurized(LlamaModel, "halves:16")),
    "structurized GPT-2": _model("structurized", structurized(GPT2Model, None)),
    "structurized Qwen3": _model("structurized", structurized(Qwen3Model, "halves:16")),
    "registered Llama": _model("registered", Registered, CausalLMModelTest),
}
