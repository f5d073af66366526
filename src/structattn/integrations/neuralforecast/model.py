"""The model ``StructTransformer``, and ``AutoStructTransformer`` for hyperparameter search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from structattn.checks import check_int, describe, quoted
from structattn.errors import ConfigError, MissingDependencyError
from structattn.extras import install_command
from structattn.layers.rotary import Rotary
from structattn.models.forecaster import Forecaster

try:
    from neuralforecast.common._base_auto import BaseAuto
    from neuralforecast.common._base_model import BaseModel
    from neuralforecast.core import MODEL_FILENAME_DICT
    from neuralforecast.losses.pytorch import MAE, HuberIQLoss, IQLoss
    from ray import tune
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"structattn.integrations.neuralforecast needs neuralforecast >= 3.3 ({error}): {install_command('forecast')}"
    ) from error

WindowsBatch = Mapping[str, Tensor]


class StructTransformer(BaseModel):  # type: ignore[misc]
    """A neuralforecast model around ``Forecaster``: patches or single steps as tokens, structured attention
    among them.

    Univariate; several series are separate rows, as in PatchTST. Arguments that are not listed below are
    those of neuralforecast and mean what they mean in its ``PatchTST``.

    Args:
        h: forecast steps.
        input_size: look-back steps; below 1 it is 3 h, with neuralforecast's warning.
        attention: spec of the layers, such as ``"mlr:8|4|2|2"``, or a list ``"[standard,window:128]"``; ranks
            sum to the head dimension. Blocks are halved from the number of tokens. Default ``"mlr:8|4|2|2"``,
            for heads of 16.
        patch_length: steps per token; 1 makes every step a token. Default 16.
        stride: steps between the starts of tokens. Default ``None``: half a patch, at least 1.
        embed_dim, num_layers, num_heads, dropout: of the trunk. Defaults 64, 2, 4, 0.1.
        rotary: rotary positions as text (``"low_far"``, see ``Rotary.parse``). Default ``None``: learned
            positions.
        head_tokens: the number of last tokens that the head reads. Default ``None``: all.
        instance_norm: centre every window on its last value, divide it by its standard deviation, and
            transform the forecast back, so that steps that ``available_mask`` or padding marks as missing
            have no part in it. Default ``None``: yes, unless there is no target in the input, or the loss
            does not take values of the series but parameters of a distribution, or the input of an implicit
            quantile network (``IQLoss``).
        loss: default ``None``: MAE.
        scaler_type: default ``None``: ``"identity"``, and ``"standard"`` with those losses.

    Raises:
        ConfigError: the spec is unknown or does not fit the width, a patch is longer than the input, or an
            option is out of range.

    Source: Nie et al. 2023 for the patches, Kuang et al. 2025 for the attention.
    """

    EXOGENOUS_FUTR = True
    EXOGENOUS_HIST = True
    EXOGENOUS_STAT = True
    EXOGENOUS_CAT = True
    MULTIVARIATE = False
    RECURRENT = False

    def __init__(
        self,
        h: int,
        input_size: int,
        attention: str = "mlr:8|4|2|2",
        *,
        stat_exog_list: list[str] | None = None,
        hist_exog_list: list[str] | None = None,
        futr_exog_list: list[str] | None = None,
        exclude_insample_y: bool = False,
        patch_length: int = 16,
        stride: int | None = None,
        embed_dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
        rotary: str | None = None,
        head_tokens: int | None = None,
        instance_norm: bool | None = None,
        loss: nn.Module | None = None,
        valid_loss: nn.Module | None = None,
        max_steps: int = 1000,
        learning_rate: float = 1e-3,
        num_lr_decays: int = -1,
        early_stop_patience_steps: int = -1,
        val_check_steps: int = 100,
        batch_size: int = 32,
        valid_batch_size: int | None = None,
        windows_batch_size: int = 128,
        inference_windows_batch_size: int = 128,
        start_padding_enabled: bool = False,
        training_data_availability_threshold: float | list[float] = 0.0,
        step_size: int = 1,
        scaler_type: str | None = None,
        random_seed: int = 1,
        drop_last_loader: bool = False,
        alias: str | None = None,
        optimizer: type[Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        lr_scheduler: type[Any] | None = None,
        lr_scheduler_kwargs: dict[str, Any] | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        sizes = {"h": h, "patch_length": patch_length, "embed_dim": embed_dim}
        sizes |= {"num_layers": num_layers, "num_heads": num_heads}
        _check_arguments(sizes if stride is None else {**sizes, "stride": stride}, input_size, loss, valid_loss)
        # These arguments are saved with the model under these names, so defaults are set before the base
        # class reads them.
        loss = MAE() if loss is None else loss
        outputs_values = not (loss.is_distribution_output or isinstance(loss, IQLoss | HuberIQLoss))
        if scaler_type is None:
            scaler_type = "identity" if outputs_values else "standard"
        super().__init__(
            h=h,
            input_size=input_size,
            stat_exog_list=stat_exog_list,
            hist_exog_list=hist_exog_list,
            futr_exog_list=futr_exog_list,
            exclude_insample_y=exclude_insample_y,
            loss=loss,
            valid_loss=valid_loss,
            max_steps=max_steps,
            learning_rate=learning_rate,
            num_lr_decays=num_lr_decays,
            early_stop_patience_steps=early_stop_patience_steps,
            val_check_steps=val_check_steps,
            batch_size=batch_size,
            valid_batch_size=valid_batch_size,
            windows_batch_size=windows_batch_size,
            inference_windows_batch_size=inference_windows_batch_size,
            start_padding_enabled=start_padding_enabled,
            training_data_availability_threshold=training_data_availability_threshold,
            step_size=step_size,
            scaler_type=scaler_type,
            random_seed=random_seed,
            drop_last_loader=drop_last_loader,
            alias=alias,
            optimizer=optimizer,
            optimizer_kwargs=optimizer_kwargs,
            lr_scheduler=lr_scheduler,
            lr_scheduler_kwargs=lr_scheduler_kwargs,
            dataloader_kwargs=dataloader_kwargs,
            **trainer_kwargs,
        )
        self._check_reads(attention, exclude_insample_y, instance_norm, outputs_values)
        self.network = Forecaster(
            attention,
            look_back=self.input_size,
            horizon=h,
            patch_length=patch_length,
            stride=max(1, patch_length // 2) if stride is None else stride,
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            dropout=dropout,
            rotary=None if rotary is None else Rotary.parse(rotary),
            num_outputs=self.loss.outputsize_multiplier,
            num_historic=self.hist_exog_size,
            num_future=self.futr_exog_size,
            num_static=self.stat_exog_size,
            head_tokens=head_tokens,
            instance_norm=outputs_values and not exclude_insample_y if instance_norm is None else instance_norm,
            marks_missing=True,
        )

    def _check_reads(
        self, attention: object, exclude_insample_y: bool, instance_norm: bool | None, outputs_values: bool
    ) -> None:
        """Raises ``ConfigError`` unless the network has something to read, and its norm can be undone."""
        if not isinstance(attention, str):
            raise ConfigError(f"attention must be a spec such as 'mlr:8|4|2|2', got {quoted(attention)}")
        if exclude_insample_y and not self.hist_exog_list + self.futr_exog_list + self.stat_exog_list:
            raise ConfigError(
                "exclude_insample_y leaves the model nothing to read: name covariates in hist_exog_list, "
                "futr_exog_list or stat_exog_list"
            )
        if instance_norm and (exclude_insample_y or not outputs_values):
            raise ConfigError(
                "instance_norm puts the last value of the target back on the forecast: without the target, or with a "
                "loss for which the model puts out other numbers than values, leave it at None (loss "
                f"{type(self.loss).__name__}, exclude_insample_y={exclude_insample_y})"
            )

    def forward(self, windows_batch: WindowsBatch) -> Tensor:
        """neuralforecast's batch of windows to (B, h, outputs of the loss)."""
        out: Tensor = self.network(
            windows_batch["insample_y"].squeeze(-1),
            historic=windows_batch["hist_exog"],
            future=windows_batch["futr_exog"],
            static=windows_batch["stat_exog"],
            observed=windows_batch["insample_mask"].squeeze(-1) > 0,
        )
        return out


