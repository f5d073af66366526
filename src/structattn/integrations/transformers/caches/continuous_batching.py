"""Continuous batching of transformers (``generate_batch``, its server) with a paged cache that has levels.

transformers has no extension point for another cache, so this file subclasses its manager and its batch
processor, and gives its scheduler a cache with the methods that it calls. All that is not public there is
used here and nowhere else. Tried on 5.20 to 5.24.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel

from structattn.cache.paged import (
    PagedCache,
    PagedLayerShape,
    PagePool,
    RequestCaches,
    RequestPool,
    ShapeProbe,
    Tokens,
)
from structattn.cache.storage import storage_of_layers
from structattn.errors import CacheError, ConfigError, MissingDependencyError
from structattn.integrations.transformers.caches.model_cache import storage_of
from structattn.memory import free_memory

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    raise MissingDependencyError(
        f"continuous batching with levels needs transformers 5.20 or later, and {transformers.__version__} is "
        "installed: pip install -U 'transformers>=5.20'; generate() takes prompts as one batch, padded on the left"
    )

from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

# of the two kinds of layers that transformers' input buffers know, the one that all of ours pass for
_GROUP = "full_attention"
_MAX_BATCH_TOKENS = 8192  # transformers' own default


class _Allocator:
    """What transformers asks of each kind of layers: lengths of keys, and pages that a request lacks."""

    index = 0
    layer_type = _GROUP
    supports_block_table = False
    read_trash_index = write_trash_index = 0  # keys are not read and written by index

    def __init__(self, pool: PagePool | RequestPool) -> None:
        self._pool = pool
        self.block_table: dict[str, list[int]] = {}  # what would be copied to the CPU

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return self._pool.missing(request_id, past_length, query_length)


class _Sectors:
    """Stands for the sectors of transformers' pool, which ours has not: all pages are of one size, and free
    at once.
    """

    def try_to_free_sectors(self) -> None:
        pass


class _Scheduled:
    """What transformers' scheduler and batch processor call, of a cache with a pool.

    Attributes:
        pages: the pool.
        max_batch_tokens: of one call of the model.
        num_blocks: pages of the pool.
        use_prefix_sharing: whether a request begins with what an earlier one has computed.
    """

    max_blocks_per_request = max_decode_fast_path_length = 0
    # Keys are not read by index: no request takes anything of the budget for it.
    read_cache_limit = 0
    max_tokens_read = 1
    pages: PagePool | RequestPool
    use_prefix_sharing = False

    def serve(self, device: torch.device, *, max_batch_tokens: int, allow_block_sharing: bool) -> None:
        """Sets what a scheduler reads, on the device of the model."""
        self.allow_block_sharing = allow_block_sharing
        self.pool = _Sectors()
        self.max_batch_tokens = max_batch_tokens
        self.num_blocks = self.pages.num_pages
        self.bytes_per_sector = self.pages.page_nbytes
        self.device = device
        self.cache_allocators = {_GROUP: _Allocator(self.pages)}

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        past, count = state.current_len(), request_len
        if state.num_children:  # its last token is computed after it was forked
            count = max(1, min(count, len(state.remaining_prefill_tokens) - 1))
        if dry_run:
            return self.pages.missing(state.request_id, past, count) <= self.pages.num_available
        return self.pages.reserve(state.request_id, past, count)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        free = self.pages.num_available
        for count, needed in enumerate(list_blocks_needed):
            free -= needed[_GROUP]
            if free < 0:
                return count
        return len(list_blocks_needed)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.pages.free(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        self.pages.free_all()
        self.pages.forget()  # the model may have been trained before the next session

    reset = free_all_requests

    def compute_free_capacity(self, relative: bool = True) -> float:
        free = self.pages.num_available
        return free / self.num_blocks if relative else free * self.bytes_per_sector

    def extend_read_and_write_indices(self, *_: Any) -> None:
        """Nothing: the processor says in ``step`` which requests there are."""

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        return 0

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {}  # ``step`` notes them

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Nothing: see ``count_new_complete_blocks``."""

    def new_tokens(self, state: RequestState, count: int) -> Tokens:
        """The last ``count`` tokens that a request has processed."""
        return Tokens(state.request_id, state.current_len() - count, count)

    def evict_cached_blocks(self) -> bool:
        return False  # they count as free, and who needs one takes it

    def prepare_fork_request(self, src_state: RequestState, dst_req_ids: list[str], copies: object) -> list[str]:
        forked: list[str] = []
        for name in dst_req_ids:
            if not self.allow_block_sharing or not self.pages.fork(src_state.request_id, name, src_state.current_len()):
                break  # transformers computes those that are left from their prompt
            forked.append(name)
        return forked

    def perform_cache_copy(self, copies: object) -> None:
        """Nothing: ``prepare_fork_request`` has copied."""


