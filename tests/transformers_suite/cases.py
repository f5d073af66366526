"""Our models as test cases of transformers' own test classes, which a checkout on the path provides."""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests import test_configuration_common, test_modeling_common
from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from transformers import (
    Gemma3TextModel,
    GPT2Model,
    LlamaModel,
    MistralModel,
    Phi3Model,
    PreTrainedConfig,
    Qwen3Model,
)

import structattn.integrations.transformers as ours
from structattn.integrations.transformers import LevelCacheLayer, register_attention
from structattn.integrations.transformers.structurize.modules import IMPLEMENTATION

# Texts of the tests have 7 tokens: with blocks of 8 and 4 both levels have an effect, and with one level
# nothing changes.
LEVELS, ONE_LEVEL, CONTEXT = "mlr:8|8", "mlr:16", 8
WINDOW = 4  # of families with sliding windows
# In these lists of class names the tests look up what a class is for. transformers generates them, and knows
# no class of a package.
_LISTS = {
    "base_model_class": "MODEL_MAPPING_NAMES",
    "causal_lm_class": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "question_answering_class": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "sequence_classification_class": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification_class": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
# Tests that ask for weights set attn_implementation="eager" before, since SDPA has none; one of packed
# sequences asks for it by name.
_EAGER = (
    "generate",
    "assisted",
    "prompt_lookup",
    "attention_outputs",
    "retain_grad",
    "sliding_window_mask",
    "eager_padding",
)
# Tests of packed sequences and of masks of pairs, which our models know, look at a flag that is about
# something else.
_FLAGS = {
    "test_eager_padding_matches_padding_free_with_position_ids": "_supports_attention_backend",
    "test_custom_4d_attention_mask": "_can_compile_fullgraph",
}


class KeepsItsAttention(CausalLMModelTest):
    """Attention of ours has weights, and stays where a test asks for one that has them."""

    def keep_attention(self, kind: type, own: str) -> None:
        plain = PreTrainedConfig._attn_implementation

        def write(config: Any, value: Any) -> None:
            plain.fset(config, own if value == "eager" else value)

        if any(word in self._testMethodName for word in _EAGER):
            self.enterContext(patch.object(kind, "_attn_implementation", property(plain.fget, write)))


class OfOurs(KeepsItsAttention):
    """What the tests ask models to replace that are not like the others: the format of the cache, and what a
    config needs.
    """

    def setUp(self) -> None:
        super().setUp()
        tester = self.model_tester
        for attribute, mapping in _LISTS.items():
            if (kind := getattr(tester, attribute)) is not None:
                names = getattr(test_modeling_common, mapping)
                self.enterContext(patch.dict(names, {tester.config_class.model_type: kind.__name__}))
        if hasattr(tester, "structattn"):
            self.keep_attention(tester.config_class, IMPLEMENTATION)
        if (flag := _FLAGS.get(self._testMethodName)) is not None:
            for kind in self.all_generative_model_classes:
                self.enterContext(patch.object(kind, flag, True))

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


def structurized(plain: type, rotation: str | None, attention: str, **fields: Any) -> type:
    """A tester of structurized models, with all heads of the family.

    Args:
        plain: the base model of the family.
        rotation: its rotary pairs, as ``Rotation`` writes them; ``None`` for learned positions.
        attention: the name of its attention class.
        **fields: of its config.
    """
    family = plain.config_class.model_type
    kinds = {"config_class": getattr(ours, f"StructAttn{plain.config_class.__name__}")}
    for attribute, mapping in _LISTS.items():
        if (kind := getattr(test_modeling_common, mapping).get(family)) is not None:
            kinds[attribute] = getattr(ours, f"StructAttn{kind}")
    record = {
        "specs": [LEVELS, LEVELS],
        "context_length": CONTEXT,
        "rotary_split": rotation and "low_far",
        "attention": attention,
        "rotations": [rotation, rotation],
    }
    needed = {
        "needed": ("structattn", "num_hidden_layers", *fields),
        "forced_config_args": [*CausalLMModelTester.forced_config_args, "structattn"],
    }
    return type(f"{plain.__name__}Tester", (CausalLMModelTester,), {**kinds, **needed, **fields, "structattn": record})


class Plain(CausalLMModelTester):
    base_model_class = LlamaModel


class OfRegistered(KeepsItsAttention):
    """A model of transformers whose attention is a registered one."""

    def setUp(self) -> None:
        super().setUp()
        self.keep_attention(self.model_tester.config_class, self.model_tester.get_config()._attn_implementation)


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
    "structurized Llama": _model("structurized", structurized(LlamaModel, "halves:16", "LlamaAttention")),
    "structurized GPT-2": _model("structurized", structurized(GPT2Model, None, "GPT2Attention")),
    "structurized Qwen3": _model("structurized", structurized(Qwen3Model, "halves:16", "Qwen3Attention")),
    "structurized Phi-3": _model("structurized", structurized(Phi3Model, "halves:16", "Phi3Attention")),
    "structurized Mistral": _model(
        "structurized", structurized(MistralModel, "halves:16", "MistralAttention", sliding_window=WINDOW)
    ),
    "structurized Gemma 3": _model(
        "structurized",
        structurized(
            Gemma3TextModel,
            "halves:16",
            "Gemma3Attention",
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "registered Llama": _model("registered", Registered, OfRegistered),
}