def _check_arguments(sizes: dict[str, int], input_size: int, loss: object, valid_loss: object) -> None:
    for name, value in sizes.items():
        check_int(name, value, minimum=1)
    check_int("input_size", input_size)  # neuralforecast takes three horizons for any below 1
    for name, given in (("loss", loss), ("valid_loss", valid_loss)):
        if given is not None and not hasattr(given, "outputsize_multiplier"):
            raise ConfigError(f"{name} must be a loss of neuralforecast.losses.pytorch or None, got {describe(given)}")


class AutoStructTransformer(BaseAuto):  # type: ignore[misc]
    """Searches settings of ``StructTransformer``, with Ray Tune or Optuna, as the Auto models of
    neuralforecast do.

    Args:
        h, loss, valid_loss, search_alg, num_samples, refit_with_val, verbose, alias, backend, callbacks: see
            neuralforecast's ``BaseAuto``; ``loss`` is MAE by default, ``backend`` ``"ray"``.
        config: the search space: a dict of Ray's distributions, or with ``backend="optuna"`` a function of
            the trial. Default ``None``: ``get_default_config(h, backend)``.
        **options: further options of ``BaseAuto`` in the version at hand, such as ``ray_options`` and
            ``time_budget``.
    """

    default_config: ClassVar[dict[str, Any]] = {
        "input_size_multiplier": [2, 4, 8],
        "h": None,
        "attention": tune.choice(["standard", "mlr:8|8", "mlr:8|4|2|2", "mlr:4|4|4|4", "bilinear-btt:1"]),
        "patch_length": tune.choice([8, 16, 24]),
        "num_layers": tune.choice([1, 2, 3]),
        "dropout": tune.choice([0.0, 0.1, 0.2]),
        "learning_rate": tune.loguniform(1e-4, 1e-2),
        "scaler_type": tune.choice(["identity", "robust", "standard"]),
        "max_steps": tune.choice([500, 1000, 2000]),
        "batch_size": tune.choice([32, 64, 128]),
        "windows_batch_size": tune.choice([64, 128, 256]),
        "loss": None,
        "random_seed": tune.randint(1, 20),
    }

    def __init__(
        self,
        h: int,
        loss: nn.Module | None = None,
        valid_loss: nn.Module | None = None,
        config: dict[str, Any] | Callable[[Any], dict[str, Any]] | None = None,
        search_alg: Any = None,
        num_samples: int = 10,
        refit_with_val: bool = False,
        verbose: bool = False,
        alias: str | None = None,
        backend: str = "ray",
        callbacks: list[Any] | None = None,
        **options: Any,
    ) -> None:
        loss = MAE() if loss is None else loss
        if config is None:
            config = self.get_default_config(h=h, backend=backend)
        if search_alg is not None:
            options["search_alg"] = search_alg
        super().__init__(
            cls_model=StructTransformer,
            h=h,
            loss=loss,
            valid_loss=valid_loss,
            config=config,
            num_samples=num_samples,
            refit_with_val=refit_with_val,
            verbose=verbose,
            alias=alias,
            backend=backend,
            callbacks=callbacks,
            **options,
        )

    @classmethod
    def get_default_config(cls, h: int, backend: str, n_series: int | None = None) -> Any:
        """The search space for a horizon: patches that fit in the shortest input; a dict, or for Optuna a
        function of the trial.

        Args:
            h: forecast steps; inputs are multiples of them.
            backend: ``"ray"`` or ``"optuna"``.
            n_series: unused, as in the other univariate models.
        """
        config = cls.default_config.copy()
        sizes = [h * multiplier for multiplier in config.pop("input_size_multiplier")]
        config["input_size"] = tune.choice(sizes)
        config["patch_length"] = tune.choice([n for n in config["patch_length"].categories if n <= min(sizes)] or [1])
        config["step_size"] = tune.choice([1, h])
        return cls._ray_config_to_optuna(config) if backend == "optuna" else config


# What neuralforecast saves and loads is found in this table by the lower-case name of the class.
MODEL_FILENAME_DICT.update(structtransformer=StructTransformer, autostructtransformer=StructTransformer)