class ServedCache(_Scheduled, PagedCache):
    """A ``PagedCache`` for transformers' scheduler; arguments as there, and of ``_Scheduled.serve``."""

    pages: PagePool

    def __init__(self, layers: list[PagedLayerShape], pages: PagePool, **options: Any) -> None:
        super().__init__(layers, pages)
        self.serve(pages.memory.device, **options)
        self.use_prefix_sharing = self.allow_block_sharing

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        return self.pages.begin(request_id, prompt_ids) if self.use_prefix_sharing else 0

    def new_tokens(self, state: RequestState, count: int) -> Tokens:
        """See ``_Scheduled``."""
        tokens, end = super().new_tokens(state, count), state.current_len()
        if not self.use_prefix_sharing or not len(self.pages.prefixes.lengths(end - count, end)):
            return tokens
        return replace(tokens, text=(state.initial_tokens + state.generated_tokens)[:end])


class ServedRequests(_Scheduled, RequestCaches):
    """``RequestCaches`` for transformers' scheduler: of models that choose tokens; as ``ServedCache``."""

    pages: RequestPool

    def __init__(self, layers: list[PagedLayerShape], pages: RequestPool, device: torch.device, **options: Any) -> None:
        super().__init__(layers, pages)
        self.serve(device, **options)

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        # What a request that is computed again had generated, it computes as it did then.
        self.pages.expect(state.request_id, state._true_initial_tokens or len(state.initial_tokens))
        return super().can_store_request_tokens(state, request_len, dry_run)


def _children(state: RequestState) -> list[RequestState]:
    """The other answers to the prompt of a request, which is not to be forked any more, as requests."""
    count, state.num_children = state.num_children, 0
    children = [state.create_equivalent_initial_request() for _ in range(count)]
    for number, child in enumerate(children):
        child.request_id = f"{state.request_id}__child#{number}"
    return children


class _Lenient:
    """What goes before transformers' schedulers: one request ends where they end the manager, and with it all
    requests.

    Attributes:
        refuse: tells a request, by its state, why it ends.
    """

    refuse: Callable[[RequestState, Exception], None]

    def add_waiting_request(self: Any, state: RequestState) -> None:
        length = len(state.initial_tokens)
        if not length:
            self.refuse(state, ConfigError("a prompt needs at least one token, and this one has none"))
        elif (needed := self.cache.pages.needed(length)) > self.cache.num_blocks:
            self.refuse(state, self._too_large(length, needed))
        else:
            super().add_waiting_request(state)  # type: ignore[misc]

    def _too_large(self: Any, length: int, needed: int) -> CacheError:
        return CacheError(
            f"{length} tokens need {needed} pages of the cache, which has {self.cache.num_blocks}: give it more memory "
            "(num_blocks or max_memory_percent of ContinuousBatchingConfig)"
        )

    def schedule_batch(self: Any, token_budget: int, cache_budget: int) -> Any:
        if not self.active_requests:  # the one for which new ones were held back may have been cancelled
            self.block_new_requests = False
        while True:
            batch = super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
            # Of several active requests, transformers makes some give their pages to the others.
            if batch[0] is not None or len(self.active_requests) > 1:
                return batch
            # A chunk may need more pages than the whole prompt: at its end, a block may be full that has
            # ended by then.
            state = next(iter((self.active_requests or self.waiting_requests).values()))
            count = min(len(state.remaining_prefill_tokens) or 1, token_budget)
            pages = self.cache.pages
            needed = pages.held(state.request_id) + pages.missing(state.request_id, state.position_offset, count)
            self.refuse(state, self._too_large(state.position_offset + count, needed))
            self.finish_request(state.request_id)
            if self.waiting_requests.pop(state.request_id, None) is not None:
                self.waiting_requests_order.remove(state.request_id)
            self.block_new_requests = False

    def _schedule_request(self: Any, state: RequestState, request_tokens: list[int], *rest: Any) -> None:
        if len(request_tokens) == 1:  # transformers would compute none of them before it forks
            for child in _children(state):
                self.add_waiting_request(child)
        super()._schedule_request(state, request_tokens, *rest)  # type: ignore[misc]


