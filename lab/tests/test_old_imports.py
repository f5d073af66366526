"""Every module that ``structattn.studies`` had can still be imported by that name, and is the module of
today.
"""

import importlib
import pickle
import subprocess
import sys

import pytest

import structattn_lab
from structattn_lab.old_imports import MOVED, add_old_names

# The modules of structattn.studies in the last commit that had it (9a436f6), by package.
OLD = {
    "": """
        budgets cache_sizes compare config_file decode_time durations environment evaluate folders forecast
        generate grid interrupt listings octaves old_folders recipe settings tied uptrain
    """,
    "analysis": """
        coordinate_check coordinate_models fits frontier matrix_examples model_selection scaling_law
    """,
    "baselines": "delta key_value layer mla pooled recent tables tpa",
    "data": "plain_text series series_file series_table splits text_data time_steps",
    "data.corpus": "corpus documents preparation shards tokenizers",
    "planning": "activations parallel_time plan plan_table sequence",
    "records": "common comparison fits mup run sweep",
    "report": """
        cache_map comparison fits mup numbers page pages plot rows runs_csv scaling selection sweep table
    """,
    "report.figures": "by_position cache_map comparison curves examples fits mup octaves scaling selection sweep",
    "runner": "base job local ray train_all",
    "sweep": "halving plan space sweep trials",
    "tasks": "base registry",
    "tasks.chronos": "figures kernel_synth model presets scores task",
    "tasks.forecast": "baseline_models baselines choice data figures future intervals kept presets task",
    "tasks.icl_regression": "baselines figures presets prompts task",
    "tasks.nearest_neighbor": "figures model presets task",
    "tasks.recall": "figures presets sequences task",
    "tasks.text": "details figures presets task",
    "tasks.uptraining": "card config figures memory presets recall student students taps task teacher",
    "training": """
        build checkpoint config division finished identity loop memory processes run schedule sharding speed
        step trackers
    """,
}
NAMES = [".".join(filter(None, (package, name))) for package, names in OLD.items() for name in ("", *names.split())]


def test_every_old_module_is_imported() -> None:
    add_old_names()
    missing = []
    for name in NAMES:
        try:
            importlib.import_module(f"structattn.studies.{name}".rstrip("."))
        except ModuleNotFoundError as error:
            missing.append(f"{name}: {error}")
    assert not missing
    assert set(MOVED) <= set(NAMES)


def test_an_old_name_is_the_module_of_today_and_changes_nothing_of_it() -> None:
    add_old_names()
    for name in ("tasks.text", "tasks.text.task", "records.comparison"):
        today = importlib.import_module(f"structattn_lab.{name}")
        assert importlib.import_module(f"structattn.studies.{name}") is today
        assert today.__name__ == today.__spec__.name == f"structattn_lab.{name}"
    from structattn.studies.compare import compare
    from structattn.studies.settings import apply_overrides
    from structattn.studies.training.config import TrainingConfig

    import structattn_lab.compare.comparison
    import structattn_lab.settings.training

    assert compare is structattn_lab.compare.comparison.compare
    assert apply_overrides.__module__ == "structattn_lab.settings.overrides"
    assert TrainingConfig is structattn_lab.settings.training.TrainingConfig
    config = TrainingConfig(steps=1, batch_size=1, learning_rate=0.1)
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_old_module_that_was_divided_has_all_names() -> None:
    add_old_names()
    from structattn.studies.analysis.coordinate_check import CheckConfig, mup_check
    from structattn.studies.report.page import Figure, Origin, Section
    from structattn.studies.training.trackers import Curves, check_tracker

    assert mup_check.__module__ == "structattn_lab.compare.mup_check"
    assert CheckConfig.__module__ == "structattn_lab.analysis.coordinate_check"
    assert Figure.__module__ == "structattn_lab.report.page"
    assert Origin.__module__ == Section.__module__ == "structattn_lab.report.report"
    assert Curves.__module__ == "structattn_lab.training.trackers"
    assert check_tracker.__module__ == "structattn_lab.settings.trackers"
    with pytest.raises(ImportError, match="nothing"):
        from structattn.studies.training.trackers import nothing  # noqa: F401


def test_a_class_by_its_name_until_02_is_that_of_today() -> None:
    add_old_names()
    import structattn.studies.data.corpus.corpus as old

    from structattn_lab.data import corpus

    assert corpus.Tokens is corpus.corpus.Tokens is old.Tokens is corpus.SplitTokens


def test_what_never_was_is_not_imported() -> None:
    add_old_names()
    with pytest.raises(ModuleNotFoundError, match=r"structattn\.studies\.nothing"):
        importlib.import_module("structattn.studies.nothing")


@pytest.mark.full
def test_the_old_names_need_the_lab_only_to_be_imported_first() -> None:
    code = (
        "import structattn_lab.tasks.registry; from structattn.studies.recipe import Recipe; print(Recipe.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == f"{structattn_lab.__name__}.settings.recipe", done.stderr
