"""Fine-tuning by TRL, each trainer for two steps on tiny models, and evaluation by lm_eval: they take our
models as objects.
"""

import copy

import pytest
import torch
from hf_models import tokenizer, tokens
from test_hf_saving import changed, own

from structattn.testing.tolerances import SAME_MODEL

MODELS = {"own": own, "llama": changed}
# Trainers of TRL shorten tables in a log; datasets are Arrow tables.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 0,
}


def text(length, seed):
    return " ".join(f"w{n}" for n in tokens(1, length, seed=seed)[0].tolist())


def model_for(kind):
    model = MODELS[kind]().float()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    return model


def libraries():
    reason = "fine-tuning by TRL: pip install trl datasets"
    return pytest.importorskip("trl", reason=reason), pytest.importorskip("datasets", reason=reason)


def check_trained(model, before):
    """Every weight is a number, and the attention learns too."""
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert all(x.isfinite().all() for x in model.parameters())
    assert any("attn" in name or "attention" in name for name in moved)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_supervised_fine_tuning(kind, packing, tmp_path) -> None:
    trl, datasets = libraries()
    model = model_for(kind)
    before = copy.deepcopy(dict(model.named_parameters()))
    data = datasets.Dataset.from_list([{"text": text(5 + n % 4, n)} for n in range(16)])
    arguments = trl.SFTConfig(str(tmp_path), max_length=16, packing=packing, **SETTINGS)
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
    assert trainer.train().training_loss > 0
    check_trained(model, before)


@pytest.mark.parametrize("kind", MODELS)
def test_preferences_with_a_reference_model(kind, tmp_path) -> None:
    trl, datasets = libraries()
    model = model_for(kind)
    reference = copy.deepcopy(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    rows = [
        {"prompt": text(4, n), "chosen": " " + text(3, n + 20), "rejected": " " + text(5, n + 40)} for n in range(8)
    ]
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(str(tmp_path), max_length=16, **SETTINGS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "train_loss" in entry)
    assert first["train_loss"] > 0
    check_trained(model, before)
    for x, y in zip(reference.parameters(), before.values(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", MODELS)
def test_rewards_of_generated_text(kind, tmp_path) -> None:
    trl, datasets = libraries()
    model = model_for(kind)
    before = copy.deepcopy(dict(model.named_parameters()))
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return [float(sum(int(word[1:]) for word in one.split()) % 7) for one in completions]

    settings = SETTINGS | {"per_device_train_batch_size": 4}
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=6, **settings),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(3 + n, n)} for n in range(4)]),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert len(seen) >= 8
    check_trained(model, before)


@pytest.mark.parametrize("kind", MODELS)
def test_the_likelihoods_of_lm_eval(kind) -> None:
    reason = "evaluation by lm_eval: pip install lm_eval"
    harness = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    instance = pytest.importorskip("lm_eval.api.instance", reason=reason).Instance
    model, words = model_for(kind), tokenizer()
    evaluated = harness.HFLM(pretrained=model, tokenizer=words, batch_size=2, device="cpu")
    pairs = [(text(3 + n, n), " " + text(2 + n % 2, n + 9)) for n in range(5)]

    def asked(what, arguments):
        return [instance(what, {}, one, n) for n, one in enumerate(arguments)]

    found = evaluated.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    for (context, answer), (likelihood, _) in zip(pairs, found, strict=True):
        ids = words(context + answer, return_tensors="pt").input_ids
        count = len(answer.split())
        with torch.no_grad():
            scores = model(ids).logits.log_softmax(-1)[0, -count - 1 : -1]
        assert likelihood == pytest.approx(float(scores.gather(1, ids[0, -count:, None]).sum()), rel=SAME_MODEL)

    options = {"until": ["<end>"], "max_gen_toks": 6, "do_sample": False}
    texts = evaluated.generate_until(
        asked("generate_until", [(context, options) for context, _ in pairs]), disable_tqdm=True
    )
    for (context, _), found_text in zip(pairs, texts, strict=True):
        ids = words(context, return_tensors="pt").input_ids
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, use_cache=False
        )
        expected_text = words.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        assert expected_text.split()[: len(found_text.split())] == found_text.split()