class _Processor(ContinuousBatchProcessor):  # type: ignore[misc]
    """Tells the cache which tokens the next call of the model has."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scheduler.refuse = self._refuse

    def _refuse(self, state: RequestState, error: Exception) -> None:
        """Ends one request, with all of its answers."""
        for request in (state, *_children(state)):
            self._handle_request_error(error, request)

    def _generation_step(self, model: PreTrainedModel) -> None:
        # What a request has processed counts the tokens of this call already.
        batch = self.inputs_and_outputs.requests_in_batch
        requests = [self.cache.new_tokens(request.state, request.query_length) for request in batch]
        with self.cache.step(requests):
            stream = self.inputs_and_outputs.compute_stream
            if stream is not None:  # pages were set to zero or copied on another one
                stream.wait_stream(torch.accelerator.current_stream(stream.device))
            super()._generation_step(model)


class LevelBatchingManager(ContinuousBatchingManager):  # type: ignore[misc]
    """transformers' manager, with a cache that has levels; arguments as there.

    Raises:
        ConfigError: an option that needs transformers' own cache, or a model with layers that are no
            attention.
    """

    def __init__(self, model: PreTrainedModel, generation_config: Any, config: Any, workload_hints: Any) -> None:
        try:
            super().__init__(model, generation_config, config, workload_hints)
        except ValueError as error:  # it knows no chunks and no states beside keys
            if "cb_config." in str(error):
                raise ConfigError(
                    f"transformers refuses this ContinuousBatchingConfig ({error}): give another value"
                ) from error
            raise ConfigError(
                f"{type(model).__name__} cannot generate with continuous batching ({error}): use generate()"
            ) from error
        settings = self.continuous_batching_config
        refused = {
            "use_async_batching": settings.use_async_batching,
            "use_cuda_graph": any(settings.cuda_graph_booleans),
            "varlen_compile_config": settings.varlen_compile_config,
            "cpu_offload_space": settings.cpu_offload_space != 0,
        }
        for name, value in refused.items():
            if value:
                raise ConfigError(f"continuous batching with levels has no {name}: leave it at its default")
        if self.distributed_helper.tp_size > 1:
            raise ConfigError(
                "continuous batching with levels runs on one device: load the model without tensor parallelism"
            )
        layers, self._dtype = _probed(model)
        storages = storage_of_layers(storage_of(model.config), len(layers))
        self._layers = [replace(layer, storage=storage) for layer, storage in zip(layers, storages, strict=True)]

    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """Nothing: the attention of the model is given by its config."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """transformers' own; what was computed before is not shared with requests that come later, since the
        weights may be others.
        """
        with super().pause():
            try:
                yield
            finally:  # also where a training step broke off after it had changed weights
                self.batch_processor.cache.pages.forget()

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *rest: Any, **options: Any
    ) -> str | None:
        """transformers' own.

        Raises:
            ConfigError: a request with this id has not ended. The two would write into one cache.
        """
        if request_id is not None and self._is_live(request_id):
            raise ConfigError(_in_use(request_id))
        added: str | None = super().add_request(input_ids, request_id, *rest, **options)
        return added

    def register_result_handler(self, request_id: str, callback: Callable[..., object]) -> None:
        """transformers' own; raises ``ConfigError`` where it would take the results of another request, as
        ``add_request`` does.
        """
        if request_id in self.output_router.result_handlers and self._is_live(request_id):
            raise ConfigError(_in_use(request_id))
        super().register_result_handler(request_id, callback)

    def _is_live(self, request_id: str) -> bool:
        """Whether a request with this id waits or is computed."""
        with self.input_queue.mutex:  # the thread of the scheduler empties it
            if any(state.request_id == request_id for state in self.input_queue.queue):
                return True
        if self.batch_processor is None:
            return False
        scheduler = self.batch_processor.scheduler
        return request_id in scheduler.active_requests or request_id in scheduler.waiting_requests

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if isinstance(self.batch_processor, ContinuousBatchProcessor):  # of an earlier session
            self.batch_processor.reset()
            return self.batch_processor
        options = self.continuous_batching_config
        cache = self._cache()
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(options, cache.num_blocks, cache.max_batch_tokens)
        if options.scheduler_type not in SCHEDULER_MAPPING:
            raise ConfigError(
                f"scheduler_type must be one of {sorted(SCHEDULER_MAPPING)}, got {options.scheduler_type!r}"
            )
        # transformers reads from the implementation whether to make masks of all pairs of tokens: ours needs
        # none.
        config = copy.copy(self.model.config.get_text_config())
        config._attn_implementation = "structurized"
        return _Processor(
            cache=cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=options,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=type("Scheduler", (_Lenient, SCHEDULER_MAPPING[options.scheduler_type]), {})(
                cache, options.safety_margin, options.max_requests_per_batch
            ),
            distributed_helper=self.distributed_helper,
        )

    def _cache(self) -> ServedCache | ServedRequests:
        """A cache with as many bytes as that of transformers has with the same options."""
        options, device = self.continuous_batching_config, self.model.device
        if options.num_blocks is None:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
            if free is None:
                raise ConfigError(
                    "the system does not say how much memory is free: give ContinuousBatchingConfig num_blocks"
                )
            nbytes = int(free * options.max_memory_percent)
        else:
            numbers = sum(heads * dim for layer in self._layers for heads, dim in (layer.keys, layer.values))
            nbytes = options.num_blocks * options.page_size * numbers * self._dtype.itemsize
        of_pool: dict[str, Any] = {"nbytes": nbytes, "dtype": self._dtype, "device": device}
        served: dict[str, Any] = {
            "max_batch_tokens": options.max_batch_tokens or _MAX_BATCH_TOKENS,
            "allow_block_sharing": options.allow_block_sharing,
        }
        if any(layer.chooses_tokens for layer in self._layers):
            requests = RequestPool(self._layers, page_size=options.page_size, **of_pool)
            return ServedRequests(self._layers, requests, device, **served)
        length = getattr(self.model.config, "max_position_embeddings", None)
        pages = PagePool(self._layers, most_slots=options.page_size, length=length, **of_pool)
        return ServedCache(self._layers, pages, **served)


def _in_use(request_id: str) -> str:
    return f"the request id {request_id!r} is in use: give another one, or wait until its request has ended"


@torch.no_grad()
def _probed(model: PreTrainedModel) -> tuple[list[PagedLayerShape], torch.dtype]:
    """What the cache of a model keeps, and in which dtype: a call with one token shows it."""
    probe, config = ShapeProbe(), model.config.get_text_config()
    first = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    token = first + 1 if getattr(config, "pad_token_id", None) == 0 else first
    packed = model(input_ids=token, position_ids=first, use_cache=False, is_causal=True, cache=probe).logits
    count = config.num_hidden_layers
    if sorted(probe.layers) != list(range(count)):
        raise ConfigError(
            f"{type(model).__name__} has {count} layers, and those with the numbers {sorted(probe.layers)} asked for "
            "the cache of continuous batching: "
            "the others keep something else; use generate()"
        )
    if len(probe.places) != 1:
        raise ConfigError(
            "continuous batching with levels keeps keys and values in one dtype on one device, and this model has "
            f"{sorted(map(str, probe.places))}"
        )
    expected = model(input_ids=token, use_cache=False).logits
    if (expected - packed).norm() > 0.05 * expected.norm():
        raise ConfigError(
            f"the first token of {type(model).__name__} is not at position 0, where continuous batching of "
            "transformers puts it (RoBERTa counts from "
            "its padding token on): use generate()"
        )
    ((dtype, _),) = probe.places
    return [probe.layers[index] for index in range(count)], dtype


def manager(
    model: PreTrainedModel, generation_config: Any, continuous_batching_config: Any, workload_hints: Any
) -> ContinuousBatchingManager:
    """What ``init_continuous_batching`` returns: the manager that was kept for this model, or a new one."""
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(kept, ContinuousBatchingManager):
        return kept
    generation = model.generation_config if generation_config is None else generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = -1  # none, to transformers' manager
    options = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
    return LevelBatchingManager(model, generation, options, workload_hints)
