"""The failures that are expected, each with its reason: a test that fails and is not here, or is here and
passes, fails the run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """Tests that fail for one reason.

    Attributes:
        kinds: of models, as in ``cases.py``.
        tests: their names; a name that ends in ``*`` stands for all that start with it.
        message: part of the error.
        reason: why.
        models: only these, by name; empty: all of the kinds.
    """

    kinds: tuple[str, ...]
    tests: tuple[str, ...]
    message: str
    reason: str
    models: tuple[str, ...] = ()

    def fits(self, kind: str, model: str, name: str) -> bool:
        """Whether this is about a test of a model."""
        is_model = kind in self.kinds and (not self.models or model in self.models)
        return is_model and any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in self.tests)


EXPECTED = (
    Expected(
        ("registered",),
        (
            "test_generate_with_static_cache",
            "test_generate_from_inputs_embeds_with_static_cache",
            "test_generate_compile_model_forward_fullgraph",
            "test_generate_compilation_all_outputs",
            "test_static_cache_no_recompile_with_smaller_length",
            "test_torch_export_generate_static_static_cache",
            "test_torch_export_generate_dynamic_static_cache",
        ),
        "a static cache",
        "A static cache returns keys of tokens that are not there yet, and blocks are counted in real ones. The flag "
        "is that of the plain class.",
    ),
    Expected(
        ("registered",),
        ("test_retain_grad_hidden_states_attentions", "test_attention_outputs"),
        "Please set it to 'eager'",
        "transformers lets the config of a plain class ask for weights with its own eager attention only; the argument "
        "of a call works.",
    ),
    Expected(
        ("registered",),
        ("test_save_load",),
        "different results",
        "A registered implementation is not saved: a reloaded model has plain attention until it is set again.",
    ),
    Expected(
        ("own", "structurized"),
        ("test_retain_grad_hidden_states_attentions",),
        "",
        "Attention weights are computed beside the output, which never forms them: it has no gradient through them.",
    ),
    Expected(
        ("own",),
        ("test_correct_missing_keys", "test_base_model_prefix_loads_base_weights"),
        "missing keys lm_head",
        "Loading is strict: a language model is not made from a checkpoint without its head, which transformers would "
        "leave random.",
    ),
    Expected(
        ("own", "structurized"),
        ("test_model_weights_reload_no_missing_tied_weights",),
        "CheckpointError",
        "Loading is strict: a checkpoint without the weights is an error, and not a random model.",
    ),
    Expected(
        ("own",),
        ("test_custom_4d_attention_mask",),
        "counts positions by itself",
        "StructAttnForCausalLM counts positions by itself: those of a text with several ends are refused beside a mask "
        "of pairs.",
    ),
    Expected(
        ("own", "structurized"),
        (
            "test_torch_export_static",
            "test_torch_export_dynamic",
            "test_torch_export_generate_static",
            "test_torch_export_generate_dynamic",
        ),
        "cannot read the padding",
        "Run by RUN_SLOW=1 only: with a mask and a cache, a program would depend on the numbers in the mask; "
        "export_decoder makes programs with a cache.",
    ),
    Expected(
        ("structurized",),
        ("test_model_rope_scaling_from_config_1_dynamic",),
        "changes the frequencies with the length",
        "Dynamic RoPE scaling changes the keys of earlier tokens, which a cache has kept: it is refused.",
    ),
)


def expected_for(kind: str, model: str, name: str) -> Expected | None:
    """The entry for a test of a model, if there is one."""
    return next((one for one in EXPECTED if one.fits(kind, model, name)), None)
